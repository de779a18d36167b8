"""What a source has announced at one number, frozen: copies of columns, read later while the source goes on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.rows import Row
from kvevents_service.core.source_run import RUN_BLOCKS, Run

SHOWN: Final = 3
_ALL_SHOWN: Final = bytes((SHOWN,)) * RUN_BLOCKS
_COUNTING: Final = array("i", range(RUN_BLOCKS))
"""What the columns of a run look like."""


class SourceCut(NamedTuple):
    """A `Cut`. shelves: the slots of each, every shown one behind its parent."""

    shelves: list[list[int]]
    state: bytes
    runs_of_slots: list[Run | None]
    positions: array[int]

    def sizes(self) -> list[tuple[int, int]]:
        runs = [(len(slots), self.runs_of_slots[slots[0]]) for slots in self.shelves if slots]
        return [(blocks, run.group.block_size) for blocks, run in runs if run is not None]

    def runs(self) -> Iterator[BlockStoreMeta]:
        for slots in self.shelves:
            yield from self._runs_on(slots)

    def rows(self) -> Iterator[Row]:
        return map(Row.of, self.runs())

    def _runs_on(self, slots: list[int]) -> Iterator[BlockStoreMeta]:
        at = 0
        while at < len(slots):
            if self.state[slots[at]] != SHOWN:
                at += 1
                continue
            run, start = self.runs_of_slots[slots[at]], self.positions[slots[at]]
            assert run is not None, "a slot in use has its run"
            length = self._length(slots, at, run, start)
            yield run.part(start, start + length)
            at += length

    def _length(self, slots: list[int], at: int, run: Run, start: int) -> int:
        """How many of these slots have the next shown blocks of the run. At least 1."""
        whole = 1 if run.blocks == start + 1 else self._whole(slots, at, run, start)
        if whole:
            return whole
        length = 1
        for slot in slots[at + 1 : at + RUN_BLOCKS]:
            same = self.runs_of_slots[slot] is run and self.positions[slot] == start + length
            if not same or self.state[slot] != SHOWN:
                break
            length += 1
        return length

    def _whole(self, slots: list[int], at: int, run: Run, start: int) -> int:
        """The usual case, at the speed of comparing columns: the rest of the run lies in slots in a row."""
        first, count = slots[at], run.blocks - start
        span = slice(first, first + count)
        alike = (
            slots[at : at + count] == list(range(first, first + count))
            and self.state[span] == _ALL_SHOWN[:count]
            and self.runs_of_slots[span].count(run) == count
            and self.positions[span] == _COUNTING[start : start + count]
        )
        return count if alike else 0
