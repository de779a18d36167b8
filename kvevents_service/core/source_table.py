"""Every block that a source holds: packed columns, a tree of links, an index for each medium and group.

    WAITING  its parent, or one before that, is not held
    AWAY     not announced, as the source is away
    SHOWN    announced

A block of a prefix kind is shown only behind its parent (I6). An index has parents before children, as far as they
do not wait. About 220 bytes a block of 16 tokens, its tokens and hash included.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.residency import key64
from kvevents_service.core.slots import NO_SLOT
from kvevents_service.core.source_cut import SHOWN, SourceCut
from kvevents_service.core.source_run import RUN_BLOCKS, Run, run_of

FREE: Final = 0
WAITING: Final = 1
AWAY: Final = 2
_GROW: Final = 4096
"""Slots at a time: a source that grows must not stop for a copy of all it has."""
_SLOT_BYTES: Final = 4


class ShelfName(NamedTuple):
    """One tier and group of a source."""

    medium: str
    group: int


class Shelf:
    """The blocks of one medium and group, by the low 64 bits of their hash. shown: how many are announced.

    missing: the waiting blocks whose parent is not held, by that parent.
    """

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.shown = 0
        self.missing: dict[int, dict[int, None]] = {}

    def is_fresh(self, keys: list[int]) -> bool:
        """None of them is held, and none comes twice."""
        if len(keys) == 1:
            return keys[0] not in self.held
        return self.held.keys().isdisjoint(keys) and len(set(keys)) == len(keys)


class SourceTable:
    """Slots and what is in them. Grows as the source does; a freed slot, which has no links, is used again."""

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
        """Of the block in its run."""
        self.runs: list[Run | None] = []
        self._used = 0
        self._free: list[int] = []

    def __repr__(self) -> str:
        return f"<SourceTable {len(self)} blocks, {self.shown} shown, {len(self.waiting)} waiting>"

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def shown(self) -> int:
        return sum(shelf.shown for shelf in self.shelves.values())

    def shelf(self, medium: str, group: int) -> Shelf:
        found = self.shelves.get((medium, group))  # type: ignore[call-overload]  # equal, and sooner made
        return found or self.shelves.setdefault(ShelfName(medium, group), Shelf())

    def run(self, slot: int) -> Run:
        run = self.runs[slot]
        assert run is not None, "a slot in use has its run"
        return run

    def hash_of(self, slot: int) -> bytes:
        return self.run(slot).hash_at(self.position[slot])

    def key_of(self, slot: int) -> int:
        return key64(self.hash_of(slot))

    def parent_key(self, slot: int) -> int | None:
        """What the block's parent is called, held or not."""
        run, position = self.run(slot), self.position[slot]
        before = run.hash_at(position - 1) if position else run.parent_block_hash
        return None if before is None else key64(before)

    # slots

    def fill(self, shelf: Shelf, meta: BlockStoreMeta, state: int, seen: int, behind: int) -> Sequence[int]:
        """A slot for each block of `meta`, linked to nothing. behind: the block before the first, if it is held."""
        blocks = len(meta.block_hashes) // meta.hash_bytes
        slots = self._take(blocks)
        if blocks > RUN_BLOCKS:
            self._fill_many(slots, shelf, meta)
        elif behind == NO_SLOT or not self._grown(slots, meta, behind):
            self._fill(slots, run_of(shelf, meta), 0)
        states, telling = self.state, self.seen
        for slot in slots:
            states[slot] = state
            telling[slot] = seen
        return slots

    def _grown(self, slots: Sequence[int], meta: BlockStoreMeta, behind: int) -> bool:
        """Whether they could be put at the end of the run of the block before."""
        run, position = self.run(behind), self.position[behind] + 1
        grown = position == run.blocks and run.is_continued_by(meta)
        if grown:
            run.grow(meta)
            self._fill(slots, run, position)
        return grown

    def _fill_many(self, slots: Sequence[int], shelf: Shelf, meta: BlockStoreMeta) -> None:
        for start in range(0, len(slots), RUN_BLOCKS):
            piece = meta.part(start, min(start + RUN_BLOCKS, len(slots)))
            self._fill(slots[start : start + RUN_BLOCKS], run_of(shelf, piece), 0)

    def _fill(self, slots: Sequence[int], run: Run, position: int) -> None:
        positions, runs = self.position, self.runs
        for slot in slots:
            positions[slot] = position
            runs[slot] = run
            position += 1

    def _take(self, count: int) -> Sequence[int]:
        free = self._free
        if len(free) >= count:
            slots = free[-count:]
            del free[-count:]
            return slots
        first = self._used
        self._used += count
        if self._used > len(self.runs):
            self._grow(max(_GROW, self._used - len(self.runs)))
        return range(first, self._used)

    def _grow(self, count: int) -> None:
        self.state += bytes(count)
        self.seen += bytes(count)
        for links in (self.parent, self.first_child, self.next_sibling, self.previous_sibling):
            links.extend(array("i", (NO_SLOT,)) * count)
        self.position.frombytes(bytes(_SLOT_BYTES * count))
        self.runs += [None] * count

    def release(self, slot: int) -> None:
        """Forget a block that has no links and is in no index."""
        self.state[slot], self.runs[slot] = FREE, None
        self._free.append(slot)

    # links

    def chain(self, slots: Sequence[int]) -> None:
        """Each one is the only child of the one before it: fresh slots, at least one."""
        parents, children, before = self.parent, self.first_child, slots[0]
        for slot in slots[1:]:
            parents[slot] = before
            children[before] = slot
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

    # what waits

    def wait(self, shelf: Shelf, slots: Iterable[int]) -> None:
        """From now on, for the parent of the first."""
        for slot in slots:
            shelf.shown -= self.state[slot] == SHOWN
            self.state[slot] = WAITING
            self.waiting[slot] = None

    def wait_no_more(self, shelf: Shelf, slots: Iterable[int], state: int) -> None:
        """They are whole from now on, in this order, AWAY or SHOWN."""
        for slot in slots:
            key = self.key_of(slot)
            self.state[slot] = state
            shelf.shown += state == SHOWN
            del self.waiting[slot], shelf.held[key]
            shelf.held[key] = slot

    def runs_of(self, slots: Iterable[int]) -> Iterator[BlockStoreMeta]:
        """What to announce of these, in order: neighbours of one run together."""
        run, start, stop = None, 0, 0
        for slot in slots:
            if self.runs[slot] is not run or self.position[slot] != stop:
                if run is not None:
                    yield run.part(start, stop)
                run, start = self.runs[slot], self.position[slot]
                stop = start
            stop += 1
        if run is not None:
            yield run.part(start, stop)

    def cut(self) -> SourceCut:
        """What is shown, frozen: copies of columns, no loop over blocks."""
        shelves = [[*shelf.held.values()] for shelf in self.shelves.values()]
        return SourceCut(shelves, bytes(self.state), self.runs[:], self.position[:])

    def check(self) -> None:
        """Assert every internal invariant; for tests, O(slots)."""
        indexed = [slot for shelf in self.shelves.values() for slot in shelf.held.values()]
        assert len(indexed) == len(set(indexed)) == len(self)
        assert {slot for slot in indexed if self.state[slot] == WAITING} == set(self.waiting)
        assert FREE not in {self.state[slot] for slot in indexed}
        for name, shelf in self.shelves.items():
            self._check_shelf(name, shelf)

    def _check_shelf(self, name: ShelfName, shelf: Shelf) -> None:
        missing = {slot: key for key, slots in shelf.missing.items() for slot in slots}
        places = {slot: place for place, slot in enumerate(shelf.held.values())}
        assert all(shelf.missing.values())
        assert not shelf.held.keys() & shelf.missing.keys()
        assert shelf.shown == sum(self.state[slot] == SHOWN for slot in places)
        for key, slot in shelf.held.items():
            run, parent, state = self.run(slot), self.parent[slot], self.state[slot]
            assert self.key_of(slot) == key
            assert run.shelf is shelf
            assert ShelfName(run.medium, run.group.index) == name
            if state == WAITING:
                assert (parent == NO_SLOT) == (slot in missing)
                assert parent == NO_SLOT or self.state[parent] == WAITING
            else:
                assert slot not in missing
                assert parent == NO_SLOT or (self.state[parent] >= state and places[parent] < places[slot])
            assert all(self.parent[child] == slot for child in self.children(slot))
