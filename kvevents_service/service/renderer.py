"""Answers for late readers: a snapshot is cut when one asks, and rendered part by part."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from kvevents_service.core.replay import Recovery, Reply
from kvevents_service.core.telling import Teller
from kvevents_service.errors import WireError
from kvevents_service.service.outputs import Sink
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.rarely import is_told

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
RETRY_S: Final = 0.01


class Renderer:
    """What every replay and snapshot endpoint asks; lookups come in between two parts."""

    def __init__(self, recovery: Recovery, teller: Teller, publisher: Publisher) -> None:
        self.recovery = recovery
        self.teller = teller
        publisher.tell = teller.tell
        self.failed = 0
        self.rota = publisher.rota
        self._publisher = publisher
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Renderer of {self.recovery!r}>"

    @property
    def is_empty(self) -> bool:
        """Nothing has ever been numbered."""
        return self.recovery.journal.next_seq == 0

    def answer(self, number: int, output: Sink) -> Reply | None:
        """The reply to a request of this output for `number` and all after it; None: ask again soon."""
        reply = self.recovery.answer(number, output.encoding, exact=output.exact)
        self._woken()
        return reply

    def ended(self, reply: Reply | None, output: Sink) -> None:
        """A request is over, None: unanswered. A reader that asks once and has not got all of it is told live."""
        if output.exact and (reply is None or not reply.complete):
            self.teller.ask(output.encoding)
            self._wake.set()

    def whole(self, output: Sink) -> Reply | None:
        """The state after the newest number; None: ask again soon."""
        reply = self.recovery.whole(output.encoding)
        self._woken()
        return reply

    def _woken(self) -> None:
        """There may be a snapshot to render, and empty batches to send. To wake the publisher delays its beat."""
        self._wake.set()
        journal = self.recovery.journal
        if journal.unsent_from < journal.next_seq:
            self._publisher.wake()

    async def run(self) -> None:
        """Render until cancelled."""
        while True:
            self.teller.poll()
            if self.recovery.rendering is not None:
                await self.rota.run(self._render)
                continue
            if self.teller.rendered:
                self._publisher.wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, max(RETRY_S, self.teller.wait_s))):
                    await self._wake.wait()
            self._wake.clear()
            self.recovery.forget_old()

    def _render(self) -> bool:
        """A part more; False if that was all of it."""
        snapshot = self.recovery.rendering
        assert snapshot is not None, "called while one is rendered"
        try:
            snapshot.render_next()
        except Exception as error:
            self.failed += 1
            if is_told(self.failed):
                known, text = isinstance(error, WireError), "no snapshot at %d (%d so far): %s"
                log.error(text, snapshot.upto, self.failed, error, exc_info=None if known else error)
        return not snapshot.done

    def stats(self) -> dict[str, int]:
        return {**self.recovery.stats(), **self.teller.stats(), "snapshots_failed": self.failed}
