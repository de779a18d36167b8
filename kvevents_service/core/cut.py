"""A cut: what a source of events holds at one number, frozen at the price of copying a few columns.

It is taken between two batches, so it is the fold of all numbers so far (I4), and read later, in slices, while the
source goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.slots import READY

_LONGEST: Final = 1 << 12
_COUNTING: Final = array("i", range(_LONGEST))
_ALL_READY: Final = bytes((READY,)) * _LONGEST
"""What the columns of a run look like; a longer run is looked at slot by slot."""


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
        at = 0
        while at < len(slots):
            meta, start = self.metas[slots[at]], self.positions[slots[at]]
            length = 1
            if meta is not None:
                rest = meta.blocks - start
                whole = self._is_whole(slots[at : at + rest], meta, start, rest)
                length = rest if whole else self._length(slots[at : at + rest], meta, start)
                if whole and start == 0:
                    yield meta
                elif whole or self.state[slots[at]] == READY:
                    yield meta.part(start, start + length)
            at += length

    def _length(self, slots: list[int], meta: BlockStoreMeta, start: int) -> int:
        """How many of these are alike: all READY or none, consecutive blocks of the snapshot. At least 1."""
        state = self.state[slots[0]]
        for length, slot in enumerate(slots):
            alike = self.metas[slot] is meta and self.positions[slot] == start + length
            if not alike or self.state[slot] != state:
                return length
        return len(slots)

    def _is_whole(self, slots: list[int], meta: BlockStoreMeta, start: int, count: int) -> bool:
        """The usual case, seen at the speed of comparing columns: the run lies in slots that follow each other."""
        span = slice(slots[0], slots[0] + count)
        return (
            self.metas[span].count(meta) == count
            and self.state[span] == _ALL_READY[:count]
            and self.positions[span] == _COUNTING[start : start + count]
            and slots == list(range(span.start, span.stop))
        )
