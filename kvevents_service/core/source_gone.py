"""Blocks of a source that are announced as gone: as few removals as say it, in the order given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from kvevents_service.core.metadata import RemovedRun
from kvevents_service.core.source_run import Run
from kvevents_service.wire.control import GroupSpec


class Gone(NamedTuple):
    """A block that is not announced any more."""

    run: Run
    position: int


def removed_runs(gone: Iterable[Gone]) -> Iterator[RemovedRun]:
    for (group, medium, inner, _), blocks in groupby(gone, _kind):
        yield RemovedRun(group, medium, tuple([run.hash_at(position) for run, position in blocks]), inner)


def _kind(gone: Gone) -> tuple[GroupSpec, str, bool, int]:
    """One removal can say those that are equal in this."""
    run = gone.run
    return run.group, run.medium, run.inner, run.hash_bytes
