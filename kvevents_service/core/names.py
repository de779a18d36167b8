"""What the slots of a pool are called: hashes and inner names of each group, and the slots that have them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from operator import is_
from typing import Final, NamedTuple
from weakref import ref

from kvevents_service.core.frozen_metas import FrozenMetas
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.name_shards import NameShards
from kvevents_service.core.slots import NO_SLOT, PENDING, READY, SlotTable
from kvevents_service.wire.name_board import NameBoard


class Evicted(NamedTuple):
    """A name that left with its block to make room."""

    group: int
    block_hash: bytes
    inner: bool = False


_evicted: Final = partial(tuple.__new__, Evicted)
"""The same from a tuple, at a third of the cost."""


class Forgotten(NamedTuple):
    """Names of one group that were READY and are none any more, children before parents."""

    group: int
    hashes: list[bytes]
    inner: bool


def _is_alive(reference: ref[FrozenMetas]) -> bool:
    return reference() is not None


class NameTable(SlotTable):
    """Slots found by name: a block's own hash, and `inner` names of prefixes that end inside it."""

    def __init__(self, capacity: int, groups: int, board: NameBoard | None = None) -> None:
        super().__init__(capacity)
        self.index = [NameShards(board) for _ in range(groups)]
        self.inner = [NameShards() for _ in range(groups)]
        self._leaving = NO_SLOT
        self._frozen: list[ref[FrozenMetas]] = []
        self._more_names: dict[int, list[BlockStoreMeta]] = {}

    # lookup

    def known_prefix(self, group: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are indexed, ready or pending."""
        shards = self.index[group].shards
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in shards[block_hash[-1]])

    def ready_prefix(self, group: int, packed: bytes, hash_bytes: int) -> int:
        """How many leading blocks of the packed chain can be loaded now."""
        shards, state = self.index[group].shards, self._state

        def missing(position: int) -> bool:
            end = (position + 1) * hash_bytes
            slot = shards[packed[end - 1]].get(packed[end - hash_bytes : end])
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

    def more_names(self, slot: int) -> Sequence[BlockStoreMeta]:
        """The inner names of a block beside the one that it is found by."""
        return self._more_names.get(slot, ())

    def knows(self, group: int, block_hash: bytes) -> bool:
        """A block has this name, ready or pending."""
        return block_hash in self.index[group] or block_hash in self.inner[group]

    def own_hash(self, group: int, block_hash: bytes | None) -> bytes | None:
        """The pool's object of a hash that it knows, else the one given: a parent's hash is kept once."""
        slot = None if block_hash is None else self.index[group].get(block_hash)
        return block_hash if slot is None else self._hash[slot]

    # order

    def leaves_first(self, group: int, most: int) -> list[int]:
        """Indexed blocks of a group, so many or all there are, each behind all that are indexed behind it.

        A call goes on where the one before ended: so a long chain is gone through once, not once a call.
        """
        found: dict[int, None] = {}
        children: dict[int, Iterator[int]] = {}
        others = chain(self.index[group].slots(), self.inner[group].slots())
        slot: int | None = self._leaving if self._is_indexed(self._leaving, group) else next(others, None)
        while slot is not None and len(found) < most:
            if slot not in children:
                children[slot] = self._children_of(slot)
            rest = (child for child in children[slot] if child not in found and self._is_indexed(child, group))
            child = next(rest, None)
            if child is not None:
                slot = child
                continue
            found[slot] = None
            parent = self._parent[slot]
            slot = parent if self._is_indexed(parent, group) else None
            slot = next((other for other in others if other not in found), None) if slot is None else slot
        self._leaving = NO_SLOT if slot is None else slot
        return list(found)

    def _is_indexed(self, slot: int, group: int) -> bool:
        return slot != NO_SLOT and self._state[slot] in (PENDING, READY) and self._group[slot] == group

    # names come and go

    def is_fresh_chain(self, group: int, hashes: list[bytes]) -> bool:
        """True if the hashes are distinct and none is a name: a chain's end behind its known prefix always is."""
        named = self.index[group], self.inner[group]
        return len(set(hashes)) == len(hashes) and all(names.is_disjoint(hashes) for names in named)

    def add_name(self, slot: int, meta: BlockStoreMeta) -> bool:
        """A prefix ends inside this block. False if another block has the name: it stays that block's."""
        group, block_hash = self._group[slot], meta.block_hashes
        names = self.inner[group]
        if block_hash in names or block_hash in self.index[group]:
            return False
        names.add([block_hash], [slot])
        self._more_names.setdefault(slot, []).append(meta)
        return True

    def _unname(self, group: int, slots: list[int]) -> list[Evicted]:
        """Out of the index: blocks of one group, with all their names."""
        hashes, metas = self._hash, self._meta
        names = [name for slot in slots if (name := hashes[slot]) is not None]
        assert len(names) == len(slots), "only an indexed block can leave the index"
        if self._frozen:
            self._save_metas(slots)
        for slot in slots:
            hashes[slot] = metas[slot] = None
        found = self.index[group].pop_all(names)
        inner = [name for name, slot in zip(names, found, strict=True) if slot is None] if None in found else []
        self.inner[group].pop_all(inner)
        evicted = list(map(_evicted, zip(repeat(group), names, map(is_, found, repeat(None)))))
        return [*self._unname_inner(group, slots), *evicted] if self._more_names else evicted

    def _freeze_metas(self) -> FrozenMetas:
        """The column of snapshots as it is now, for as long as somebody keeps it."""
        frozen = FrozenMetas(self._meta)
        self._frozen = [*filter(_is_alive, self._frozen), ref(frozen)]
        return frozen

    def _save_metas(self, slots: list[int]) -> None:
        self._frozen = [*filter(_is_alive, self._frozen)]
        for reference in self._frozen:
            frozen = reference()
            if frozen is not None:
                frozen.save(slots)

    def _unname_inner(self, group: int, slots: list[int]) -> list[Evicted]:
        gone = [meta.block_hashes for slot in slots for meta in self._more_names.pop(slot, ())]
        self.inner[group].pop_all(gone)
        return [Evicted(group, name, True) for name in gone]

    # instruments

    def ready_hashes(self, group: int) -> list[bytes]:
        """Hashes of every loadable block of a group, in no order."""
        state = self._state
        return [block_hash for block_hash, slot in self.index[group].items() if state[slot] == READY]

    def ready_inner(self, group: int) -> list[bytes]:
        """Hashes of every prefix of a group that ends inside a loadable block."""
        state = self._state
        return [block_hash for block_hash, slot in self.inner[group].items() if state[slot] == READY]

    def ready_names(self, group: int) -> list[bytes]:
        """Every name under which something of a group can be loaded: what the stream says is resident."""
        return [*self.ready_hashes(group), *self.ready_inner(group)]
