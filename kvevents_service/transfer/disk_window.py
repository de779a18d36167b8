"""The memory that a disk reads into and writes from: a ring of staging, or the blocks where they are."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from kvevents_service.transfer.disk_io import SECTOR_BYTES


class Window(Protocol):
    """Blocks by number, consecutive ones in one piece."""

    def run(self, first: int, count: int) -> memoryview:
        """Consecutive blocks, with whatever padding a slot has."""

    def block(self, number: int) -> memoryview:
        """One block, without padding."""


class Ring(NamedTuple):
    """Places of a staging arena; `bytes_of(place, count)` is its memory."""

    bytes_of: Callable[[int, int], memoryview]
    block_bytes: int

    def run(self, first: int, count: int) -> memoryview:
        return self.bytes_of(first, count)

    def block(self, number: int) -> memoryview:
        return self.bytes_of(number, 1)[: self.block_bytes]


class InPlace(NamedTuple):
    """Blocks one behind the other, as in the arena of a tier in front. They stay mapped while this is there."""

    memory: memoryview
    block_bytes: int

    def check(self, numbers: array[int]) -> None:
        """IndexError unless all of these blocks are there."""
        blocks = len(self.memory) // self.block_bytes
        if numbers and not 0 <= min(numbers) <= max(numbers) < blocks:
            raise IndexError(f"blocks from {min(numbers)} to {max(numbers)}, of {blocks}")

    def run(self, first: int, count: int) -> memoryview:
        return self.memory[first * self.block_bytes : (first + count) * self.block_bytes]

    def block(self, number: int) -> memoryview:
        return self.run(number, 1)


def in_place(views: Sequence[torch.Tensor], slot_bytes: int) -> InPlace | None:
    """The blocks of these views [blocks, words], if a disk can take them as they are; None if they must be staged.

    It can where a block is one region of whole sectors in the memory of the host, with nothing between two blocks.
    Blocks of several regions are better gathered: the many small pages of an engine's memory cost a disk more than
    the copy into large ones.
    """
    if len(views) != 1 or views[0].device.type != "cpu" or not views[0].is_contiguous():
        return None
    view = views[0]
    block_bytes = view.shape[1] * view.itemsize
    if block_bytes != slot_bytes or (view.data_ptr() | block_bytes) % SECTOR_BYTES:
        return None
    return InPlace(view.numpy().data.cast("B"), block_bytes)
