"""Rows: runs that continue each other, as a state tells them. What was stored step by step becomes one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from kvevents_service.core.metadata import BlockStoreMeta

LONG: Final = 2048
"""Blocks behind which no run is added: so much is looked at in one step."""


_SAID_ONCE: Final = attrgetter("hash_bytes", "group", "medium", "lora_name", "lora_id", "extra_keys", "inner")


class Row(NamedTuple):
    """Runs that one event can tell, and how many blocks they are. Not empty."""

    runs: list[BlockStoreMeta]
    blocks: int

    @classmethod
    def of(cls, run: BlockStoreMeta) -> Row:
        """Of one run."""
        return cls([run], run.blocks)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.runs[0].group.block_size

    def part(self, start: int, stop: int) -> Row:
        """Its blocks [start, stop)."""
        if (start, stop) == (0, self.blocks):
            return self
        runs, at = [], 0
        for run in self.runs:
            first, last = max(start - at, 0), min(stop - at, run.blocks)
            if first < last:
                runs.append(run.part(first, last))
            at += run.blocks
        return Row(runs, stop - start)

    def head(self) -> BlockStoreMeta:
        """The first run, with the extra keys of all."""
        first = self.runs[0]
        if first.extra_keys is None or len(self.runs) == 1:
            return first
        return msgspec.structs.replace(
            first, extra_keys=[entry for run in self.runs for entry in run.extra_keys or ()]
        )


def are_alike(runs: list[BlockStoreMeta]) -> bool:
    """Whether an event can tell them, if each continues the one before. A quick look: what has more to tell than
    tokens and hashes is not taken for alike."""
    said = [*map(_SAID_ONCE, runs)]
    return said.count(said[0]) == len(said) and runs[0].extra_keys is None and not runs[0].inner


def joined(rows: Iterable[Row]) -> Iterator[Row]:
    """All of them, in order, those together that continue each other."""
    runs: list[BlockStoreMeta] = []
    blocks = 0
    for row in rows:
        if runs and (blocks >= LONG or not _continues(row.runs[0], runs[-1])):
            yield Row(runs, blocks)
            runs, blocks = [], 0
        runs += row.runs
        blocks += row.blocks
    if runs:
        yield Row(runs, blocks)


def _continues(run: BlockStoreMeta, before: BlockStoreMeta) -> bool:
    """Whether it is the next blocks of the run before it, alike in all that an event says once."""
    return (
        run.parent_block_hash == before.block_hashes[-before.hash_bytes :]
        and run.hash_bytes == before.hash_bytes
        and run.group == before.group
        and run.medium == before.medium
        and run.lora_name == before.lora_name
        and run.lora_id == before.lora_id
        and (run.extra_keys is None) == (before.extra_keys is None)
        and not (run.inner or before.inner)
    )
