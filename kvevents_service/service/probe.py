"""Whether a service can do its work now: steps that really go through its parts, with a deadline.

Every service has the step `journal`: the publishers have sent all that was numbered. A sidecar has those of
`probe_steps` before it. A probe leaves no trace: it numbers nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import Final

import msgspec

from kvevents_service.errors import KvEventsError
from kvevents_service.service.publisher import Publisher

DEADLINE_S: Final = 2.0
POLL_S: Final = 0.002

Step = Callable[[], Awaitable[None]]


class Probed(msgspec.Struct, frozen=True):
    """What a probe found. seconds: of each step it came to. failed: the step that did not end well, and why."""

    ready: bool
    seconds: dict[str, float]
    failed: str | None = None
    why: str | None = None


class Probe:
    """Probes when asked; those who ask meanwhile get the same answer. steps: before that of the journals."""

    def __init__(
        self,
        publishers: Sequence[Publisher],
        *,
        is_draining: Callable[[], bool],
        steps: Mapping[str, Step] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._publishers = publishers
        self._is_draining = is_draining
        self._deadline_s = deadline_s
        self._running: asyncio.Task[Probed] | None = None
        self._steps: dict[str, Step] = {**(steps or {}), "journal": self._journal}

    def __repr__(self) -> str:
        return f"<Probe of {', '.join(self._steps)}>"

    async def ask(self) -> Probed:
        """Ends within its deadline. Whoever asks may leave; the probe goes on for the others."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._probe())
        return await asyncio.shield(self._running)

    async def _probe(self) -> Probed:
        seconds: dict[str, float] = {}
        if self._is_draining():
            return Probed(False, seconds, "open", "it is draining")
        step = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                for step, perform in self._steps.items():
                    start = perf_counter()
                    await perform()
                    seconds[step] = round(perf_counter() - start, 6)
        except TimeoutError:
            return Probed(False, seconds, step, f"not done within {self._deadline_s:g} s")
        except (OSError, EOFError, KvEventsError) as error:
            return Probed(False, seconds, step, str(error))
        return Probed(True, seconds)

    async def _journal(self) -> None:
        """Each publisher has come round since now, and has nothing left of what was numbered before."""
        asked = [(one, one.turns, one.journal.next_seq) for one in self._publishers]
        for publisher, turns, numbered in asked:
            publisher.wake()
            while (  # noqa: ASYNC110 - the publisher knows nothing of probes
                publisher.turns == turns or publisher.journal.unsent_from < numbered
            ):
                await asyncio.sleep(POLL_S)
