"""A cut: what a source of events holds at one number, frozen at the price of copying a few columns.

It is taken between two batches, so it is the fold of all numbers so far (I4), and read later, in slices, while the
source goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

from kvevents_service.core.frozen_metas import FrozenMetas
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.rows import Row, are_alike
from kvevents_service.core.slots import READY
from kvevents_service.core.stretches import Stretches


class Cut(Protocol):
    """A frozen resident set."""

    def sizes(self) -> list[tuple[int, int]]:
        """(blocks, tokens in a block) of each part, at least what `rows` will give."""

    def rows(self) -> Iterator[Row]:
        """Everything resident, each block once, parents before children."""


class StateSource(Protocol):
    """Where resident blocks are: a tier of ours, or a stream that is relayed."""

    def cut(self) -> Cut:
        """What can be loaded now. Milliseconds for a million blocks: called on the loop."""


class PoolCut(NamedTuple):
    """The columns of a pool, and what `sizes` says. more: the inner names of blocks that have others, by slot."""

    counts: list[tuple[int, int]]
    more: dict[int, list[BlockStoreMeta]]
    state: bytes
    metas: FrozenMetas
    positions: memoryview[int]
    parents: memoryview[int]

    def sizes(self) -> list[tuple[int, int]]:
        return self.counts

    def runs(self) -> Iterator[BlockStoreMeta]:
        """The runs of `rows`."""
        return (run for row in self.rows() for run in row.runs)

    def rows(self) -> Iterator[Row]:
        """Chain by chain as far as they are not told yet. What ends inside a block: behind all whole blocks."""
        inner: list[Row] = []
        stretches = Stretches.of(self.state, self.positions, self.parents)
        for start, stop in stretches.parents_first(self.parents):
            row = self._whole(stretches, start, stop)
            if row is not None:
                yield row
            else:
                yield from self._pieces([*stretches.runs(start, stop), stop], inner)
        yield from inner
        for slot, names in self.more.items():
            if self.state[slot] == READY:
                yield from map(Row.of, names)

    def _whole(self, stretches: Stretches, start: int, stop: int) -> Row | None:
        """The usual case, seen at once: snapshots that are alike, each there from its first block to its last."""
        runs, at = [], start
        while at < stop and stretches.is_linked(start, stop):
            meta, first = self.metas.at(at), at
            if meta is None or self.positions[at]:
                return None
            at += len(meta.block_hashes) // meta.hash_bytes
            if not stretches.is_run(first, at):
                return None
            runs.append(meta)
        return Row(runs, stop - start) if at == stop and are_alike(runs) else None

    def _pieces(self, bounds: list[int], inner: list[Row]) -> Iterator[Row]:
        """What is there of each snapshot, looked at slot by slot; inner names are added to `inner`."""
        for start, stop in pairwise(bounds):
            while start < stop:
                end = self._end(start, stop)
                meta, first = self.metas.at(start), self.positions[start]
                assert meta is not None, "what is READY has its snapshot"
                row = Row([meta.part(first, first + end - start)], end - start)
                if meta.inner:
                    inner.append(row)
                else:
                    yield row
                start = end

    def _end(self, start: int, stop: int) -> int:
        """Where what is of one snapshot ends in a run of slots."""
        meta, metas = self.metas.at(start), self.metas.part(start, stop)
        others = (start + place for place, other in enumerate(metas) if other is not meta)
        return stop if metas.count(meta) == stop - start else next(others)
