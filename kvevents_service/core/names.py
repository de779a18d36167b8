"""What the slots of a pool are called: hashes and inner names of each group, and the slots that have them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.slots import READY, SlotTable


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


class NameTable(SlotTable):
    """Slots found by name: a block's own hash, and `inner` names of prefixes that end inside it."""

    def __init__(self, capacity: int, groups: int) -> None:
        super().__init__(capacity)
        self.index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.inner: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._more_names: dict[int, list[BlockStoreMeta]] = {}

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

    def in_order(self, group: int) -> list[int]:
        """The slots of every indexed block of a group, parents before children."""
        return list(dict.fromkeys((*self.index[group].values(), *self.inner[group].values())))

    # names come and go

    def is_fresh_chain(self, group: int, hashes: list[bytes]) -> bool:
        """True if the hashes are distinct and none is a name: a chain's end behind its known prefix always is."""
        fresh, named = set(hashes), (self.index[group], self.inner[group])
        return len(fresh) == len(hashes) and all(names.keys().isdisjoint(fresh) for names in named)

    def add_name(self, slot: int, meta: BlockStoreMeta) -> bool:
        """A prefix ends inside this block. False if another block has the name: it stays that block's."""
        group, block_hash = self._group[slot], meta.block_hashes
        names = self.inner[group]
        if block_hash in names or block_hash in self.index[group]:
            return False
        names[block_hash] = slot
        self._more_names.setdefault(slot, []).append(meta)
        return True

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

    # instruments

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
