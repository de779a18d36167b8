"""Copying whole blocks between engine memory and the host arena, many blocks a call. Releases the GIL in torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from kvevents_service.transfer.memory import BlockMemory

MIN_MEAN_RUN = 4
"""Below this mean length of consecutive runs, one gather per region beats a copy per run."""


class Slots(Protocol):
    """Host memory as slots, one a block."""

    def view(self, dtype: torch.dtype) -> torch.Tensor: ...


class CopyRun(NamedTuple):
    """`blocks` blocks, consecutive on both sides: from `block` on in the engine, from `slot` on in the arena."""

    block: int
    slot: int
    blocks: int


def consecutive_runs(blocks: array[int], slots: array[int]) -> Iterator[CopyRun]:
    """Cut a copy into pieces that are consecutive in the engine and in the arena."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1 or slots[end] != slots[end - 1] + 1:
            yield CopyRun(blocks[start], slots[start], end - start)
            start = end


def store_blocks(memory: BlockMemory, arena: Slots, blocks: array[int], slots: array[int]) -> None:
    """Engine blocks -> arena slots, pairwise."""
    _copy(memory, arena, blocks, slots, to_engine=False)


def load_blocks(memory: BlockMemory, arena: Slots, blocks: array[int], slots: array[int]) -> None:
    """Arena slots -> engine blocks, pairwise."""
    _copy(memory, arena, blocks, slots, to_engine=True)


def _copy(memory: BlockMemory, arena: Slots, blocks: array[int], slots: array[int], *, to_engine: bool) -> None:
    runs = list(consecutive_runs(blocks, slots))
    by_run = len(blocks) >= MIN_MEAN_RUN * len(runs)
    indices = None if by_run else (torch.tensor(blocks.tolist()), torch.tensor(slots.tolist()))
    host = arena.view(memory.dtype)
    column = 0
    for view in memory.views:
        shelf = host[:, column : column + view.shape[1]]
        if indices is None:
            _copy_runs(view, shelf, runs, to_engine=to_engine)
        elif to_engine:
            view.index_copy_(0, indices[0], shelf.index_select(0, indices[1]))
        else:
            shelf.index_copy_(0, indices[1], view.index_select(0, indices[0]))
        column += view.shape[1]


def _copy_runs(view: torch.Tensor, shelf: torch.Tensor, runs: list[CopyRun], *, to_engine: bool) -> None:
    for block, slot, count in runs:
        engine, host = view[block : block + count], shelf[slot : slot + count]
        target, source = (engine, host) if to_engine else (host, engine)
        target.copy_(source)
