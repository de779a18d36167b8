"""How long copies take and how many bytes they move, by direction and tier. Costs a few operations a transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.service.histogram import Histogram


class Route(NamedTuple):
    """What a copy does: its direction (`store`, `load`, ...) and the medium of its tier."""

    direction: str
    medium: str


class Traffic:
    """What has gone one way. seconds: from the decision to the report of the last rank, the wait included."""

    def __init__(self) -> None:
        self.seconds = Histogram()
        self.bytes = self.failed = 0


class _Pending(NamedTuple):
    route: Route
    since: float


class CopyMeter:
    """Every transfer under way, and the sums of those that have ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.traffic: defaultdict[Route, Traffic] = defaultdict(Traffic)
        self._clock = clock
        self._pending: dict[TransferMeta, _Pending] = {}

    def __repr__(self) -> str:
        return f"<CopyMeter pending={len(self._pending)} oldest={self.oldest_s:.3f}>"

    def begin(self, transfer: TransferMeta, medium: str) -> None:
        route = Route(transfer.kind, medium)
        self.traffic[route]
        self._pending[transfer] = _Pending(route, self._clock())

    def end(self, transfer: TransferMeta, block_bytes: int, *, good: bool) -> None:
        """It has ended on every rank. A failed one moved nothing."""
        route, since = self._pending.pop(transfer)
        traffic = self.traffic[route]
        traffic.seconds.observe(self._clock() - since)
        traffic.failed += not good
        traffic.bytes += transfer.blocks * block_bytes if good else 0

    def pending(self, route: Route) -> int:
        return sum(1 for waiting in self._pending.values() if waiting.route == route)

    @property
    def oldest_s(self) -> float:
        """Age of the transfer that has waited longest; 0 without any. They begin in the order of their times."""
        oldest = next(iter(self._pending.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.since
