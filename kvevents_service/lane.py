"""A lane: one counter that comes over a source, its deadlines, and the fold of what was taken of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvevents_service.core.residency import Residency
from kvevents_service.core.sequence import HoldLimits, Origin, Sequencer, Step
from kvevents_service.subscription import HIGH_WATER_MARK, Request, Timing


class Options(NamedTuple):
    """How all sources of a subscriber are read. See `Subscriber`."""

    observe_topics: bool = False
    high_water_mark: int = HIGH_WATER_MARK
    hold: HoldLimits = HoldLimits()
    timing: Timing = Timing()
    overflow: Literal["wait", "drop"] = "wait"
    stale_after_s: float | None = None
    track: bool = False
    read_tokens: bool = False
    record: Callable[[Sequence[bytes], bool], None] | None = None
    """Is given every message as it came, and whether it is of a replay's reply."""


class Lane:
    """One counter: its sequencer, the request under way, and the fold of what the consumer took."""

    def __init__(self, origin: Origin, *, replay: bool, options: Options) -> None:
        self.sequence = Sequencer(replay=replay, limits=options.hold)
        self.residency = Residency() if options.track else None
        self.request: Request | None = None
        self.settle_in_s = 0.0
        self._timing = options.timing
        self._backoff_s = self.refresh_in_s = options.timing.refresh_s
        self._quiet_s = 0.0
        self.name(origin)

    def name(self, origin: Origin) -> None:
        self.origin = self.sequence.source = origin

    def close_request(self) -> None:
        if self.request is not None:
            self.request.close()
            self.request = None

    def passed(self, seconds: float, idle: bool) -> list[Step]:
        """Time went by; idle: without a live message. What is to be done about it."""
        sequence = self.sequence
        if not sequence.settled and not sequence.replaying and idle:
            self.settle_in_s -= seconds
            if self.settle_in_s <= 0:
                sequence.settle()
        return self._refreshed(seconds) if sequence.distrusted and not sequence.replaying else self._rested(seconds)

    def _refreshed(self, seconds: float) -> list[Step]:
        self.refresh_in_s -= seconds
        if self.refresh_in_s > 0:
            return []
        self._backoff_s = min(2 * self._backoff_s, self._timing.refresh_max_s)
        self.refresh_in_s, self._quiet_s = self._backoff_s, 0.0
        return self.sequence.refresh()

    def _rested(self, seconds: float) -> list[Step]:
        self._quiet_s += seconds
        if self._quiet_s > self._timing.refresh_max_s:
            self._backoff_s = self.refresh_in_s = self._timing.refresh_s
        return []
