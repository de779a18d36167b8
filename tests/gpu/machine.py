"""The device that the checks run on: a GPU with torch, or shared memory that plays one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from gpu.cpu_driver import SHM, CpuLibrary
from kvevents_service.cuda import Driver, load_driver

PAUSE_CYCLES = 50_000_000
PAUSE_S = 0.02


class Machine(Protocol):
    """`compute` gives work to the device's one stream, behind a pause; `stream` is its handle."""

    name: str
    driver: Driver
    stream: int

    def empty(self, words: int) -> torch.Tensor: ...

    def compute(self, work: Callable[[], object]) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class GpuMachine:
    """Device 0."""

    def __init__(self) -> None:
        self.driver = load_driver()
        self.name = torch.cuda.get_device_name(0)
        torch.zeros(1, device="cuda")
        self.stream = torch.cuda.current_stream().cuda_stream

    def empty(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, device="cuda")

    def compute(self, work: Callable[[], object]) -> None:
        torch.cuda._sleep(PAUSE_CYCLES)
        work()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        """Memory goes with the process."""


class CpuMachine:
    """Shared memory, and a thread for a stream."""

    name = "no GPU: shared memory and threads"

    def __init__(self) -> None:
        self.library = CpuLibrary()
        self.driver = Driver(self.library)
        self.driver.call("cuCtxSetCurrent", self.driver.address("cuDevicePrimaryCtxRetain", 0))
        self.stream = self.driver.address("cuStreamCreateWithPriority", 1, 0)

    def empty(self, words: int) -> torch.Tensor:
        file = self.library.memory[self.library.allocate(words * 8)]
        return torch.frombuffer(file.map, dtype=torch.int64)

    def compute(self, work: Callable[[], object]) -> None:
        stream = self.library.streams[self.stream]
        stream.give(lambda: time.sleep(PAUSE_S))
        stream.give(work)

    def finish(self) -> None:
        self.driver.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        self.library.forget()


def open_machine(cpu: bool) -> Machine:
    return CpuMachine() if cpu else GpuMachine()


def forget_names_of(pid: int) -> None:
    """What a killed process has left behind when it played a device."""
    for path in Path(SHM).glob(f"kvevents-cpu-{pid}-*"):
        os.unlink(path)
