"""The order in which blocks leave: least recently used first, among those that may leave at all.

A lazy heap of (stamp, slot). A touch only writes the slot's stamp; the heap learns of it when the slot comes up.
Every slot is in the heap at most once, so it is bounded by the pool's capacity.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from kvevents_service.core.column import column

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class EvictionQueue:
    """Candidates for eviction. The pool says which slots may leave; this says which goes first."""

    __slots__ = ("_clock", "_heap", "_queued", "_stamps")

    def __init__(self, capacity: int) -> None:
        self._clock = 0
        self._stamps = column("Q", capacity)
        self._queued = column("B", capacity)
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def stamps(self) -> memoryview[int]:
        """When each slot was last used; only the order means something."""
        return self._stamps

    def touch(self, slot: int) -> None:
        """The block was used now."""
        self._clock += 1
        self._stamps[slot] = self._clock

    def touch_run(self, slots: list[int], span: slice | None = None) -> None:
        """All these blocks were used now, together. span: the same slots, if they are one."""
        self._clock += 1
        stamps, now = self._stamps, self._clock
        if span is not None:
            stamps[span] = array("Q", (now,)) * len(slots)
            return
        for slot in slots:
            stamps[slot] = now

    def inherit(self, parent: int, child: int) -> None:
        """A parent was last used no earlier than its child: prefix hits touch only their last block."""
        if self._stamps[parent] < self._stamps[child]:
            self._stamps[parent] = self._stamps[child]

    def offer(self, slot: int) -> None:
        """The block may leave from now on."""
        if not self._queued[slot]:
            self._queued[slot] = 1
            heappush(self._heap, self._stamps[slot] << _SLOT_BITS | slot)

    def pop(self) -> int | None:
        """The candidate used longest ago, or None. The pool checks that it may still leave."""
        while self._heap:
            entry = heappop(self._heap)
            slot = entry & _SLOT_MASK
            stamp = self._stamps[slot]
            if entry >> _SLOT_BITS == stamp:
                self._queued[slot] = 0
                return slot
            heappush(self._heap, stamp << _SLOT_BITS | slot)
        return None
