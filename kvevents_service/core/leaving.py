"""Which blocks of a pool may leave, and in what order they do: leaves first, least recently used before all."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from kvevents_service.core.eviction import EvictionQueue
from kvevents_service.core.free_slots import FreeSlots
from kvevents_service.core.names import Evicted, NameTable
from kvevents_service.core.slots import DOOMED, FREE, NO_SLOT, READY
from kvevents_service.wire.name_board import NameBoard


class LeavingTable(NameTable):
    """The free slots, and the queue of those that can be."""

    def __init__(self, capacity: int, groups: int, board: NameBoard | None = None) -> None:
        super().__init__(capacity, groups, board)
        self._free = FreeSlots(capacity)
        self._queue = EvictionQueue(capacity)
        self._reaches: dict[int, tuple[int, int]] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def _is_evictable(self, slot: int) -> bool:
        return self._state[slot] == READY and not self._children[slot] and not self._pins[slot]

    def _offer_if_evictable(self, slot: int) -> None:
        if self._is_evictable(slot):
            self._queue.offer(slot)

    def coldest(self, blocks: int) -> Generator[int, None, None]:
        """The leaves of what would leave next, as many as would leave with about so many blocks.

        Nothing may leave before this is read to its end or closed.
        """
        looked_at: dict[int, tuple[int, int]] = {}
        try:
            found = 0
            while found < blocks and (slot := self._queue.pop()) is not None:
                if self._is_evictable(slot):
                    looked_at[slot] = self._reach_of(slot, blocks - found)
                    found += looked_at[slot][1]
                    yield slot
        finally:
            self._reaches = looked_at
            for slot in looked_at:
                self._queue.offer(slot)

    def _reach_of(self, leaf: int, most: int) -> tuple[int, int]:
        """When it was used, and how many leave with it: itself and the parents that nothing else keeps, unused
        since their child. Of one that was seen in the last look, as it was then."""
        used, blocks = self._reaches.get(leaf, (0, 0))
        if used == self.used_at(leaf):
            return used, blocks
        blocks = self._leaving_with(leaf, most)
        return (self.used_at(leaf) if blocks < most else 0), blocks  # 0: there may be more, it is not as seen

    def look_anew(self) -> None:
        """What `coldest` has seen may have changed since."""
        self._reaches = {}

    def used_at(self, slot: int) -> int:
        """When it was last used; only the order means something. While it stays, the slot holds the same block."""
        return self._queue.stamps[slot]

    def _leaving_with(self, leaf: int, most: int) -> int:
        stamps, parents, children, pins = self._queue.stamps, self._parent, self._children, self._pins
        blocks, used, parent = 1, stamps[leaf], parents[leaf]
        while parent != NO_SLOT and blocks < most:
            if children[parent] > 1 or pins[parent] or stamps[parent] > used:
                break
            blocks += 1
            parent = parents[parent]
        return blocks

    def ready_slots(self, group: int, hashes: Sequence[bytes]) -> list[int | None]:
        """Where each of these can be loaded from now, if it can."""
        state, found = self._state, self.index[group].get_all(list(hashes))
        return [slot if slot is not None and state[slot] == READY else None for slot in found]

    def pieces(self, slots: list[int]) -> Iterator[list[int]]:
        """Neighbours of one snapshot together."""
        metas, positions, start = self._meta, self._position, 0
        for end in range(1, len(slots)):
            before, slot = slots[end - 1], slots[end]
            if metas[slot] is not metas[before] or positions[slot] != positions[before] + 1:
                yield slots[start:end]
                start = end
        if slots:
            yield slots[start:]

    @property
    def has_more_names(self) -> bool:
        """Some block has inner names."""
        return bool(self._more_names)

    def missing_in(self, other: NameTable, leaf: int) -> list[int]:
        """What the other table does not know of the chain that ends here, parents first."""
        group, names, parents, knows = self._group[leaf], self._hash, self._parent, other.knows
        missing: list[int] = []
        slot = leaf
        while slot != NO_SLOT and not knows(group, names[slot] or b""):
            missing.append(slot)
            slot = parents[slot]
        missing.reverse()
        return missing

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
