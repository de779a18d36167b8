"""How late the event loop is: a timer's lateness, which is what an engine's lookup would have waited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvevents_service.service.histogram import Histogram

INTERVAL_S: Final = 0.1


class LoopLag:
    """Sleeps, and looks how much longer that took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = Histogram()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<LoopLag {self.seconds!r}>"

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.seconds.observe(max(0.0, self._clock() - due))
