"""Disk tier: bytes/s of store and load through the arena, against plain reads and writes of the same file size.

Ours: blocks of an engine's four layers gathered, checksummed, written; read, verified, scattered. Plain, in turns
with ours and on the same disk: sequential pwrite and pread of as many bytes a call as the arena takes at once, as
many under way as it has threads, with the same O_DIRECT flag, of one page-aligned buffer a thread, as fio does by
itself. The ratio is the value. `in_place`: the same for blocks of a host arena, as a tier in front hands them over.
`huge`: ratios to plain I/O with buffers in huge pages, as our staging and host arenas are.
DISK_BENCH_DIR=DIR says on which disk (default: the temporary directory); each of the three files has 256 MiB.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.harness import Spread, note, report
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.disk import IO_THREADS, DiskStorage
from kvevents_service.transfer.disk_arena import PART_BYTES
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.wire.control import Memory, Region

TOTAL_BYTES = 256 * 1024 * 1024
BLOCK_SIZES = (64 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
LAYERS = 4
ROUNDS = 9
TARGET = 0.9


class Case(NamedTuple):
    """Rates of one block size and direction, bytes/s, of each round."""

    ours: list[float]
    front: list[float]
    plain: list[float]
    huge: list[float]

    @property
    def ratio(self) -> Spread:
        """Of neighbours in time: the disk changes its mind."""
        return Spread.of([ours / plain for ours, plain in zip(self.ours, self.plain, strict=True)])

    @property
    def best(self) -> float:
        """Of the fastest round of each: what neighbours who want these cores change least."""
        return max(self.ours) / max(self.plain)

    @property
    def in_place(self) -> float:
        """Median ratio of blocks that are not gathered."""
        return statistics.median(ours / plain for ours, plain in zip(self.front, self.plain, strict=True))

    def to_huge(self, ours: list[float]) -> float:
        """Median ratio to plain I/O from huge pages."""
        return statistics.median(rate / huge for rate, huge in zip(ours, self.huge, strict=True))


class Plain:
    """What a disk gives to somebody who only reads and writes."""

    def __init__(self, directory: str, call_bytes: int, *, huge: bool = False) -> None:
        self._storage = DiskStorage(directory, TOTAL_BYTES)
        self._fd = self._storage._file.direct_fd or self._storage.fd
        self._call_bytes = call_bytes
        self._buffers = _huge_buffers(call_bytes) if huge else _small_buffers(call_bytes)
        for buffer in self._buffers:
            buffer[:] = os.urandom(call_bytes)
        self._threads = ThreadPoolExecutor(IO_THREADS)

    def write(self) -> None:
        self._all(lambda buffer, offset: os.pwritev(self._fd, [buffer], offset))

    def read(self) -> None:
        self._all(lambda buffer, offset: os.preadv(self._fd, [buffer], offset))

    def close(self) -> None:
        self._threads.shutdown()
        self._storage.close()

    def _all(self, call: Callable[[memoryview, int], int]) -> None:
        def own(number: int) -> None:
            step = self._call_bytes
            for offset in range(number * step, TOTAL_BYTES, IO_THREADS * step):
                assert call(self._buffers[number], offset) == step

        list(self._threads.map(own, range(IO_THREADS)))


def _small_buffers(size: int) -> list[memoryview]:
    maps = [mmap.mmap(-1, size) for _ in range(IO_THREADS)]
    for pages in maps:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return [memoryview(pages) for pages in maps]


def _huge_buffers(size: int) -> list[memoryview]:
    staging = HostArena(IO_THREADS, size)
    return [staging.bytes_of(number, 1) for number in range(IO_THREADS)]


def engine(block_bytes: int) -> EngineMemory:
    """As many random bytes as a file has."""
    shared = SharedMemory.create(TOTAL_BYTES)
    regions = uniform_layers(LAYERS, TOTAL_BYTES // block_bytes, block_bytes // LAYERS)
    memory = attach([Memory(TOTAL_BYTES)], regions, [shared.fd])
    for view in memory.views:
        view.random_()
    return memory


def tier_in_front(block_bytes: int) -> EngineMemory:
    """A host arena full of blocks."""
    arena = HostArena(TOTAL_BYTES // block_bytes, block_bytes)
    region = Region("slots", 0, 0, block_bytes, block_bytes, arena.slots)
    memory = EngineMemory([arena._map], [region])
    memory.views[0].random_()
    return memory


def rate(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return TOTAL_BYTES / (time.perf_counter() - started)


def measure(directory: str, block_bytes: int) -> dict[str, Case]:
    """Both directions, ours and plain in turns, after one of each that nobody counts."""
    blocks = TOTAL_BYTES // block_bytes
    storage, memory, front = DiskStorage(directory, TOTAL_BYTES), engine(block_bytes), tier_in_front(block_bytes)
    plain, huge = (Plain(directory, max(block_bytes, PART_BYTES), huge=huge) for huge in (False, True))
    arena = storage.arenas(blocks, [block_bytes])[0]
    every = array("i", range(blocks))
    turns = {
        "store": (*(partial(arena.store, some, every, every) for some in (memory, front)), plain.write, huge.write),
        "load": (*(partial(arena.load, some, every, every) for some in (memory, front)), plain.read, huge.read),
    }
    cases = {}
    for direction, sides in turns.items():
        for side in sides:
            side()  # the first writes of a new file are slower
        rates = [[rate(side) for side in sides] for _ in range(ROUNDS)]
        cases[direction] = Case(*map(list, zip(*rates, strict=True)))
    for opened in (storage, plain, huge):
        opened.close()
    return cases


def main() -> None:
    torch.set_num_threads(1)  # as in `serve`
    directory = os.environ.get("DISK_BENCH_DIR", tempfile.gettempdir())
    cases: dict[str, Case] = {}
    for block_bytes in BLOCK_SIZES:
        for direction, case in measure(directory, block_bytes).items():
            cases[f"{direction}_{block_bytes // 1024}k"] = case
            ours, front, plain, huge = (statistics.median(rates) / 1e6 for rates in case)
            rates = f"{ours:.0f} MB/s, in place {front:.0f}, plain {plain:.0f}, huge pages {huge:.0f}"
            note(f"{direction} {block_bytes // 1024} KiB: {rates}; ratio {case.ratio}")
    worst = min(cases, key=lambda name: cases[name].ratio.median)
    report(
        "disk",
        cases[worst].ratio,
        "of plain sequential I/O",
        TARGET,
        rate=True,
        case=worst,
        cases={name: case.ratio.median for name, case in cases.items()},
        in_place={name: case.in_place for name, case in cases.items()},
        huge={name: case.to_huge(case.ours) for name, case in cases.items()},
        huge_in_place={name: case.to_huge(case.front) for name, case in cases.items()},
        best={name: case.best for name, case in cases.items()},
        megabytes_per_s={name: statistics.median(case.ours) / 1e6 for name, case in cases.items()},
        plain_megabytes_per_s={name: statistics.median(case.plain) / 1e6 for name, case in cases.items()},
    )


if __name__ == "__main__":
    main()
