"""Blocks of a source that are announced as gone: as few removals as say it, in the order given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun
from kvevents_service.wire.control import GroupSpec


class Gone(NamedTuple):
    """A block that is not announced any more."""

    meta: BlockStoreMeta
    block_hash: bytes

    @property
    def kind(self) -> tuple[GroupSpec, str, bool, int]:
        """One removal can say those that are equal in this."""
        return self.meta.group, self.meta.medium, self.meta.inner, len(self.block_hash)


def removed_runs(gone: Iterable[Gone]) -> Iterator[RemovedRun]:
    """Block by block."""
    for (group, medium, inner, _), blocks in groupby(gone, attrgetter("kind")):
        yield RemovedRun(group, medium, tuple(block.block_hash for block in blocks), inner)


def all_removed(runs: Iterable[BlockStoreMeta]) -> Iterator[RemovedRun]:
    """Of a whole state: its runs with parents first, said with leaves first. A tenth of the price a block."""
    for (group, medium, inner, _), alike in groupby(reversed([*runs]), _kind_of_run):
        hashes = (block_hash for run in alike for block_hash in _from_its_end(run))
        yield RemovedRun(group, medium, tuple(hashes), inner)


def _kind_of_run(run: BlockStoreMeta) -> tuple[GroupSpec, str, bool, int]:
    return run.group, run.medium, run.inner, run.hash_bytes


def _from_its_end(run: BlockStoreMeta) -> list[bytes]:
    packed, size = run.block_hashes, run.hash_bytes
    return [packed[start : start + size] for start in range(len(packed) - size, -1, -size)]
