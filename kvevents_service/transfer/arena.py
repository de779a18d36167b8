"""Arenas: where a tier's blocks are, one slot a block. The host's are anonymous memory, gone with the process."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from kvevents_service.errors import ConfigError, KvEventsError
from kvevents_service.transfer.copy import load_blocks, store_blocks
from kvevents_service.transfer.memory import EngineMemory


class BlocksLost(KvEventsError):
    """What was read is not what was stored: the bytes in `slots` are gone for good."""

    def __init__(self, slots: array[int], reason: str) -> None:
        super().__init__(f"{len(slots)} blocks lost: {reason}")
        self.slots = slots


class Arena(Protocol):
    """Slots of `block_bytes` bytes. `store` and `load` copy pairwise, and may each run in a thread of its own.

    An exception means that the bytes did not come over; what was written to is then worth nothing. `BlocksLost`
    from a load says which slots will never come over again.
    """

    block_bytes: int

    def store(self, memory: EngineMemory, blocks: array[int], slots: array[int]) -> None:
        """Engine blocks -> slots."""

    def load(self, memory: EngineMemory, blocks: array[int], slots: array[int]) -> None:
        """Slots -> engine blocks."""


class Storage(Protocol):
    """What arenas are made of."""

    medium: str

    def slot_bytes(self, block_sizes: Sequence[int]) -> int:
        """What a block of these sizes, one a rank, takes of the tier."""

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[Arena]:
        """An arena of `slots` slots for each block size. Those that were made before are void."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges of its own."""

    def close(self) -> None:
        """No copy may be running."""


class HostStorage:
    """The memory of this machine."""

    medium = "CPU"

    def slot_bytes(self, block_sizes: Sequence[int]) -> int:
        return sum(block_sizes)

    def stats(self) -> dict[str, int]:
        return {}

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[Arena]:
        return [HostArena(slots, block_bytes) for block_bytes in block_sizes]

    def close(self) -> None:
        """Memory goes with its arenas."""


class HostArena:
    """Memory for `slots` blocks. A slot holds a block's regions one after another."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        try:
            self._map = mmap.mmap(-1, slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError("host_bytes", f"an amount this machine can map ({error.strerror})") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The arena as a tensor [slots, block_bytes / itemsize]; block_bytes is a multiple of the item size."""
        return torch.frombuffer(self._map, dtype=dtype).view(self.slots, -1)

    def store(self, memory: EngineMemory, blocks: array[int], slots: array[int]) -> None:
        store_blocks(memory, self, blocks, slots)

    def load(self, memory: EngineMemory, blocks: array[int], slots: array[int]) -> None:
        load_blocks(memory, self, blocks, slots)

    def bytes_of(self, slot: int, count: int) -> memoryview:
        """The bytes of consecutive slots, to read and write."""
        return memoryview(self._map)[slot * self.block_bytes : (slot + count) * self.block_bytes]

    def __repr__(self) -> str:
        return f"<HostArena {self.slots} slots of {self.block_bytes} bytes>"
