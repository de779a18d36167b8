"""The block pool of one tier: slots, hash index, parents, pins, leaf-first eviction.

    FREE --allocate--> PENDING --commit--> READY --evict--> FREE
                          |  |               |
                          |  +--clear--> ORPHANED
                          |                  |
                          +----abandon-------+--clear--> DOOMED --(unpinned, childless)--> FREE

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
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.core.cut import PoolCut
from kvevents_service.core.eviction import EvictionQueue
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.slots import DOOMED, FREE, NO_SLOT, ORPHANED, PENDING, READY, SlotTable


class Evicted(NamedTuple):
    """A name that left with its block to make room."""

    group: int
    block_hash: bytes
    inner: bool = False


class Forgotten(NamedTuple):
    """Names of one group that were READY and are none any more, children before parents."""

    group: int
    hashes: list[bytes]
    inner: bool


class Allocation(NamedTuple):
    """Slots for the first len(slots) blocks of a run, and what left to make room for them, in order."""

    slots: list[int]
    evicted: list[Evicted]


class BlockPool(SlotTable):
    """`capacity` slots shared by `groups` groups. Not thread safe; no I/O, no clock."""

    def __init__(self, capacity: int, groups: int) -> None:
        super().__init__(capacity)
        self.index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.inner: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._more_names: dict[int, list[BlockStoreMeta]] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._queue = EvictionQueue(capacity)

    def __repr__(self) -> str:
        return f"<BlockPool {len(self)}/{self.capacity} indexed, {len(self._free)} free>"

    def __len__(self) -> int:
        """Blocks found by hash, pending ones included."""
        return self.count(PENDING) + self.count(READY)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # lookup

    def known_prefix(self, group: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are indexed, ready or pending."""
        index = self.index[group]
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in index)

    def ready_prefix(self, group: int, packed: bytes, hash_bytes: int) -> int:
        """How many leading blocks of the packed chain can be loaded now."""
        index, state = self.index[group], self._state

        def missing(position: int) -> bool:
            slot = index.get(packed[position * hash_bytes : (position + 1) * hash_bytes])
            return slot is None or state[slot] != READY

        blocks = len(packed) // hash_bytes  # mostly all of them are there, or none
        if not blocks or missing(0):
            return 0
        return blocks if not missing(blocks - 1) else bisect_left(range(blocks - 1), True, key=missing)

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        return self.index[group].get(block_hash)

    def inner_slot(self, group: int, block_hash: bytes) -> int | None:
        """The block inside which the prefix of this hash ends."""
        return self.inner[group].get(block_hash)

    def own_hash(self, group: int, block_hash: bytes | None) -> bytes | None:
        """The pool's object of a hash that it knows, else the one given: a parent's hash is kept once."""
        slot = None if block_hash is None else self.index[group].get(block_hash)
        return block_hash if slot is None else self._hash[slot]

    # store

    def is_fresh_chain(self, group: int, hashes: list[bytes]) -> bool:
        """True if the hashes are distinct and none is a name: a chain's end behind its known prefix always is."""
        fresh, named = set(hashes), (self.index[group], self.inner[group])
        return len(fresh) == len(hashes) and all(names.keys().isdisjoint(fresh) for names in named)

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
            names = self.inner if meta.inner else self.index
            names[meta.group.index].update(zip(hashes, slots, strict=False))
            self._fill(meta, hashes, slots, parent)
            if meta.group.kind not in PREFIX_KINDS:
                self._unlink(slots)
            self._queue.touch_run(slots)
        elif parent is not None:
            self._offer_if_evictable(parent)
        return Allocation(slots, evicted)

    def add_name(self, slot: int, meta: BlockStoreMeta) -> bool:
        """A prefix ends inside this block. False if another block has the name: it stays that block's."""
        group, block_hash = self._group[slot], meta.block_hashes
        names = self.inner[group]
        if block_hash in names or block_hash in self.index[group]:
            return False
        names[block_hash] = slot
        self._more_names.setdefault(slot, []).append(meta)
        return True

    def _take_free(self, count: int) -> list[int]:
        if not count:
            return []
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
        return [gone for group in range(len(self.index)) for gone in self._clear_group(group) if gone.hashes]

    def _clear_group(self, group: int) -> tuple[Forgotten, Forgotten]:
        inner, blocks = self.ready_inner(group)[::-1], self.ready_hashes(group)[::-1]
        slots = list({*self.inner[group].values()}.difference(self.index[group].values()))  # tails
        slots += reversed(self.index[group].values())  # a child is always inserted after its parent
        self._unname(group, slots)
        for slot in slots:
            self._state[slot] = DOOMED if self._state[slot] == READY else ORPHANED
        for slot in slots:
            self._reap(slot)
        return Forgotten(group, inner, True), Forgotten(group, blocks, False)

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

    def _unname(self, group: int, slots: list[int]) -> list[Evicted]:
        """Out of the index: blocks of one group, with all their names."""
        index, names, metas, evicted = self.index[group], self._hash, self._meta, []
        for slot in slots:
            block_hash = names[slot]
            assert block_hash is not None, "only an indexed block can leave the index"
            if index.pop(block_hash, None) is None:
                del self.inner[group][block_hash]
                evicted.append(Evicted(group, block_hash, True))
            else:
                evicted.append(Evicted(group, block_hash))
            names[slot] = metas[slot] = None
        return [*self._unname_inner(group, slots), *evicted] if self._more_names else evicted

    def _unname_inner(self, group: int, slots: list[int]) -> list[Evicted]:
        gone = [meta.block_hashes for slot in slots for meta in self._more_names.pop(slot, ())]
        for name in gone:
            del self.inner[group][name]
        return [Evicted(group, name, True) for name in gone]

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

    def ready_hashes(self, group: int) -> list[bytes]:
        """Hashes of every loadable block of a group, parents before children."""
        state = self._state
        return [block_hash for block_hash, slot in self.index[group].items() if state[slot] == READY]

    def ready_inner(self, group: int) -> list[bytes]:
        """Hashes of every prefix of a group that ends inside a loadable block."""
        state = self._state
        return [block_hash for block_hash, slot in self.inner[group].items() if state[slot] == READY]

    def ready_names(self, group: int) -> list[bytes]:
        """Every name under which something of a group can be loaded: what the stream says is resident."""
        return [*self.ready_hashes(group), *self.ready_inner(group)]

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
