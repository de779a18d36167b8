"""Answers for late readers: a snapshot is cut when one asks, and rendered a part a turn of the loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from kvevents_service.core.replay import Recovery, Reply
from kvevents_service.errors import WireError
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.rarely import is_told

log = logging.getLogger(__name__)

TICK_S: Final = 1.0


class Renderer:
    """What every replay and snapshot endpoint asks; lookups come in between two parts."""

    def __init__(self, recovery: Recovery, publisher: Publisher) -> None:
        self.recovery = recovery
        self.failed = 0
        self._publisher = publisher
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Renderer of {self.recovery!r}>"

    @property
    def is_empty(self) -> bool:
        """Nothing has ever been numbered."""
        return self.recovery.journal.next_seq == 0

    def answer(self, number: int, output: Output) -> Reply | None:
        """The reply to a request of this output for `number` and all after it; None: ask again soon."""
        start = output.numbers.inward(number)
        if self._is_out_of_reach(start, output):
            self._publisher.rebase(output)
            start = self.recovery.journal.next_seq  # nothing: the reader starts again with what comes live
        distrust = output.numbers.rebased > 0
        reply = self.recovery.answer(start, output.encoding, exact=output.exact, distrust=distrust)
        self._woken()
        return reply

    def whole(self, output: Output) -> Reply | None:
        """The state after the newest number; None: ask again soon."""
        reply = self.recovery.whole(output.encoding)
        self._woken()
        return reply

    def _woken(self) -> None:
        """There may be a snapshot to render, and empty batches to send."""
        self._wake.set()
        self._publisher.wake()

    def _is_out_of_reach(self, start: int, output: Output) -> bool:
        """A reader that takes only what starts there could not be given so many batches."""
        journal = self.recovery.journal
        needs_snapshot = start < journal.whole_from or output.numbers.rebased > 0
        return output.exact and needs_snapshot and journal.next_seq - start > self.recovery.limits.exact_reach

    async def run(self) -> None:
        """Render until cancelled."""
        while True:
            if self.recovery.rendering is not None:
                self._render()
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            self.recovery.forget_old()

    def _render(self) -> None:
        snapshot = self.recovery.rendering
        assert snapshot is not None, "called while one is rendered"
        try:
            snapshot.render_next()
        except WireError as error:
            self.failed += 1
            if is_told(self.failed):
                log.error("no snapshot at %d (%d so far): %s", snapshot.upto, self.failed, error)

    def stats(self) -> dict[str, int]:
        return {**self.recovery.stats(), "snapshots_failed": self.failed}
