"""Slots that nobody has. They are counted, not listed, before they are first taken: a tier opens at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvevents_service.core.column import count_set

_RESERVED = 1


class FreeSlots:
    """Those that came back, the last one first, then those that were never taken, in their order.

    The ones that are reserved at the start are not among them until they are let go.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._back: list[int] = []
        self._next = 0
        """All before it were taken or reserved."""
        self._fresh = capacity
        """How many never were."""
        self._spared, self._reserved = bytearray(), bytearray()
        """1 for each slot that was ever reserved, or is. Empty while none was."""

    def __repr__(self) -> str:
        return f"<FreeSlots {len(self)} of {self._capacity}>"

    def __len__(self) -> int:
        return len(self._back) + self._fresh

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self._back)
        yield from (slot for slot in range(self._next, self._capacity) if not (self._spared and self._spared[slot]))

    def take(self, count: int) -> list[int]:
        """So many, or all there are."""
        kept = max(0, len(self._back) - count)
        taken = self._back[kept:]
        del self._back[kept:]
        taken.reverse()
        short = min(count - len(taken), self._fresh)
        self._fresh -= short
        while short:
            span = self._next_span(short)
            taken += span
            short -= len(span)
        return taken

    def _next_span(self, most: int) -> range:
        """Fresh slots in a row."""
        if not self._spared:
            first, self._next = self._next, self._next + most
            return range(first, self._next)
        first = self._spared.find(0, self._next)
        stop = min(first + most, self._capacity)
        spared = self._spared.find(_RESERVED, first, stop)
        self._next = stop if spared < 0 else spared
        return range(first, self._next)

    def give(self, slots: Iterable[int]) -> None:
        """They are free again; the last one is taken first."""
        self._back += slots

    # slots that are in use before anything is taken

    def reserve_at_once(self, flags: bytes) -> None:
        """Those whose flag is 1 are given to nobody until they are claimed. Before all else."""
        self._spared, self._reserved = bytearray(flags), bytearray(flags)
        self._fresh -= count_set(flags)

    def reserve(self, slots: Iterable[int]) -> None:
        """Those of these that were never taken are given to nobody until they are claimed."""
        for column in (self._spared, self._reserved):
            column.extend(bytes(self._capacity - len(column)))
        for slot in slots:
            if self._next <= slot < self._capacity and not self._spared[slot]:
                self._spared[slot] = self._reserved[slot] = _RESERVED
                self._fresh -= 1

    def is_reserved(self, slot: int) -> bool:
        return 0 <= slot < len(self._reserved) and bool(self._reserved[slot])

    def claim(self, slots: Iterable[int]) -> list[int]:
        """Those of these slots that were reserved: the caller's now."""
        own = [slot for slot in dict.fromkeys(slots) if self.is_reserved(slot)]
        for slot in own:
            self._reserved[slot] = False
        return own

    @property
    def reserved(self) -> int:
        """How many still are."""
        return count_set(self._reserved)
