"""How fast blocks go between an engine's memory and the host arena, against one big memcpy of the same bytes.

One region whose blocks and slots lie in any order ("scattered") or in one run ("run"), and 16 regions a block. Both
sides of a ratio use the same threads, in turns, in the same run. The value is the worst ratio from 64 KiB up.
`python -m benchmarks.copy [THREADS]`
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.harness import Spread, note, report
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.transfer.arena import Crews, HostArena
from kvevents_service.transfer.crew import Crew, default_threads
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.wire.control import Memory

TOTAL_BYTES = 256 << 20
RUNS = 7
TARGET = 0.85
JUDGED_BYTES = 64 << 10
SIZES = tuple(16 << 10 << shift for shift in range(0, 9, 2))


class Case(NamedTuple):
    """`block_bytes` of one region; a block is of all `regions`."""

    block_bytes: int
    regions: int
    scattered: bool

    @property
    def name(self) -> str:
        order = "scattered" if self.scattered else "run"
        return f"{self.block_bytes >> 10}KiB_x{self.regions}_{order}"

    @property
    def blocks(self) -> int:
        return TOTAL_BYTES // self.block_bytes // self.regions

    def numbers(self, seed: int) -> array[int]:
        order = list(range(self.blocks))
        if self.scattered:
            random.Random(seed).shuffle(order)
        return array("i", order)


CASES = [Case(size, 1, scattered) for size in SIZES for scattered in (True, False)]
CASES += [Case(size, 16, True) for size in SIZES if size * 16 * 8 <= TOTAL_BYTES]


class Bench:
    """The same memory for all cases, written once, so that no page is new."""

    def __init__(self, threads: int) -> None:
        self.crew = Crew(threads)
        self._shared = SharedMemory.create(TOTAL_BYTES)
        torch.frombuffer(self._shared.map, dtype=torch.int64).fill_(1)

    def measure(self, case: Case) -> dict[str, Ratios]:
        """Of store and load."""
        memory = self._memory(case)
        arena = HostArena(case.blocks, case.block_bytes * case.regions, Crews(self.crew, self.crew))
        arena.view(torch.int64).fill_(2)
        blocks, slots = case.numbers(1), case.numbers(2)
        inside, outside = arena.view(torch.int64).data_ptr(), memory.views[0].data_ptr()
        ratios = {
            "store": self._ratios(partial(arena.store, memory, blocks, slots), inside, outside),
            "load": self._ratios(partial(arena.load, memory, blocks, slots), outside, inside),
        }
        memory.close()
        return ratios

    def _memory(self, case: Case) -> EngineMemory:
        regions = uniform_layers(case.regions, case.blocks, case.block_bytes)
        return attach([Memory(TOTAL_BYTES)], regions, [os.dup(self._shared.fd)])

    def _ratios(self, copy: Callable[[], None], target: int, source: int) -> Ratios:
        """Of the rates of `copy` and of one memcpy, which take turns."""
        share = TOTAL_BYTES // self.crew.threads
        starts = [share * number for number in range(self.crew.threads)]
        parts = [partial(ctypes.memmove, target + start, source + start, share) for start in starts]
        copy()
        turns = [(took(partial(self.crew.perform, parts)), took(copy)) for _ in range(RUNS)]
        wall = Spread.of([whole.wall_s / blocks.wall_s for whole, blocks in turns])
        return Ratios(wall, Spread.of([whole.cpu_s / blocks.cpu_s for whole, blocks in turns]))


class Ratios(NamedTuple):
    """By the clock, and by the CPU time of this process: neighbours on the machine are in the first."""

    wall: Spread
    cpu: Spread


class Took(NamedTuple):
    wall_s: float
    cpu_s: float


def took(work: Callable[[], None]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def main(threads: int) -> None:
    torch.set_num_threads(1)
    bench, ratios = Bench(threads), dict[str, Ratios]()
    for case in CASES:
        for verb, both in bench.measure(case).items():
            ratios[f"{verb}_{case.name}"] = both
            note(f"{verb} {case.name}: {both.wall}; CPU {both.cpu}")
    judged = [
        f"{verb}_{case.name}" for case in CASES if case.block_bytes >= JUDGED_BYTES for verb in ("store", "load")
    ]
    worst = min(judged, key=lambda name: ratios[name].wall.median)
    report(
        "copy",
        ratios[worst].wall,
        "of one memcpy",
        TARGET,
        rate=True,
        case=worst,
        threads=threads,
        load_average=os.getloadavg()[0],
        below=[name for name in judged if ratios[name].wall.median < TARGET],
        cases={name: both.wall.median for name, both in ratios.items()},
        cpu_below=[name for name in judged if ratios[name].cpu.median < TARGET],
        cpu_cases={name: both.cpu.median for name, both in ratios.items()},
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else default_threads())
