"""The slots of a pool: one row a slot, kept as columns of packed numbers, so that a run is filled in bulk."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from kvevents_service.core.column import column, extend_ramp
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.wire.control import GroupSpec

FREE, PENDING, READY, ORPHANED, DOOMED = range(5)
NO_SLOT = -1
"""Array filler for "no parent"; never leaves the pool as a slot."""
RAMP_STEP: Final = 4096


class SlotTable:
    """State, links and names of `capacity` slots. What they mean together is the pool's to say.

    A slot that has children knows one of them, `_child`; that one's `_sibling` is the next, down to NO_SLOT, and
    `_elder` is the one before it. Of a slot without children, and of an only child, they may be stale.

    Of a slot that was never filled the columns say nothing but that it is FREE, without a pin. Names and snapshots
    are listed up to `used`: all slots from there on were never filled.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._state, self._group = column("B", capacity), column("B", capacity)
        self._parent, self._children = column("i", capacity), column("i", capacity)
        self._child, self._sibling, self._elder = (column("i", capacity) for _ in range(3))
        self._pins, self._position = column("i", capacity), column("i", capacity)
        self._hash: list[bytes | None] = []
        self._meta: list[BlockStoreMeta | None] = []
        self._ramp = array("i")  # 0, 1, 2, ...: filling consecutive slots becomes copying

    @property
    def used(self) -> int:
        return len(self._meta)

    # one slot

    def state_of(self, slot: int) -> int:
        return self._state[slot]

    def hash_of(self, slot: int) -> bytes | None:
        return self._hash[slot]

    def parent_of(self, slot: int) -> int | None:
        parent = self._parent[slot]
        return None if parent == NO_SLOT else parent

    def chain(self, tail: int, length: int) -> list[int] | None:
        """The `length` slots that end at `tail`, first block first; None if the chain is shorter."""
        parents, slots = self._parent, []
        slot = tail
        for _ in range(length):
            if slot == NO_SLOT:
                return None
            slots.append(slot)
            slot = parents[slot]
        slots.reverse()
        return slots

    def is_chain(self, slots: list[int]) -> bool:
        """Each of these blocks is the parent of the next."""
        return self.chain(slots[-1], len(slots)) == slots

    def ends(self, slots: list[int]) -> list[int]:
        """What must be pinned of a chain so that all of it stays."""
        return slots[-1:]

    def meta_of(self, slot: int) -> BlockStoreMeta | None:
        """The snapshot of one indexed block, or None."""
        meta = self._meta[slot]
        return None if meta is None else meta.part(self._position[slot], self._position[slot] + 1)

    def group_of(self, slot: int, groups: Sequence[GroupSpec]) -> GroupSpec:
        """Which of the model's groups the block in this slot is of."""
        return groups[self._group[slot]]

    # a run of slots

    def run_of(self, slots: list[int]) -> BlockStoreMeta:
        """The snapshot of indexed blocks that follow each other."""
        meta, start = self._meta[slots[0]], self._position[slots[0]]
        assert meta is not None, "an indexed block has a snapshot"
        return meta.part(start, start + len(slots))

    def _fill(
        self, meta: BlockStoreMeta, hashes: list[bytes], slots: list[int], parent: int | None
    ) -> slice[int, int, None] | None:
        """These slots hold the first blocks of `meta` from now on, each one behind the one before: PENDING.

        Returns the slots as a slice, if they are one.
        """
        previous = NO_SLOT if parent is None else parent
        span = slice(slots[0], slots[0] + len(slots))
        self._reach(slots[-1])
        is_span = self._ramp[span].tolist() == slots
        if is_span:
            self._fill_span(meta, hashes, span, previous)
        else:
            self._reach(max(slots))
            self._fill_scattered(meta, hashes, slots, previous)
        self._children[slots[-1]] = 0
        if previous != NO_SLOT:
            self._join(previous, slots[0])
        return span if is_span else None

    def _reach(self, slot: int) -> None:
        """Columns that grow go as far as this slot."""
        missing = slot + 1 - self.used
        if missing > 0:
            self._hash += [None] * missing
            self._meta += [None] * missing
        if slot >= len(self._ramp):
            extend_ramp(self._ramp, min(slot + RAMP_STEP, self.capacity))

    def _fill_span(self, meta: BlockStoreMeta, hashes: list[bytes], span: slice, parent: int) -> None:
        """Consecutive slots, the common case, without a loop."""
        first, count = span.start, span.stop - span.start
        self._state[span] = bytes((PENDING,)) * count
        self._group[span] = bytes((meta.group.index,)) * count
        self._parent[span] = array("i", (parent,)) + self._ramp[first : first + count - 1]
        self._children[span] = array("i", (1,)) * count
        self._child[first : first + count - 1] = self._ramp[first + 1 : first + count]
        self._sibling[span] = array("i", (NO_SLOT,)) * count
        self._position[span] = self._ramp[:count]
        self._hash[span] = hashes[:count]
        self._meta[span] = [meta] * count

    def _fill_scattered(self, meta: BlockStoreMeta, hashes: list[bytes], slots: list[int], parent: int) -> None:
        state, groups, parents, children = self._state, self._group, self._parent, self._children
        positions, names, metas = self._position, self._hash, self._meta
        child, sibling, before = self._child, self._sibling, parent
        group = meta.group.index
        for position, slot in enumerate(slots):
            state[slot] = PENDING
            groups[slot] = group
            parents[slot] = parent
            children[slot] = 1
            positions[slot] = position
            names[slot] = hashes[position]
            metas[slot] = meta
            sibling[slot] = NO_SLOT
            if parent != before:
                child[parent] = slot
            parent = slot

    def _unlink(self, slots: list[int]) -> None:
        """These blocks have no parents and no children."""
        for slot in slots:
            self._parent[slot] = NO_SLOT
            self._children[slot] = 0

    # links

    def _join(self, parent: int, slot: int) -> None:
        """One child more."""
        first = self._child[parent] if self._children[parent] else NO_SLOT
        self._children[parent] += 1
        self._child[parent], self._sibling[slot] = slot, first
        if first != NO_SLOT:
            self._elder[first] = slot

    def _unlist(self, parent: int, slot: int) -> None:
        """One child less, where there are others."""
        following = self._sibling[slot]
        if self._child[parent] == slot:
            self._child[parent] = following
            return
        elder = self._elder[slot]
        self._sibling[elder] = following
        if following != NO_SLOT:
            self._elder[following] = elder

    def _children_of(self, slot: int) -> Iterator[int]:
        """Every slot whose parent this is."""
        child = self._child[slot] if self._children[slot] else NO_SLOT
        while child != NO_SLOT:
            yield child
            child = self._sibling[child]

    # instruments

    def count(self, state: int) -> int:
        """How many slots are in a state."""
        others = len(bytes(self._state[: self.used]).translate(None, bytes((state,))))  # `count` is slow on many
        return (self.capacity if state == FREE else self.used) - others

    @property
    def pins(self) -> memoryview:
        """Pins of each slot, int32. Let go of it before anything else happens."""
        return self._pins[:]

    def pinned(self) -> int:
        """How many slots carry a pin."""
        return sum(map(bool, self._pins))
