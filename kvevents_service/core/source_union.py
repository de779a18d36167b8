"""Several sources of one rank, told as one: a block comes with the first that has it and goes with the last.

Which others have it is asked of them, so nothing is kept here. What each says is to be given to `told_of` before
another one says something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.core.residency import key64
from kvevents_service.core.rows import Row
from kvevents_service.core.source import StreamSource
from kvevents_service.core.source_cut import SourceCut


class SourceUnion:
    """A `StateSource` of all of them."""

    def __init__(self, sources: Sequence[StreamSource]) -> None:
        self.sources = sources

    def __repr__(self) -> str:
        return f"<SourceUnion of {self.sources!r}>"

    def told_of(self, source: StreamSource, said: Sequence[Announcement]) -> tuple[Announcement, ...]:
        """What this source says, without what others have as well."""
        others = [other for other in self.sources if other is not source]
        return tuple([part for item in said for part in _told(item, others)])

    def cut(self) -> UnionCut:
        return UnionCut([source.cut() for source in self.sources])


class UnionCut(NamedTuple):
    """A `Cut`: of a block that several have, that of the first."""

    cuts: list[SourceCut]

    def sizes(self) -> list[tuple[int, int]]:
        return [size for cut in self.cuts for size in cut.sizes()]

    def runs(self) -> Iterator[BlockStoreMeta]:
        told: dict[tuple[str, int], set[int]] = {}
        for place, cut in enumerate(self.cuts):
            for run in cut.runs():
                keys, before = _keys(run), told.setdefault((run.medium, run.group.index), set())
                yield from _parts(run, [key not in before for key in keys]) if place else (run,)
                before.update(keys)

    def rows(self) -> Iterator[Row]:
        return map(Row.of, self.runs())


def _told(item: Announcement, others: list[StreamSource]) -> Iterator[Announcement]:
    if not isinstance(item, BlockStoreMeta | RemovedRun):
        yield item
        return
    having = [other for other in others if other.shown_on(item.medium, item.group.index)]
    if not having:
        yield item
        return
    medium, group = item.medium, item.group.index
    keys = _keys(item) if isinstance(item, BlockStoreMeta) else [*map(key64, item.block_hashes)]
    ours = [not any(other.shows(medium, group, key) for other in having) for key in keys]
    if isinstance(item, BlockStoreMeta):
        yield from _parts(item, ours)
    elif any(ours):
        left = tuple([name for name, own in zip(item.block_hashes, ours, strict=True) if own])
        yield RemovedRun(item.group, medium, left, item.inner)


def _keys(run: BlockStoreMeta) -> list[int]:
    return [key64(run.hash_at(place)) for place in range(run.blocks)]


def _parts(run: BlockStoreMeta, kept: list[bool]) -> Iterator[BlockStoreMeta]:
    """The stretches of a run that are kept."""
    start = 0
    for place, keep in enumerate([*kept, False]):
        if not keep:
            if start < place:
                yield run.part(start, place)
            start = place + 1
