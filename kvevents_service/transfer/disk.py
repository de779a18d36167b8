"""The disk tier: one file without a name, each rank's slots one after another in it.

It is unlinked as soon as it is made, so it leaves with the process, and all its space is taken at start: the disk
is not found full later. Reads and writes go through a bounded buffer, one a direction, in the workers' threads.
"""

from __future__ import annotations

import os
import uuid
import weakref
from array import array
from collections.abc import Iterator, Sequence

from kvevents_service.errors import ConfigError
from kvevents_service.transfer.arena import Arena, HostArena
from kvevents_service.transfer.copy import CopyRun, consecutive_runs
from kvevents_service.transfer.memory import BlockMemory

STAGING_BYTES = 4 * 1024 * 1024
"""What is copied between two calls to the disk, or one block if that is more."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskStorage:
    """`size_bytes` of the file system that `directory` is on. ConfigError if they cannot be had."""

    medium = "STORAGE"

    def __init__(self, directory: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = _nameless_file(directory)
        self._closing = weakref.finalize(self, os.close, self.fd)
        _check_space(self.fd, size_bytes)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            raise ConfigError("disk_bytes", f"space that can be taken ({error.strerror})") from error

    def __repr__(self) -> str:
        return f"<DiskStorage {self.size_bytes} bytes>"

    def close(self) -> None:
        """Give the space back. No copy may be running."""
        self._closing()

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[Arena]:
        """Their parts of the file, one behind the other: together they fit, as the tier's capacity says."""
        starts = [slots * sum(block_sizes[:rank]) for rank in range(len(block_sizes))]
        return [DiskArena(self, *part, slots) for part in zip(starts, block_sizes, strict=True)]


class DiskArena:
    """Slots of one rank in the file, from byte `start` on."""

    def __init__(self, storage: DiskStorage, start: int, block_bytes: int, slots: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self._storage = storage
        self._start = start
        staged = max(1, min(slots, STAGING_BYTES // block_bytes))
        self._outgoing, self._incoming = HostArena(staged, block_bytes), HostArena(staged, block_bytes)

    def __repr__(self) -> str:
        return f"<DiskArena {self.slots} slots of {self.block_bytes} bytes>"

    def store(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> None:
        staging = self._outgoing
        for some, places, runs in _staged(staging.slots, blocks, slots):
            staging.store(memory, some, places)
            for place, slot, count in runs:
                _write(self._storage.fd, staging.bytes_of(place, count), self._offset(slot))

    def load(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> None:
        staging = self._incoming
        for some, places, runs in _staged(staging.slots, blocks, slots):
            for place, slot, count in runs:
                _read(self._storage.fd, staging.bytes_of(place, count), self._offset(slot))
            staging.load(memory, some, places)

    def _offset(self, slot: int) -> int:
        return self._start + slot * self.block_bytes


def _staged(
    room: int, blocks: array[int], slots: array[int]
) -> Iterator[tuple[array[int], array[int], list[CopyRun]]]:
    """Cut a copy into pieces that fit into the buffer: blocks, their places in it, runs of places and slots."""
    for start in range(0, len(blocks), room):
        some = blocks[start : start + room]
        places = array("i", range(len(some)))
        yield some, places, list(consecutive_runs(places, slots[start : start + room]))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        if not done:
            raise OSError("the disk took no more bytes")
        data, offset = data[done:], offset + done


def _read(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.preadv(fd, [data], offset)
        if not done:
            raise OSError("the file ends before its last slot")
        data, offset = data[done:], offset + done


def _nameless_file(directory: str) -> int:
    path = os.path.join(directory, f".kvevents-{uuid.uuid4().hex}")
    try:
        fd = os.open(path, _FLAGS, 0o600)
        os.unlink(path)
    except OSError as error:
        raise ConfigError("disk_path", f"a directory that files can be made in ({error.strerror})") from error
    return fd


def _check_space(fd: int, size_bytes: int) -> None:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if size_bytes > free:
        raise ConfigError("disk_bytes", f"at most {free}, what is free on the file system of disk_path")
