"""What the tests of the disk tier share: an engine's memory, a descriptor that stands for a bad disk."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.transfer.arena import BlocksLost
from kvevents_service.transfer.disk import DiskStorage
from kvevents_service.transfer.disk_arena import DiskArena
from kvevents_service.transfer.memory import attach
from kvevents_service.wire.control import Memory

LAYERS = 2
SECTORS, PADDED, ODD = 16384, 20000, 80
"""Block sizes: whole sectors, a sector that is not full, one for the page cache."""


class Engine:
    """`blocks` blocks of `block_bytes` random bytes in two layers; in one they lie as in a tier in front."""

    def __init__(self, block_bytes: int, blocks: int = 32, seed: int = 7, layers: int = LAYERS) -> None:
        self.blocks, self.layers, self.layer_bytes = blocks, layers, block_bytes // layers
        self.shared = SharedMemory.create(blocks * block_bytes)
        self.shared.map[:] = random.Random(seed).randbytes(blocks * block_bytes)
        regions = uniform_layers(layers, blocks, self.layer_bytes)
        self.memory = attach([Memory(blocks * block_bytes)], regions, [os.dup(self.shared.fd)])

    def __getitem__(self, block: int) -> bytes:
        starts = [(layer * self.blocks + block) * self.layer_bytes for layer in range(self.layers)]
        return b"".join(self.shared.map[start : start + self.layer_bytes] for start in starts)

    def __setitem__(self, block: int, content: bytes) -> None:
        for layer in range(self.layers):
            start = (layer * self.blocks + block) * self.layer_bytes
            self.shared.map[start : start + self.layer_bytes] = content[layer * self.layer_bytes :][
                : self.layer_bytes
            ]

    def wipe(self) -> None:
        self.shared.map[:] = bytes(len(self.shared.map))

    def close(self) -> None:
        self.memory.close()
        os.close(self.shared.fd)


def ints(*numbers: int) -> array[int]:
    return array("i", numbers)


@contextmanager
def instead(storage: DiskStorage, path: str, flags: int = os.O_RDWR) -> Iterator[None]:
    """The storage's descriptors lead to another file for a while."""
    numbers = [fd for fd in (storage._file.fd, storage._file.direct_fd) if fd is not None]
    kept, other = [os.dup(fd) for fd in numbers], os.open(path, flags)
    try:
        for number in numbers:
            os.dup2(other, number, inheritable=False)
        yield
    finally:
        for number, own in zip(numbers, kept, strict=True):
            os.dup2(own, number, inheritable=False)
        for fd in (other, *kept):
            os.close(fd)


def lost_of(arena: DiskArena, engine: Engine, *slots: int) -> list[int]:
    """Slots that a load says are lost; else every one of these has what was stored.

    It goes into the engine's last blocks; what was stored came from those of the slots' own numbers.
    """
    places = ints(*range(engine.blocks - len(slots), engine.blocks))
    try:
        arena.load(engine.memory, places, ints(*slots))
    except BlocksLost as error:
        return error.slots.tolist()
    assert [engine[place] for place in places] == [engine[slot] for slot in slots]
    return []
