"""A cut: what a source of events holds at one number, frozen at the price of copying a few columns.

It is taken between two batches, so it is the fold of all numbers so far (I4), and read later, in slices, while the
source goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.slots import READY


class Cut(Protocol):
    """A frozen resident set."""

    def sizes(self) -> list[tuple[int, int]]:
        """(blocks, tokens in a block) of each part, at least what `runs` will give."""

    def runs(self) -> Iterator[BlockStoreMeta]:
        """Everything resident, each block once, parents before children."""


class StateSource(Protocol):
    """Where resident blocks are: a tier of ours, or a stream that is relayed."""

    def cut(self) -> Cut:
        """What can be loaded now. Milliseconds for a million blocks: called on the loop."""


class PoolCut(NamedTuple):
    """The columns of a pool: the slots of each group in the order they were indexed, and what is in a slot.

    inner: likewise, the slots of each inner name. more: the inner names of blocks that are full.
    """

    groups: list[list[int]]
    inner: list[list[int]]
    more: dict[int, list[BlockStoreMeta]]
    state: bytes
    metas: list[BlockStoreMeta | None]
    positions: array[int]

    def sizes(self) -> list[tuple[int, int]]:
        first = [(len(slots), self.metas[slots[0]]) for slots in (*self.groups, *self.inner) if slots]
        return [(blocks, meta.group.block_size) for blocks, meta in first if meta is not None]

    def runs(self) -> Iterator[BlockStoreMeta]:
        for slots, inner in zip(self.groups, self.inner, strict=True):
            yield from self._runs_of(slots)
            yield from self._names_of(dict.fromkeys(inner))

    def _names_of(self, slots: Iterable[int]) -> Iterator[BlockStoreMeta]:
        """What ends inside a block: behind all whole blocks, which are its parents."""
        for slot in slots:
            meta = self.metas[slot]
            if self.state[slot] == READY and meta is not None:
                if meta.inner:
                    yield meta
                yield from self.more.get(slot, ())

    def _runs_of(self, slots: list[int]) -> Iterator[BlockStoreMeta]:
        """Neighbours of one snapshot become one run. A child is always indexed after its parent."""
        state, metas, positions = self.state, self.metas, self.positions
        meta, start, stop = None, 0, 0
        for slot in slots:
            if state[slot] != READY:
                continue
            if metas[slot] is not meta or positions[slot] != stop:
                if meta is not None:
                    yield meta.part(start, stop)
                meta, start = metas[slot], positions[slot]
                stop = start
            stop += 1
        if meta is not None:
            yield meta.part(start, stop)
