"""The block pool of one tier: slots, hash index, parents, pins, leaf-first eviction.

    FREE --allocate--> PENDING --commit--> READY --evict--> FREE
                          |  |               |
                          |  +--forget-> ORPHANED
                          |                  |
                          +----abandon-------+--forget-> DOOMED --(unpinned, childless)--> FREE

A block is named by the hash at its end. It may have inner names, too, of prefixes that end inside it; a tail, which
is not full, has only its inner name. They come and go with the block, and one that another block has is not given
twice.

PENDING: a copy is writing the slot. READY: loadable, announced. ORPHANED: no longer found by hash, but a copy is
still writing. DOOMED: not found by hash, and freed when its last pin and its last child are gone.

Prefix closure (I6): in a prefix kind a block is allocated only behind its parent and a parent outlives its
children, so the indexed blocks of a chain are always a prefix of it. That is why the longest prefix is found by
bisection, why pinning the last block of a hit pins all of it, and why a store is one bulk insert.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvevents_service.core.cut import PoolCut
from kvevents_service.core.eviction import EvictionQueue
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.core.names import Evicted, Forgotten, NameTable
from kvevents_service.core.slots import DOOMED, FREE, NO_SLOT, ORPHANED, PENDING, READY


class Allocation(NamedTuple):
    """Slots for the first len(slots) blocks of a run, and what left to make room for them, in order."""

    slots: list[int]
    evicted: list[Evicted]


class BlockPool(NameTable):
    """`capacity` slots shared by `groups` groups. Not thread safe; no I/O, no clock."""

    def __init__(self, capacity: int, groups: int) -> None:
        super().__init__(capacity, groups)
        self._free = list(range(capacity - 1, -1, -1))
        self._queue = EvictionQueue(capacity)
        self.allocated = 0
        """Slots ever taken."""

    def __repr__(self) -> str:
        return f"<BlockPool {len(self)}/{self.capacity} indexed, {len(self._free)} free>"

    def __len__(self) -> int:
        """Blocks found by hash, pending ones included."""
        return self.count(PENDING) + self.count(READY)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # store

    def allocate(self, meta: BlockStoreMeta, hashes: list[bytes], parent: int | None) -> Allocation:
        """Slots for as many leading blocks of a fresh chain as there is room for, evicting where needed.

        `hashes[i]` is block i of `meta`; the blocks become PENDING. The parent is safe from this eviction. Blocks
        of a kind that is not prefix-closed are linked to nobody: each may leave by itself.
        """
        if parent is not None:
            self._pins[parent] += 1
        evicted = self._make_room(len(hashes))
        if parent is not None:
            self._pins[parent] -= 1
        count = min(len(hashes), len(self._free))
        slots = self._take_free(count)
        if count:
            self._place(meta, hashes, slots, parent)
        elif parent is not None:
            self._offer_if_evictable(parent)
        return Allocation(slots, evicted)

    def _place(self, meta: BlockStoreMeta, hashes: list[bytes], slots: list[int], parent: int | None) -> None:
        names = self.inner if meta.inner else self.index
        names[meta.group.index].update(zip(hashes, slots, strict=False))
        self._fill(meta, hashes, slots, parent)
        if meta.group.kind not in PREFIX_KINDS:
            self._unlink(slots)
        self._queue.touch_run(slots)

    def adopt(self, runs: Iterable[StoreRun]) -> list[BlockStoreMeta]:
        """Take in blocks whose bytes are in their slots already, parents first.

        Returns the runs that can stand here: in free slots, under fresh names, in a prefix kind behind a parent.
        Behind each come those of its inner names that no other block has.
        """
        free = set(self._free)
        kept = [meta for run in runs if self._is_adoptable(run, free) for meta in self._adopt(run, free)]
        self._free = [slot for slot in self._free if slot in free]
        return kept

    def _is_adoptable(self, run: StoreRun, free: set[int]) -> bool:
        meta, slots = run.meta, run.slots
        group, parent = meta.group, meta.parent_block_hash
        rooted = group.kind not in PREFIX_KINDS or parent is None or parent in self.index[group.index]
        fresh = self.is_fresh_chain(group.index, [meta.hash_at(place) for place in range(meta.blocks)])
        own = len(slots) == meta.blocks == len(free.intersection(slots))
        return own and rooted and fresh and group.cacheable

    def _adopt(self, run: StoreRun, free: set[int]) -> list[BlockStoreMeta]:
        meta, slots = run.meta, run.slots
        before = meta.parent_block_hash if meta.group.kind in PREFIX_KINDS else None
        parent = None if before is None else self.slot_of(meta.group.index, before)
        free.difference_update(slots)
        self._place(meta, [meta.hash_at(place) for place in range(meta.blocks)], slots, parent)
        self.commit(slots)
        return [meta, *(name for place, name in run.inner_places() if self.add_name(slots[place], name))]

    def _take_free(self, count: int) -> list[int]:
        if not count:
            return []
        self.allocated += count
        slots = self._free[-count:]
        del self._free[-count:]
        slots.reverse()
        return slots

    def commit(self, slots: Sequence[int]) -> None:
        """The bytes of these pending blocks have arrived: they can be loaded."""
        state = self._state
        for slot in slots:
            state[slot] = READY
        for slot in slots:
            if not self._children[slot]:
                self._offer_if_evictable(slot)

    def abandon(self, slots: Sequence[int]) -> None:
        """The copy into these slots has ended, and its blocks are not wanted."""
        for slot in slots:
            if self._state[slot] == PENDING:
                self._unname(self._group[slot], [slot])
            self._state[slot] = DOOMED
        for slot in slots:
            self._reap(slot)

    def clear(self) -> list[Forgotten]:
        """Forget every block by hash."""
        return [gone for group in range(len(self.index)) for gone in self._forget(group, self.in_order(group))]

    def forget(self, slots: Iterable[int]) -> list[Forgotten]:
        """Forget these blocks by hash, as far as they are READY, and every block behind one of them."""
        groups: dict[int, set[int]] = {}
        for slot in slots:
            if self._state[slot] == READY:
                groups.setdefault(self._group[slot], set()).add(slot)
        return [gone for group, own in groups.items() for gone in self._forget(group, self._behind(group, own))]

    def _behind(self, group: int, slots: set[int]) -> Iterable[int]:
        """These blocks and every indexed one behind them, parents before children."""
        if not any(self._children[slot] for slot in slots):
            return slots
        gone, parents, found = set(slots), self._parent, []
        for slot in self.in_order(group):
            if slot in gone or parents[slot] in gone:
                gone.add(slot)
                found.append(slot)
        return found

    def _forget(self, group: int, in_order: Iterable[int]) -> list[Forgotten]:
        slots = list(in_order)[::-1]
        states = self._state
        left = self._unname(group, [slot for slot in slots if states[slot] == READY])
        self._unname(group, [slot for slot in slots if states[slot] == PENDING])
        for slot in slots:
            states[slot] = DOOMED if states[slot] == READY else ORPHANED
        for slot in slots:
            self._reap(slot)
        gone = [
            Forgotten(group, [name.block_hash for name in left if name.inner is inner], inner)
            for inner in (True, False)
        ]
        return [names for names in gone if names.hashes]

    # use

    def touch(self, slot: int) -> None:
        """The chain that ends here was used now."""
        self._queue.touch(slot)

    def touch_all(self, slots: list[int]) -> None:
        """These blocks were used now, together."""
        self._queue.touch_run(slots)

    def pin(self, slot: int) -> None:
        """Keep this block and all before it from leaving."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._state[slot] == DOOMED:
            self._reap(slot)
        else:
            self._offer_if_evictable(slot)

    # eviction

    def _is_evictable(self, slot: int) -> bool:
        return self._state[slot] == READY and not self._children[slot] and not self._pins[slot]

    def _offer_if_evictable(self, slot: int) -> None:
        if self._is_evictable(slot):
            self._queue.offer(slot)

    def coldest(self, blocks: int) -> list[list[int]]:
        """About so many blocks that would leave next: chains of what would leave together, leaf first."""
        chains: list[list[int]] = []
        found = 0
        while found < blocks and (slot := self._queue.pop()) is not None:
            if self._is_evictable(slot):
                chains.append(self._leaving_with(slot, blocks - found))
                found += len(chains[-1])
        for chain in chains:
            self._queue.offer(chain[0])
        return chains

    def _leaving_with(self, leaf: int, most: int) -> list[int]:
        """A leaf and the parents that nothing else keeps, unused since their child."""
        stamps, chain = self._queue.stamps, [leaf]
        parent = self._parent[leaf]
        while parent != NO_SLOT and len(chain) < most:
            if self._children[parent] > 1 or self._pins[parent] or stamps[parent] > stamps[leaf]:
                break
            chain.append(parent)
            parent = self._parent[parent]
        return chain

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
        stamp, chain = stamps[slot], []
        while True:
            chain.append(slot)
            states[slot] = FREE
            parent = parents[slot]
            if parent == NO_SLOT:
                break
            parents[slot] = NO_SLOT
            children[parent] -= 1
            if stamps[parent] < stamp:
                stamps[parent] = stamp  # as `inherit` does
            next_in_line = stamps[parent] == stamp and states[parent] == READY
            if len(chain) == most or not next_in_line or children[parent] or pins[parent]:
                self._offer_if_evictable(parent)
                break
            slot = parent
        self._free += chain
        return self._unname(self._group[slot], chain)

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
        self._free.append(slot)
        parent = self._parent[slot]
        if parent == NO_SLOT:
            return None
        self._parent[slot] = NO_SLOT
        self._children[parent] -= 1
        self._queue.inherit(parent, slot)
        self._offer_if_evictable(parent)
        return parent

    # instruments

    def cut(self) -> PoolCut:
        """What can be loaded now, frozen: copies of columns, no loop over blocks."""
        groups = [list(index.values()) for index in self.index]
        inner = [list(index.values()) for index in self.inner]
        more = self._more_names.copy()
        return PoolCut(groups, inner, more, bytes(self._state), self._meta[:], self._position[:])

    def check(self) -> None:
        """Assert every internal invariant; for tests and doctors, O(capacity)."""
        assert self.count(FREE) == len(self._free) == len(set(self._free))
        children = array("i", bytes(4 * self.capacity))
        for slot in range(self.capacity):
            self._check_slot(slot)
            if self._parent[slot] != NO_SLOT:
                children[self._parent[slot]] += 1
        assert children == self._children
        assert sum(map(len, (*self.index, *self.inner))) == len(self) + sum(map(len, self._more_names.values()))

    def _check_slot(self, slot: int) -> None:
        state, parent = self._state[slot], self._parent[slot]
        assert self._pins[slot] >= 0
        if state == FREE:
            assert parent == NO_SLOT
            assert not self._pins[slot]
            return
        indexed = self._hash[slot] is not None
        assert indexed == (state in (PENDING, READY))
        group, name = self._group[slot], self._hash[slot] or b""
        assert not indexed or slot in (self.slot_of(group, name), self.inner_slot(group, name))
        assert all(self.inner[group][more.block_hashes] == slot for more in self._more_names.get(slot, ()))
        assert indexed or slot not in self._more_names
        assert parent == NO_SLOT or self._state[parent] != FREE
        assert state != READY or parent == NO_SLOT or self._state[parent] == READY, "prefix closure"
