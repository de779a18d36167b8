"""Copying whole blocks between memory of this machine, many blocks a call.

A thread that copies while another one runs Python pays up to 5 ms for the interpreter lock after every call, so
what counts is how few calls move the bytes. All of them release the lock while they copy.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvevents_service.transfer.sheet import Sheet

Numbers = NDArray[np.int64]

LARGE_BYTES = 512 * 1024
"""From here on a piece is worth a tensor of its own."""
MIN_GATHER = 8
"""Mean length of runs in the target from which on one gather a run beats a copy a piece."""
VIEWS_A_CALL = 256


class CopyRun(NamedTuple):
    """`blocks` blocks, consecutive on both sides: from `block` on in the engine, from `slot` on in the arena."""

    block: int
    slot: int
    blocks: int


class Moves(NamedTuple):
    """Blocks to copy, pairwise, in ascending order of the targets."""

    targets: Numbers
    sources: Numbers

    @classmethod
    def of(cls, targets: array[int], sources: array[int]) -> Moves:
        to, origin = _numbers(targets), _numbers(sources)
        order = np.argsort(to, kind="stable")
        return cls(to[order], origin[order])

    @property
    def blocks(self) -> int:
        return len(self.targets)

    def parts(self, count: int) -> list[Moves]:
        """At most `count` parts, equal but for one block."""
        pairs = zip(np.array_split(self.targets, count), np.array_split(self.sources, count), strict=True)
        return [part for part in map(Moves._make, pairs) if part.blocks]


def consecutive_runs(blocks: array[int], slots: array[int]) -> Iterator[CopyRun]:
    """Cut a copy into pieces that are consecutive in the engine and in the arena."""
    for block, slot, count in _runs(_numbers(blocks), _numbers(slots)):
        yield CopyRun(block, slot, count)


def _numbers(values: array[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


def _runs(*columns: Numbers) -> Iterator[tuple[int, ...]]:
    """The first row of each run, and its length."""
    starts = run_starts(*columns)
    lengths = np.diff(starts, append=len(columns[0]))
    return zip(*(column[starts].tolist() for column in columns), lengths.tolist(), strict=True)


def run_starts(*columns: Numbers) -> Numbers:
    """Rows at which a column does not go on by 1."""
    if not len(columns[0]):
        return np.empty(0, dtype=np.int64)
    breaks = np.any([np.diff(column) != 1 for column in columns], axis=0)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


def copy_blocks(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], moves: Moves) -> None:
    """Copy between tensors [blocks, regions, words] of equal shape but for the first dimension.

    Numbers must be within them: nothing is checked here.
    """
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source, moves)


def shelves(host: torch.Tensor, sheets: Sequence[Sheet]) -> list[torch.Tensor]:
    """The arena's side of each sheet: [slots, regions, words]. `host` is [slots, words]."""
    columns = [host[:, sheet.column : sheet.column + sheet.words] for sheet in sheets]
    return [column.view(-1, *sheet.blocks.shape[1:]) for column, sheet in zip(columns, sheets, strict=True)]


def _copy(target: torch.Tensor, source: torch.Tensor, moves: Moves) -> None:
    block_bytes = target.shape[1] * target.shape[2] * target.itemsize
    mean_bytes = block_bytes * moves.blocks // len(run_starts(*moves))
    if mean_bytes < LARGE_BYTES and moves.blocks >= MIN_GATHER * len(run_starts(moves.targets)):
        _gather(target, source, moves)
    elif mean_bytes >= LARGE_BYTES or target.shape[1] > 2:
        _copy_runs(target, source, moves)
    else:
        _copy_rows(target, source, moves)


def _gather(target: torch.Tensor, source: torch.Tensor, moves: Moves) -> None:
    """One call for each run of targets: their sources may be anywhere."""
    index, done = torch.from_numpy(moves.sources), 0
    for first, count in _runs(moves.targets):
        chosen = index[done : done + count]
        torch.index_select(source, 0, chosen, out=target[first : first + count])
        done += count


def _copy_runs(target: torch.Tensor, source: torch.Tensor, moves: Moves) -> None:
    """A view of each run, some hundred views a call."""
    runs = list(_runs(*moves))
    for start in range(0, len(runs), VIEWS_A_CALL):
        some = runs[start : start + VIEWS_A_CALL]
        to = [target[first : first + count] for first, _, count in some]
        torch._foreach_copy_(to, [source[first : first + count] for _, first, count in some])


def _copy_rows(target: torch.Tensor, source: torch.Tensor, moves: Moves) -> None:
    """Small pieces, scattered on both sides: no call of torch or numpy takes them all at once."""
    row_bytes = target.shape[2] * target.itemsize
    for region in range(target.shape[1]):
        to = _addresses(target[:, region], moves.targets)
        origin = _addresses(source[:, region], moves.sources)
        deque(map(ctypes.memmove, to, origin, repeat(row_bytes)), maxlen=0)


def _addresses(rows: torch.Tensor, numbers: Numbers) -> list[int]:
    addresses: list[int] = (rows.data_ptr() + numbers * (rows.stride(0) * rows.itemsize)).tolist()
    return addresses
