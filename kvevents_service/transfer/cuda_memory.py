"""An engine's KV memory on a GPU, opened by CUDA IPC. Opening and closing may take long: never on the event loop.

The engine gives a handle of each whole allocation that its KV tensors lie in. Closing is part of the fence: an
exporter must not free an allocation while an importer has it open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from typing import NamedTuple

import torch

from kvevents_service.cuda import HANDLE_BYTES, IPC_LAZY_PEER_ACCESS, UUID_BYTES, CudaError, CudaMissing, Handle
from kvevents_service.errors import ControlError
from kvevents_service.transfer.cuda_device import CudaDevice, CudaDevices
from kvevents_service.transfer.marks import Marks
from kvevents_service.transfer.pieces import Rows, merged
from kvevents_service.transfer.sheet import Sheet
from kvevents_service.wire.control import CudaHandle, Memory, Region

log = logging.getLogger(__name__)

MAX_EVENTS = 64


class Opened(NamedTuple):
    """What a device gave for the handles of one engine: addresses of allocations, and events."""

    bases: list[int]
    events: list[int]


class CudaMemory:
    """Regions on one device. It has rows by address instead of tensors."""

    dtype = torch.uint8

    def __init__(
        self, device: CudaDevice, opened: Opened, starts: Sequence[int], regions: Sequence[Region]
    ) -> None:
        self.device = device
        self.marks = Marks()
        self.views: list[torch.Tensor] = []
        self.sheets: list[Sheet] = []
        self.regions = tuple(regions)
        self.blocks = min(region.blocks for region in regions)
        self.block_sizes = tuple(region.block_bytes for region in regions)
        self.block_bytes = sum(self.block_sizes)
        self.rows = merged([_rows(starts[region.memory], region) for region in regions])
        self._opened = opened

    def __repr__(self) -> str:
        return f"<CudaMemory {self.blocks} blocks of {self.block_bytes} bytes on {self.device!r}>"

    def intact(self) -> bool:
        """The driver keeps an open allocation alive."""
        return True

    def after(self) -> list[int]:
        """The event that a copy waits for: the one recorded last. Engines record all of them on one stream."""
        events = self._opened.events
        return [events[self.marks.reached % len(events)]] if events and self.marks.reached >= 0 else []

    def close(self) -> None:
        """Give the allocations back. No copy that touches this memory may be running."""
        close(self.device, self._opened)


def _rows(start: int, region: Region) -> Rows:
    return Rows(start + region.offset_bytes, region.stride_bytes, region.block_bytes)


def close(device: CudaDevice, opened: Opened) -> None:
    """Errors are noted: there is nothing else to be done about them."""
    calls = [("cuEventDestroy_v2", event) for event in opened.events]
    for name, what in [*calls, *(("cuIpcCloseMemHandle", base) for base in opened.bases)]:
        try:
            device.enter()
            device.driver.call(name, what)
        except CudaError as error:
            device.counters["close_errors"] += 1
            log.info("%s", error)
    opened.events.clear()
    opened.bases.clear()


def attach_cuda(
    memories: Sequence[Memory],
    regions: Sequence[Region],
    events: Sequence[bytes],
    devices: Callable[[], CudaDevices],
) -> CudaMemory:
    """Open what an engine has announced. ControlError names what does not fit; nothing stays open then."""
    handles = [_checked(number, memory) for number, memory in enumerate(memories)]
    if any(handle.device != handles[0].device for handle in handles):
        raise ControlError("bad_memory", "memories", "one device: each GPU is a rank of its own")
    _check_events(events)
    device = _device(handles[0].device, devices)
    opened = Opened([], [])
    try:
        device.check()
        device.enter()
        starts = [_open(device, handle, opened) for handle in handles]
        for event in events:
            opened.events.append(device.driver.address("cuIpcOpenEventHandle", Handle.of(event)))
        return CudaMemory(device, opened, starts, regions)
    except BaseException as error:
        close(device, opened)
        if isinstance(error, CudaError):
            raise ControlError("bad_memory", "memories", f"handles that can be opened ({error})") from error
        raise


def _checked(number: int, memory: Memory) -> CudaHandle:
    handle, field = memory.cuda, f"memories[{number}].cuda"
    if handle is None:
        raise ControlError("bad_memory", field, "a handle: all memory of a rank is of one kind")
    if len(handle.handle) != HANDLE_BYTES or len(handle.device) != UUID_BYTES:
        raise ControlError("bad_memory", field, f"{HANDLE_BYTES} bytes of handle, {UUID_BYTES} of device")
    if handle.offset_bytes < 0 or handle.offset_bytes + memory.size_bytes > handle.base_bytes:
        raise ControlError("bad_memory", field, "to lie inside its allocation")
    return handle


def _check_events(events: Sequence[bytes]) -> None:
    if len(events) > MAX_EVENTS or any(len(event) != HANDLE_BYTES for event in events):
        raise ControlError("bad_memory", "events", f"at most {MAX_EVENTS} handles of {HANDLE_BYTES} bytes")


def _device(uuid: bytes, devices: Callable[[], CudaDevices]) -> CudaDevice:
    try:
        return devices().find(uuid)
    except (CudaMissing, CudaError, LookupError) as error:
        expected = f"a GPU that the sidecar can use ({error}); is it in its CUDA_VISIBLE_DEVICES?"
        raise ControlError("bad_memory", "memories", expected) from error


def _open(device: CudaDevice, handle: CudaHandle, opened: Opened) -> int:
    """Returns where the memory starts."""
    base = c_uint64()
    device.driver.call("cuIpcOpenMemHandle_v2", byref(base), Handle.of(handle.handle), IPC_LAZY_PEER_ACCESS)
    opened.bases.append(base.value)
    _, size = device.driver.allocation(base.value)
    if size < handle.base_bytes:
        raise ControlError("bad_memory", "memories", f"at most {size} base_bytes, the size of the allocation")
    return base.value + handle.offset_bytes
