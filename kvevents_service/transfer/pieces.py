"""Pieces: a copy of blocks as plain addresses and sizes, for devices that copy by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvevents_service.transfer.copy import Moves, run_starts

Addresses = NDArray[np.uint64]


class Rows(NamedTuple):
    """Where blocks are: block i is `row_bytes` bytes at `address` + i * `stride_bytes`."""

    address: int
    stride_bytes: int
    row_bytes: int

    @property
    def dense(self) -> bool:
        return self.stride_bytes == self.row_bytes

    def at(self, numbers: NDArray[np.int64]) -> Addresses:
        return np.uint64(self.address) + (numbers * self.stride_bytes).astype(np.uint64)


class Pieces(NamedTuple):
    """`sizes[i]` bytes from `sources[i]` to `targets[i]`."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def parts(self, most: int) -> list[Pieces]:
        """In order, at most so many pieces each."""
        starts = range(0, len(self.sizes), most)
        return [Pieces(*(column[start : start + most] for column in self)) for start in starts]


def merged(rows: Sequence[Rows]) -> list[Rows]:
    """Rows whose blocks follow each other without a gap become one: in a slot they do, too."""
    joined: list[Rows] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last and last.stride_bytes == row.stride_bytes and last.address + last.row_bytes == row.address:
            joined[-1] = last._replace(row_bytes=last.row_bytes + row.row_bytes)
        else:
            joined.append(row)
    return joined


def slot_rows(rows: Sequence[Rows], address: int, slot_bytes: int) -> list[Rows]:
    """The arena's side: a slot holds a block's rows one after another."""
    starts = np.cumsum([0, *(row.row_bytes for row in rows)]).tolist()
    return [Rows(address + start, slot_bytes, row.row_bytes) for row, start in zip(rows, starts, strict=False)]


def pieces_of(targets: Sequence[Rows], sources: Sequence[Rows], moves: Moves) -> Pieces:
    """Every piece of a copy. What is dense on both sides goes over in runs."""
    parts = [_pieces(*pair, moves) for pair in zip(targets, sources, strict=True)]
    return Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _pieces(target: Rows, source: Rows, moves: Moves) -> Pieces:
    counts = np.ones(moves.blocks, dtype=np.uint64)
    if target.dense and source.dense:
        starts = run_starts(*moves)
        counts = np.diff(starts, append=moves.blocks).astype(np.uint64)
        moves = Moves(moves.targets[starts], moves.sources[starts])
    return Pieces(target.at(moves.targets), source.at(moves.sources), counts * np.uint64(target.row_bytes))
