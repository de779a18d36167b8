"""How fast blocks go between a GPU and the pinned arena, against one pinned copy of the same bytes.

Each direction alone, and both at once; a piece is one block of one region. Both sides of a ratio take turns.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu.machine import Machine
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.cuda_device import CudaDevice, CudaDevices
from kvevents_service.transfer.cuda_memory import CudaMemory, Opened
from kvevents_service.wire.control import Region

RUNS = 5
TARGETS = {"store": 0.9, "load": 0.9, "store_of_both": 0.8, "load_of_both": 0.8}
SIZES = tuple(16 << 10 << shift for shift in range(0, 9, 2))
JUDGED_BYTES = 64 << 10
REGIONS = 16

Work = Callable[[], None]


class Pair:
    """Memory of one block size on the device, and its arena; blocks and slots in any order."""

    def __init__(self, machine: Machine, device: CudaDevice, piece_bytes: int, total_bytes: int) -> None:
        self.device, self.total_bytes = device, total_bytes
        regions = max(1, min(REGIONS, total_bytes // piece_bytes // 8))
        blocks = total_bytes // piece_bytes // regions
        self._tensor = machine.empty(total_bytes // 8)
        machine.finish()
        self._start = self._tensor.data_ptr()
        layers = [
            Region(f"l{n}", 0, n * blocks * piece_bytes, piece_bytes, piece_bytes, blocks) for n in range(regions)
        ]
        self.memory = CudaMemory(device, Opened([], []), [self._start], layers)
        self.arena = HostArena(blocks, piece_bytes * regions)
        self.arena.view(torch.int64).fill_(1)
        self._numbers = [array("i", random.Random(seed).sample(range(blocks), blocks)) for seed in (1, 2)]

    def blocks(self, kind: str) -> None:
        rest = getattr(self.arena, kind)(self.memory, *self._numbers)
        rest()

    def whole(self, kind: str) -> None:
        """One copy of the same bytes on the same stream."""
        driver, stream = self.device.driver, self.device._streams[kind]
        self.device.enter()
        host, there = self.arena.view(torch.int64).data_ptr(), self._start
        sides = (host, there) if kind == "store" else (there, host)
        driver.call("cuMemcpyAsync", *sides, self.total_bytes, stream)
        driver.call("cuStreamSynchronize", stream)


def seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def together(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Seconds a round of each, while the others run, too."""
    start, took = threading.Barrier(len(works)), dict[str, float]()

    def run(name: str, work: Work) -> None:
        start.wait()
        took[name] = seconds(lambda: [work() for _ in range(rounds)] and None) / rounds  # type: ignore[func-returns-value]

    threads = [threading.Thread(target=run, args=item) for item in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def measure(pair: Pair) -> dict[str, float]:
    """Medians of ratios, and GB/s of the whole copies."""
    found: dict[str, list[float]] = {name: [] for name in (*TARGETS, "store_gb_per_s", "load_gb_per_s")}
    for kind in ("store", "load"):
        pair.blocks(kind)
    for _ in range(RUNS):
        for kind in ("store", "load"):
            whole = seconds(partial(pair.whole, kind))
            found[f"{kind}_gb_per_s"].append(pair.total_bytes / whole / 1e9)
            found[kind].append(whole / seconds(partial(pair.blocks, kind)))
        kinds = ("store", "load")
        alone = together({kind: partial(pair.whole, kind) for kind in kinds}, 2)
        both = together({kind: partial(pair.blocks, kind) for kind in kinds}, 2)
        for kind in kinds:
            found[f"{kind}_of_both"].append(alone[kind] / both[kind])
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def bench(machine: Machine, cpu: bool) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """A check for each size. Without a GPU the figures mean nothing, and none is judged."""
    device = CudaDevices(machine.driver).find(machine.driver.uuids()[0])
    total = 2 << 20 if cpu else 1 << 30
    for piece_bytes in SIZES[:2] if cpu else SIZES:
        yield f"copy_{piece_bytes >> 10}KiB", partial(judged, machine, device, piece_bytes, total, cpu)


def judged(machine: Machine, device: CudaDevice, piece_bytes: int, total: int, cpu: bool) -> dict[str, object]:
    ratios = measure(Pair(machine, device, piece_bytes, total))
    if cpu:
        return {"ok": True, "figures": "none: this is no GPU"}
    below = [name for name, target in TARGETS.items() if ratios[name] < target]
    counted = piece_bytes >= JUDGED_BYTES
    return {"ok": not (below and counted), "below_target": below, **ratios, "device": dict(device.counters)}
