"""An engine's KV memory, as the sidecar sees it: mapped once at hello, unlinked at once, unmapped when it leaves.

A mapping arrives as a descriptor (SCM_RIGHTS) or as the name of a POSIX shared memory object. Named objects are
unlinked as soon as they are mapped, so nothing is left behind whoever is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from kvevents_service.errors import ControlError
from kvevents_service.transfer.cuda_device import cuda_devices
from kvevents_service.transfer.cuda_memory import attach_cuda
from kvevents_service.transfer.marks import Marks
from kvevents_service.transfer.sheet import Sheet, sheets_of
from kvevents_service.wire.control import Memory, Region

SHM_DIR = "/dev/shm"


class BlockMemory(Protocol):
    """Where blocks are, region by region: an engine's memory, or a host arena that stands in its place.

    `views[r]` is a tensor [blocks, block_sizes[r] / itemsize] of `dtype`, the same for all regions; `sheets` are
    the same bytes in fewer tensors. Memory on a GPU has neither, but rows by address.
    """

    views: list[torch.Tensor]
    sheets: list[Sheet]
    dtype: torch.dtype
    blocks: int
    block_sizes: tuple[int, ...]
    block_bytes: int
    marks: Marks

    def intact(self) -> bool:
        """False if it must not be touched any more."""


class SessionMemory(BlockMemory, Protocol):
    """An engine's memory, as its session holds it."""

    def close(self) -> None:
        """Let go of it. No copy that touches it may be running. May take long."""


class EngineMemory:
    """Views of every region: `views[r]` is a tensor [blocks, block_bytes / itemsize] with the region's stride.

    Their dtype is int64 where every offset and size allows it (torch gathers 8 bytes as fast as 1), else uint8.
    """

    def __init__(self, maps: list[mmap.mmap], regions: Sequence[Region], fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        self._sizes = [len(mapping) for mapping in maps]
        self.marks = Marks()
        self.regions = tuple(regions)
        self.blocks = min(region.blocks for region in regions)
        self.block_sizes = tuple(region.block_bytes for region in regions)
        self.block_bytes = sum(self.block_sizes)
        self._maps = maps
        self.dtype = _widest(regions)
        unit = self.dtype.itemsize
        buffers = [torch.frombuffer(m, dtype=self.dtype, count=len(m) // unit) for m in maps]
        self.views = [_view(buffers[region.memory], region, unit) for region in regions]
        self.sheets = sheets_of(self.views)

    def __repr__(self) -> str:
        return f"<EngineMemory {self.blocks} blocks of {self.block_bytes} bytes in {len(self.regions)} regions>"

    def intact(self) -> bool:
        """False if an object has shrunk below its mapping: to touch it then would end this process (SIGBUS)."""
        held = zip(self._fds, self._sizes, strict=False)
        return all(os.fstat(fd).st_size >= size for fd, size in held)

    def close(self) -> None:
        """Unmap. No copy that touches this memory may be running."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self.views.clear()
        self.sheets.clear()
        self._maps.clear()


def widest(*sizes: int) -> torch.dtype:
    """The widest type that fits into these offsets and sizes a whole number of times."""
    return torch.uint8 if any(size % 8 for size in sizes) else torch.int64


def _widest(regions: Sequence[Region]) -> torch.dtype:
    return widest(*(size for r in regions for size in (r.block_bytes, r.stride_bytes, r.offset_bytes)))


def _view(buffer: torch.Tensor, region: Region, unit: int) -> torch.Tensor:
    shape = (region.blocks, region.block_bytes // unit)
    return torch.as_strided(buffer, shape, (region.stride_bytes // unit, 1), region.offset_bytes // unit)


def attach(
    memories: Sequence[Memory], regions: Sequence[Region], fds: Sequence[int], events: Sequence[bytes] = ()
) -> SessionMemory:
    """Open an engine's memory, wherever it is. Takes ownership of `fds`. ControlError: it cannot be meant."""
    if not any(memory.cuda for memory in memories):
        return map_memory(memories, regions, fds)
    for fd in fds:
        os.close(fd)
    check_regions(memories, regions)
    return attach_cuda(memories, regions, events, cuda_devices)


def map_memory(memories: Sequence[Memory], regions: Sequence[Region], fds: Sequence[int]) -> EngineMemory:
    """Map an engine's memory. Takes ownership of `fds`: they are closed, whatever happens.

    Raises ControlError when a size, a region or a descriptor does not fit what was announced.
    """
    opened: list[int] = []
    try:
        check_regions(memories, regions)
        held = _descriptors(memories, fds, opened)
        maps = [_map_fd(fd, memory) for fd, memory in zip(held, memories, strict=True)]
        for memory in memories:
            if memory.shm_name is not None:
                os.unlink(_path(memory.shm_name))
        return EngineMemory(maps, regions, [os.dup(fd) for fd in held])
    finally:
        for fd in (*fds, *opened):
            os.close(fd)


def _descriptors(memories: Sequence[Memory], fds: Sequence[int], opened: list[int]) -> list[int]:
    """One descriptor for each memory: the next one given, or its name's, which joins `opened`."""
    if len(fds) != sum(memory.shm_name is None for memory in memories):
        raise ControlError("bad_memory", "memories", "one descriptor for each memory without shm_name")
    given, held = iter(fds), []
    for memory in memories:
        if memory.shm_name is not None:
            opened.append(_open_name(memory.shm_name))
        held.append(next(given) if memory.shm_name is None else opened[-1])
    return held


def check_regions(memories: Sequence[Memory], regions: Sequence[Region]) -> None:
    """ControlError unless every region lies inside its memory and blocks do not overlap within a region."""
    if not regions or not memories:
        raise ControlError("bad_memory", "regions", "at least one region and one memory")
    for position, region in enumerate(regions):
        field = f"regions[{position}]"
        if not 0 <= region.memory < len(memories):
            raise ControlError("bad_memory", f"{field}.memory", f"below {len(memories)}")
        if min(region.blocks, region.block_bytes, region.offset_bytes + 1) <= 0:
            raise ControlError("bad_memory", field, "positive blocks and block_bytes, offset not negative")
        if region.stride_bytes < region.block_bytes:
            raise ControlError("bad_memory", f"{field}.stride_bytes", "at least block_bytes")
        end = region.offset_bytes + (region.blocks - 1) * region.stride_bytes + region.block_bytes
        if end > memories[region.memory].size_bytes:
            raise ControlError("bad_memory", field, "to end inside its memory")


def _map_fd(fd: int, memory: Memory) -> mmap.mmap:
    if memory.shm_name is None:
        _check_seals(fd)
    held = os.fstat(fd).st_size
    if held < memory.size_bytes:
        raise ControlError("bad_memory", "size_bytes", f"at most {held}, the size of the shared object")
    if memory.shm_name is not None:
        _take_space(fd, memory.size_bytes)
    try:
        return mmap.mmap(fd, memory.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ControlError("bad_memory", "memories", f"a mappable descriptor ({error})") from error


def _take_space(fd: int, size_bytes: int) -> None:
    """All pages of an object in /dev/shm: to write to one that cannot be had would end this process (SIGBUS)."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise ControlError("bad_memory", "memories", f"room for it in {SHM_DIR} ({error.strerror})") from error


def _check_seals(fd: int) -> None:
    """A memfd can be sealed against shrinking, so it must be. Other objects are watched (`EngineMemory.intact`)."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a plain file: it has no seals
        return
    if not seals & fcntl.F_SEAL_SHRINK and not seals & fcntl.F_SEAL_SEAL:
        raise ControlError("bad_memory", "memories", "a memfd sealed with F_SEAL_SHRINK")


def _path(shm_name: str) -> str:
    name = shm_name.removeprefix("/")
    if not name or "/" in name or "\0" in name or name.startswith("."):
        raise ControlError("bad_memory", "shm_name", "the plain name of a POSIX shared memory object")
    return os.path.join(SHM_DIR, name)


def _open_name(shm_name: str) -> int:
    try:
        return os.open(_path(shm_name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ControlError("bad_memory", "shm_name", f"an object that can be opened ({error.strerror})") from error
