"""The snapshots of a pool's slots as they were at one moment, at no cost but for those that left since."""

from __future__ import annotations

from collections.abc import Iterable

from kvevents_service.core.metadata import BlockStoreMeta


class FrozenMetas:
    """Reads the pool's own column. What leaves it is to be saved here before it does."""

    __slots__ = ("__weakref__", "_live", "_saved")

    def __init__(self, live: list[BlockStoreMeta | None]) -> None:
        self._live = live
        self._saved: dict[int, BlockStoreMeta | None] = {}

    def save(self, slots: Iterable[int]) -> None:
        """These are about to change. The first time counts."""
        for slot in slots:
            self._saved.setdefault(slot, self._live[slot])

    def at(self, slot: int) -> BlockStoreMeta | None:
        return self._saved[slot] if slot in self._saved else self._live[slot]

    def part(self, start: int, stop: int) -> list[BlockStoreMeta | None]:
        return [*map(self.at, range(start, stop))] if self._saved else self._live[start:stop]
