"""Every block that a source holds: packed columns, a tree of links, an index for each medium and group.

    SHOWN: announced. WAITING: held by the source, but its parent is not shown.

A block of a prefix kind is shown only behind its parent (I6), so that an index in the order of its entries always
has parents before children. About 250 bytes a block of 16 tokens, its tokens and hash included.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvevents_service.core.cut import PoolCut
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.residency import key64
from kvevents_service.core.slots import FREE, NO_SLOT, PENDING, READY

SHOWN: Final = READY
WAITING: Final = PENDING
_GROW: Final = 4096
"""Slots at a time: a source that grows must not stop for a copy of all it has."""
_SLOT_BYTES: Final = 4


class ShelfName(NamedTuple):
    """One tier and group of a source."""

    medium: str
    group: int


class Shelf:
    """The blocks of one medium and group, by the low 64 bits of their hash.

    missing: the waiting blocks whose parent is not held, by that parent.
    """

    def __init__(self) -> None:
        self.shown: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.missing: dict[int, dict[int, None]] = {}

    def find(self, key: int) -> int | None:
        slot = self.shown.get(key)
        return self.waiting.get(key) if slot is None else slot

    def is_fresh(self, keys: list[int]) -> bool:
        """None of them is held, and none comes twice."""
        fresh = set(keys)
        held = not (self.shown.keys().isdisjoint(fresh) and self.waiting.keys().isdisjoint(fresh))
        return len(fresh) == len(keys) and not held


class SourceTable:
    """Slots and what is in them. Grows as the source does; a freed slot is used again."""

    def __init__(self) -> None:
        self.shelves: dict[ShelfName, Shelf] = {}
        self.waiting: dict[int, None] = {}
        """Every waiting slot, the oldest first."""
        self.state = bytearray()
        self.seen = bytearray()
        """In which telling of the state a block was last stored: see `StreamSource`."""
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.previous_sibling = array("i")
        self.position = array("i")
        self.metas: list[BlockStoreMeta | None] = []
        self._free: list[int] = []

    def __repr__(self) -> str:
        return f"<SourceTable {self.shown} shown, {len(self.waiting)} waiting>"

    def __len__(self) -> int:
        return len(self.metas) - len(self._free)

    @property
    def shown(self) -> int:
        return sum(len(shelf.shown) for shelf in self.shelves.values())

    def shelf(self, medium: str, group: int) -> Shelf:
        name = ShelfName(medium, group)
        return self.shelves.get(name) or self.shelves.setdefault(name, Shelf())

    def shelf_of(self, slot: int) -> Shelf:
        meta = self.meta(slot)
        return self.shelves[ShelfName(meta.medium, meta.group.index)]

    def meta(self, slot: int) -> BlockStoreMeta:
        meta = self.metas[slot]
        assert meta is not None, "a slot in use has its snapshot"
        return meta

    def hash_of(self, slot: int) -> bytes:
        return self.meta(slot).hash_at(self.position[slot])

    def key_of(self, slot: int) -> int:
        return key64(self.hash_of(slot))

    def parent_key(self, slot: int) -> int | None:
        """What the block's parent is called, held or not."""
        meta, position = self.meta(slot), self.position[slot]
        before = meta.hash_at(position - 1) if position else meta.parent_block_hash
        return None if before is None else key64(before)

    # slots

    def fill(self, meta: BlockStoreMeta, state: int, seen: int) -> list[int]:
        """A slot for each block of `meta`, linked to nothing."""
        slots = self._take(meta.blocks)
        for position, slot in enumerate(slots):
            self.state[slot], self.seen[slot] = state, seen
            self.position[slot] = position
            self.metas[slot] = meta
        return slots

    def _take(self, count: int) -> list[int]:
        if len(self._free) < count:
            self._grow(max(_GROW, count))
        slots = self._free[-count:]
        del self._free[-count:]
        slots.reverse()
        return slots

    def _grow(self, count: int) -> None:
        first = len(self.metas)
        self.state += bytes((FREE,)) * count
        self.seen += bytes(count)
        for links in (self.parent, self.first_child, self.next_sibling, self.previous_sibling):
            links.extend(array("i", (NO_SLOT,)) * count)
        self.position.frombytes(bytes(_SLOT_BYTES * count))
        self.metas += [None] * count
        self._free[:0] = range(first + count - 1, first - 1, -1)

    def release(self, slot: int) -> None:
        """Forget a block that has no links and is in no index."""
        self.state[slot], self.metas[slot] = FREE, None
        self._free.append(slot)

    # links

    def chain(self, slots: Sequence[int]) -> None:
        """Each one is the only child of the one before it: fresh slots."""
        before = NO_SLOT
        for slot in slots:
            if before != NO_SLOT:
                self.parent[slot] = before
                self.first_child[before] = slot
            before = slot

    def link(self, slot: int, parent: int) -> None:
        first = self.first_child[parent]
        if first != NO_SLOT:
            self.previous_sibling[first] = slot
        self.parent[slot], self.next_sibling[slot], self.previous_sibling[slot] = parent, first, NO_SLOT
        self.first_child[parent] = slot

    def unlink(self, slot: int) -> None:
        """From its parent."""
        parent, before, after = self.parent[slot], self.previous_sibling[slot], self.next_sibling[slot]
        if after != NO_SLOT:
            self.previous_sibling[after] = before
        if before != NO_SLOT:
            self.next_sibling[before] = after
        elif parent != NO_SLOT:
            self.first_child[parent] = after
        self.parent[slot] = self.next_sibling[slot] = self.previous_sibling[slot] = NO_SLOT

    def children(self, slot: int) -> list[int]:
        children, child = [], self.first_child[slot]
        while child != NO_SLOT:
            children.append(child)
            child = self.next_sibling[child]
        return children

    def root(self, slot: int) -> int:
        """The first block of the chain that this one is held in."""
        while self.parent[slot] != NO_SLOT:
            slot = self.parent[slot]
        return slot

    def subtree(self, slot: int) -> list[int]:
        """The block and all behind it, parents before children, each chain in one piece."""
        found, todo = [], [slot]
        while todo:
            slot = todo.pop()
            found.append(slot)
            todo += self.children(slot)
        return found

    def stop_missing(self, shelf: Shelf, slot: int) -> None:
        """A waiting block is not held any more: its parent need not be awaited for it."""
        parent_key = self.parent_key(slot)
        orphans = {} if parent_key is None else shelf.missing.get(parent_key, {})
        if parent_key is not None and slot in orphans:
            del orphans[slot]
            if not orphans:
                del shelf.missing[parent_key]

    # what is shown

    def show(self, shelf: Shelf, slots: Iterable[int]) -> None:
        """Waiting blocks are shown from now on, in this order."""
        for slot in slots:
            key = self.key_of(slot)
            self.state[slot] = SHOWN
            del shelf.waiting[key], self.waiting[slot]
            shelf.shown[key] = slot

    def hide(self, shelf: Shelf, slots: Iterable[int]) -> None:
        """Shown blocks wait from now on."""
        for slot in slots:
            key = self.key_of(slot)
            self.state[slot] = WAITING
            del shelf.shown[key]
            shelf.waiting[key] = slot
            self.waiting[slot] = None

    def runs(self, slots: Iterable[int]) -> Iterator[BlockStoreMeta]:
        """What to announce of these, in order: neighbours of one snapshot as one run."""
        run: list[int] = []
        for slot in slots:
            if run and not self._continues(slot, run[-1]):
                yield self._part(run)
                run = []
            run.append(slot)
        if run:
            yield self._part(run)

    def _continues(self, slot: int, before: int) -> bool:
        return self.metas[slot] is self.metas[before] and self.position[slot] == self.position[before] + 1

    def _part(self, run: list[int]) -> BlockStoreMeta:
        start = self.position[run[0]]
        return self.meta(run[0]).part(start, start + len(run))

    def cut(self) -> PoolCut:
        """What is shown, frozen: copies of columns, no loop over blocks."""
        groups = [list(shelf.shown.values()) for shelf in self.shelves.values()]
        return PoolCut(groups, [[] for _ in groups], {}, bytes(self.state), self.metas[:], self.position[:])

    def check(self) -> None:
        """Assert every internal invariant; for tests, O(slots)."""
        indexed = [
            slot for shelf in self.shelves.values() for slot in (*shelf.shown.values(), *shelf.waiting.values())
        ]
        assert len(indexed) == len(set(indexed)) == len(self)
        assert {slot for slot in indexed if self.state[slot] == WAITING} == set(self.waiting)
        for name, shelf in self.shelves.items():
            self._check_shelf(name, shelf)

    def _check_shelf(self, name: ShelfName, shelf: Shelf) -> None:
        missing = {slot: key for key, slots in shelf.missing.items() for slot in slots}
        places = {slot: place for place, slot in enumerate(shelf.shown.values())}
        assert all(shelf.missing.values())
        assert not any(shelf.find(key) is not None for key in shelf.missing)
        for key, slot in (*shelf.shown.items(), *shelf.waiting.items()):
            assert self.key_of(slot) == key
            assert ShelfName(self.meta(slot).medium, self.meta(slot).group.index) == name
            parent = self.parent[slot]
            if slot in places:
                assert slot not in missing
                assert parent == NO_SLOT or places[parent] < places[slot]
            else:
                assert (parent == NO_SLOT) == (slot in missing)
                assert parent == NO_SLOT or self.state[parent] == WAITING
            assert all(self.parent[child] == slot for child in self.children(slot))
