"""Which blocks of a pool may leave, and in what order they do: leaves first, least recently used before all."""

from __future__ import annotations

from collections.abc import Generator

from kvevents_service.core.eviction import EvictionQueue
from kvevents_service.core.free_slots import FreeSlots
from kvevents_service.core.names import Evicted, NameTable
from kvevents_service.core.slots import DOOMED, FREE, NO_SLOT, READY


class LeavingTable(NameTable):
    """The free slots, and the queue of those that can be."""

    def __init__(self, capacity: int, groups: int) -> None:
        super().__init__(capacity, groups)
        self._free = FreeSlots(capacity)
        self._queue = EvictionQueue(capacity)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def _is_evictable(self, slot: int) -> bool:
        return self._state[slot] == READY and not self._children[slot] and not self._pins[slot]

    def _offer_if_evictable(self, slot: int) -> None:
        if self._is_evictable(slot):
            self._queue.offer(slot)

    def coldest(self, blocks: int) -> Generator[list[int], None, None]:
        """About so many blocks that would leave next: chains of what would leave together, leaf first.

        Nothing may leave before this is read to its end or closed.
        """
        looked_at: list[int] = []
        try:
            found = 0
            while found < blocks and (slot := self._queue.pop()) is not None:
                if self._is_evictable(slot):
                    looked_at.append(slot)
                    leaving = self._leaving_with(slot, blocks - found)
                    found += len(leaving)
                    yield leaving
        finally:
            for slot in looked_at:
                self._queue.offer(slot)

    def _leaving_with(self, leaf: int, most: int) -> list[int]:
        """A leaf and the parents that nothing else keeps, unused since their child."""
        stamps, leaving = self._queue.stamps, [leaf]
        parent = self._parent[leaf]
        while parent != NO_SLOT and len(leaving) < most:
            if self._children[parent] > 1 or self._pins[parent] or stamps[parent] > stamps[leaf]:
                break
            leaving.append(parent)
            parent = self._parent[parent]
        return leaving

    def _make_room(self, wanted: int) -> list[Evicted]:
        evicted: list[Evicted] = []
        while (short := wanted - len(self._free)) > 0:
            slot = self._queue.pop()
            if slot is None:
                break
            if self._is_evictable(slot):
                evicted += self._evict_upward(slot, short)
        return evicted

    def _evict_upward(self, slot: int, most: int) -> list[Evicted]:
        """Evict a leaf, then its parents while each would be next anyway: a leaf by now, unused since its child."""
        stamps, parents, states = self._queue.stamps, self._parent, self._state
        children, pins = self._children, self._pins
        stamp, leaving = stamps[slot], []
        while True:
            leaving.append(slot)
            states[slot] = FREE
            parent = parents[slot]
            if parent == NO_SLOT:
                break
            left = children[parent] = children[parent] - 1
            if left:
                self._unlist(parent, slot)
            used = stamps[parent]
            if used < stamp:
                used = stamps[parent] = stamp  # as `inherit` does
            if used != stamp or left or len(leaving) == most or states[parent] != READY or pins[parent]:
                self._offer_if_evictable(parent)
                break
            slot = parent
        self._free.give(leaving)
        return self._unname(self._group[slot], leaving)

    def _reap(self, slot: int) -> None:
        """Free a doomed block that nothing holds, then its doomed parents."""
        while self._state[slot] == DOOMED and not self._children[slot] and not self._pins[slot]:
            parent = self._release(slot)
            if parent is None:
                return
            slot = parent

    def _release(self, slot: int) -> int | None:
        """Back to FREE; the parent has one child less. Returns the parent."""
        self._state[slot] = FREE
        self._free.give((slot,))
        parent = self._parent[slot]
        if parent == NO_SLOT:
            return None
        self._parent[slot] = NO_SLOT
        self._children[parent] -= 1
        if self._children[parent]:
            self._unlist(parent, slot)
        self._queue.inherit(parent, slot)
        self._offer_if_evictable(parent)
        return parent
