"""An engine's memory on the device of `CpuLibrary`, opened by the sidecar's side of the data plane."""

import ctypes
import random

from gpu.cpu_driver import CpuLibrary

from kvevents_service.cuda import Driver
from kvevents_service.transfer.cuda_device import CudaDevices
from kvevents_service.transfer.cuda_memory import CudaMemory, attach_cuda
from kvevents_service.wire.control import CudaHandle, Memory, Region

BLOCKS = 16


class GpuWorld:
    """Two regions of K and V interleaved per block, and one of its own: blocks of 24 + 24 + 40 bytes."""

    def __init__(self, **options: object) -> None:
        self.library = CpuLibrary(**options)  # type: ignore[arg-type]
        self.driver = Driver(self.library)
        self.devices = CudaDevices(self.driver)
        self.size = 64 + BLOCKS * 48 + BLOCKS * 40
        self.address = self.library.allocate(self.size)
        self.regions = [
            Region("k", 0, 64, 24, 48, BLOCKS),
            Region("v", 0, 88, 24, 48, BLOCKS),
            Region("x", 0, 64 + BLOCKS * 48, 40, 40, BLOCKS),
        ]
        self.write(random.Random(5).randbytes(self.size))

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def block(self, number: int) -> bytes:
        """As a slot holds it."""
        whole = ctypes.string_at(self.address, self.size)
        parts = [(r.offset_bytes + number * r.stride_bytes, r.block_bytes) for r in self.regions]
        return b"".join(whole[start : start + size] for start, size in parts)

    @property
    def memory(self) -> Memory:
        handle = self.driver.handle("cuIpcGetMemHandle", self.address)
        return Memory(self.size, None, CudaHandle(handle, self.library.uuid, self.size))

    def event(self) -> tuple[int, bytes]:
        event = self.driver.address("cuEventCreate", 0)
        return event, self.driver.handle("cuIpcGetEventHandle", event)

    def attach(self, events: tuple[bytes, ...] = ()) -> CudaMemory:
        return attach_cuda([self.memory], self.regions, events, lambda: self.devices)
