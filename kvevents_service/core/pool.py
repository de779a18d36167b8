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
from itertools import chain
from typing import NamedTuple

from kvevents_service.core.column import frozen
from kvevents_service.core.cut import PoolCut
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.leaving import LeavingTable
from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.core.names import Evicted, Forgotten
from kvevents_service.core.slots import DOOMED, FREE, NO_SLOT, ORPHANED, PENDING, READY
from kvevents_service.wire.name_board import NameBoard


class Allocation(NamedTuple):
    """Slots for the first len(slots) blocks of a run, and what left to make room for them, in order."""

    slots: list[int]
    evicted: list[Evicted]


class BlockPool(LeavingTable):
    """`capacity` slots shared by `groups` groups. Not thread safe; no I/O, no clock.

    board: has the names of blocks that are found by their own hash, pending ones included.
    """

    def __init__(self, capacity: int, groups: int, board: NameBoard | None = None) -> None:
        super().__init__(capacity, groups, board)
        self.allocated = 0
        """Slots ever taken."""

    def __repr__(self) -> str:
        return f"<BlockPool {len(self)}/{self.capacity} indexed, {len(self._free)} free>"

    def __len__(self) -> int:
        """Blocks found by hash, pending ones included."""
        return self.count(PENDING) + self.count(READY)

    @property
    def empty(self) -> bool:
        """Nothing is found by hash."""
        return not any(self.index) and not any(self.inner)

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
        slots = self._free.take(count)
        self.allocated += len(slots)
        if count:
            self._place(meta, hashes, slots, parent)
        elif parent is not None:
            self._offer_if_evictable(parent)
        return Allocation(slots, evicted)

    def _place(self, meta: BlockStoreMeta, hashes: list[bytes], slots: list[int], parent: int | None) -> None:
        names = self.inner if meta.inner else self.index
        names[meta.group.index].add(hashes, slots)
        span = self._fill(meta, hashes, slots, parent)
        if meta.group.kind not in PREFIX_KINDS:
            self._unlink(slots)
        self._queue.touch_run(slots, span)

    # blocks that were in the tier before this process was

    def reserve(self, runs: Iterable[StoreRun], flags: bytes | None = None) -> None:
        """Give the slots of these runs to nobody until each is adopted or let go. Once, before anything else.

        flags: 1 for each of these slots, by slot, where that is known.
        """
        if flags is not None:
            self._free.reserve_at_once(flags)
        else:
            self._free.reserve(chain.from_iterable(run.slots for run in runs))

    def adopt(self, run: StoreRun) -> list[BlockStoreMeta]:
        """Take in a reserved run, whose bytes are in its slots already; its parents first.

        Returns the run, and those of its inner names that no other block has. Nothing if it cannot stand here:
        under fresh names, in a prefix kind behind a READY parent.
        """
        if not self._is_adoptable(run):
            self.let_go(run)
            return []
        meta, slots = run.meta, run.slots
        self._free.claim(slots)
        before = meta.parent_block_hash if meta.group.kind in PREFIX_KINDS else None
        parent = None if before is None else self.slot_of(meta.group.index, before)
        self._place(meta, [meta.hash_at(place) for place in range(meta.blocks)], slots, parent)
        self.commit(slots)
        return [meta, *(name for place, name in run.inner_places() if self.add_name(slots[place], name))]

    def let_go(self, run: StoreRun) -> None:
        """A reserved run is not adopted: its slots are free."""
        self._free.give(self._free.claim(run.slots))

    def _is_adoptable(self, run: StoreRun) -> bool:
        meta, slots = run.meta, run.slots
        group, parent = meta.group, meta.parent_block_hash
        rooted = group.kind not in PREFIX_KINDS or parent is None or self._is_ready(group.index, parent)
        fresh = self.is_fresh_chain(group.index, [meta.hash_at(place) for place in range(meta.blocks)])
        own = len(set(slots)) == len(slots) == meta.blocks and all(map(self._free.is_reserved, slots))
        return own and rooted and fresh and group.cacheable

    def _is_ready(self, group: int, block_hash: bytes) -> bool:
        slot = self.slot_of(group, block_hash)
        return slot is not None and self._state[slot] == READY

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
        groups = range(len(self.index))
        return [gone for group in groups for gone in self._forget(group, self.leaves_first(group, self.capacity))]

    def forget(self, slots: Iterable[int]) -> list[Forgotten]:
        """Forget these blocks by hash, as far as they are READY, and every block behind one of them."""
        groups: dict[int, list[int]] = {}
        for slot in slots:
            if self._state[slot] == READY:
                groups.setdefault(self._group[slot], []).append(slot)
        return [gone for group, own in groups.items() for gone in self._forget(group, self._behind(own)[::-1])]

    def forget_leaves(self, most: int) -> tuple[int, list[Forgotten]]:
        """Forget so many blocks of one group, none that another indexed one is behind of. Returns how many it were,
        pending ones too; 0 once the pool is `empty`."""
        for group, (named, inner) in enumerate(zip(self.index, self.inner, strict=True)):
            if named or inner:
                slots = self.leaves_first(group, most)
                return len(slots), self._forget(group, slots)
        return 0, []

    def _behind(self, slots: Iterable[int]) -> list[int]:
        """These blocks and every indexed one behind them, parents before children."""
        gone, waiting = set(), list(slots)
        while waiting:
            slot = waiting.pop()
            if slot not in gone and self._state[slot] in (PENDING, READY):
                gone.add(slot)
                waiting += self._children_of(slot)
        found, waiting = [], [slot for slot in gone if self._parent[slot] not in gone]
        while waiting:
            slot = waiting.pop()
            found.append(slot)
            waiting += gone.intersection(self._children_of(slot))
        return found

    def _forget(self, group: int, slots: list[int]) -> list[Forgotten]:
        """These slots, children before parents."""
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

    # instruments

    def cut(self) -> PoolCut:
        """What can be loaded now, frozen: copies of columns, no loop over blocks."""
        first = [(len(names), self._meta[next(names.slots())]) for names in (*self.index, *self.inner) if names]
        counts = [(blocks, meta.group.block_size) for blocks, meta in first if meta is not None]
        state = bytes(self._state[: self.used])
        positions, parents = frozen(self._position, self.used), frozen(self._parent, self.used)
        return PoolCut(counts, self._more_names.copy(), state, self._freeze_metas(), positions, parents)

    def check(self) -> None:
        """Assert every internal invariant; for tests and doctors, O(capacity)."""
        assert self.count(FREE) - self._free.reserved == len(self._free) == len(set(self._free))
        assert not any(self._state[slot] for slot in self._free)
        assert not any(self._state[self.used :])
        children = array("i", bytes(4 * self.capacity))
        for slot in range(self.used):
            self._check_slot(slot)
            if self._state[slot] != FREE and self._parent[slot] != NO_SLOT:
                children[self._parent[slot]] += 1
            assert all(self._parent[child] == slot for child in self._children_of(slot))
        assert children == self._children
        assert sum(len([*self._children_of(slot)]) for slot in range(self.used)) == sum(children)
        assert sum(map(len, (*self.index, *self.inner))) == len(self) + sum(map(len, self._more_names.values()))

    def _check_slot(self, slot: int) -> None:
        state, parent = self._state[slot], self._parent[slot]
        assert self._pins[slot] >= 0
        if state == FREE:
            assert not self._pins[slot]
            return
        indexed = self._hash[slot] is not None
        assert indexed == (state in (PENDING, READY))
        group, name = self._group[slot], self._hash[slot] or b""
        assert not indexed or slot in (self.slot_of(group, name), self.inner_slot(group, name))
        assert all(self.inner[group].get(more.block_hashes) == slot for more in self._more_names.get(slot, ()))
        assert indexed or slot not in self._more_names
        assert parent == NO_SLOT or self._state[parent] != FREE
        assert state != READY or parent == NO_SLOT or self._state[parent] == READY, "prefix closure"
