"""Disk tier: bytes/s of store and load through the arena, against plain reads and writes of the same file size.

Ours: blocks of an engine's four layers gathered, checksummed, written; read, verified, scattered. Plain, in turns
with ours and on the same disk: sequential pwrite and pread of as many bytes a call as the arena takes at once, as
many under way as it has threads, with the same O_DIRECT flag, of one buffer a thread, in huge pages as ours. The
ratio is the value.
DISK_BENCH_DIR=DIR says on which disk (default: the temporary directory); each of the two files has 256 MiB.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from benchmarks.harness import Spread, note, report
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.disk import IO_THREADS, DiskStorage
from kvevents_service.transfer.disk_arena import PART_BYTES, DiskArena
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.wire.control import Memory

TOTAL_BYTES = 256 * 1024 * 1024
BLOCK_SIZES = (64 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
LAYERS = 4
ROUNDS = 15
TARGET = 0.9


class Case(NamedTuple):
    """Rates of one block size and direction, bytes/s, of each round."""

    ours: list[float]
    plain: list[float]

    @property
    def ratio(self) -> Spread:
        """Of neighbours in time: the disk changes its mind."""
        return Spread.of([ours / plain for ours, plain in zip(self.ours, self.plain, strict=True)])

    @property
    def best(self) -> float:
        """Of the fastest round of each: what neighbours who want these cores change least."""
        return max(self.ours) / max(self.plain)


class Plain:
    """What a disk gives to somebody who only reads and writes."""

    def __init__(self, directory: str, call_bytes: int) -> None:
        self._storage = DiskStorage(directory, TOTAL_BYTES)
        self._fd = self._storage._file.direct_fd or self._storage.fd
        self._call_bytes = call_bytes
        staging = HostArena(IO_THREADS, call_bytes)
        self._buffers = [staging.bytes_of(number, 1) for number in range(IO_THREADS)]
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


def engine(block_bytes: int) -> EngineMemory:
    """As many random bytes as a file has."""
    shared = SharedMemory.create(TOTAL_BYTES)
    regions = uniform_layers(LAYERS, TOTAL_BYTES // block_bytes, block_bytes // LAYERS)
    memory = attach([Memory(TOTAL_BYTES)], regions, [shared.fd])
    for view in memory.views:
        view.random_()
    return memory


def rate(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return TOTAL_BYTES / (time.perf_counter() - started)


def measure(directory: str, block_bytes: int) -> dict[str, Case]:
    """Both directions, ours and plain in turns, after one of each that nobody counts."""
    blocks = TOTAL_BYTES // block_bytes
    storage, plain, memory = (
        DiskStorage(directory, TOTAL_BYTES),
        Plain(directory, max(block_bytes, PART_BYTES)),
        engine(block_bytes),
    )
    arena: DiskArena = storage.arenas(blocks, [block_bytes])[0]
    every = array("i", range(blocks))
    turns = {
        "store": (lambda: arena.store(memory, every, every), plain.write),
        "load": (lambda: arena.load(memory, every, every), plain.read),
    }
    cases = {}
    for direction, (ours, others) in turns.items():
        ours()  # the first writes of a new file are slower
        others()
        rates = [(rate(ours), rate(others)) for _ in range(ROUNDS)]
        cases[direction] = Case(*map(list, zip(*rates, strict=True)))
    storage.close()
    plain.close()
    return cases


def main() -> None:
    torch.set_num_threads(1)  # as in `serve`
    directory = os.environ.get("DISK_BENCH_DIR", tempfile.gettempdir())
    cases: dict[str, Case] = {}
    for block_bytes in BLOCK_SIZES:
        for direction, case in measure(directory, block_bytes).items():
            cases[f"{direction}_{block_bytes // 1024}k"] = case
            ours, plain = (statistics.median(rates) / 1e6 for rates in case)
            note(f"{direction} {block_bytes // 1024} KiB: {ours:.0f} MB/s, plain {plain:.0f}; ratio {case.ratio}")
    worst = min(cases, key=lambda name: cases[name].ratio.median)
    report(
        "disk",
        cases[worst].ratio,
        "of plain sequential I/O",
        TARGET,
        rate=True,
        case=worst,
        cases={name: case.ratio.median for name, case in cases.items()},
        best={name: case.best for name, case in cases.items()},
        megabytes_per_s={name: statistics.median(case.ours) / 1e6 for name, case in cases.items()},
        plain_megabytes_per_s={name: statistics.median(case.plain) / 1e6 for name, case in cases.items()},
    )


if __name__ == "__main__":
    main()
