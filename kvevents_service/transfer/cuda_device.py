"""One GPU: a stream for each direction, at lowest priority, and what has happened to it.

A copy is given to the stream by the direction's own thread; another one sleeps in the driver until it has ended.
After an error that the device's context does not survive the device has failed: copies on it fail at once, those of
other devices go on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_int
from functools import cache, partial
from typing import NamedTuple

from kvevents_service.cuda import (
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    HOST_REGISTER_PORTABLE,
    STREAM_NON_BLOCKING,
    CudaError,
    Driver,
    load_driver,
)
from kvevents_service.errors import KvEventsError
from kvevents_service.transfer.pieces import Pieces
from kvevents_service.transfer.placement import node_of, prefer_node

log = logging.getLogger(__name__)

PIECES_A_CALL = 4096
KINDS = ("store", "load")
COUNTERS = ("errors", "close_errors", "pinned_bytes", "unpinned_bytes", "placed_bytes")


class DeviceFailed(KvEventsError):
    """The device is lost to this process. Every copy on it fails until the process starts anew."""


class HostSpan(NamedTuple):
    """Memory of this process. `buffer` keeps it mapped; it is used no more when `owner` is gone."""

    address: int
    size_bytes: int
    buffer: object
    owner: object


class CudaDevice:
    """Copies pieces. `failed` says why it copies no more; empty while it does. All threads may call it."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.failed = ""
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._pinning = threading.RLock()  # an arena may end, and be unpinned, in the middle of a call
        self._pinned: dict[int, bool] = {}
        self._events: list[int] = []
        self.node = node_of(driver.pci_address(ordinal))
        device = driver.number("cuDeviceGet", ordinal)
        self._context = driver.address("cuDevicePrimaryCtxRetain", device)
        self.enter()
        least, greatest = c_int(), c_int()
        driver.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self._streams = {
            kind: driver.address("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, least.value) for kind in KINDS
        }

    def __repr__(self) -> str:
        return f"<CudaDevice {self.ordinal} {self.failed or 'works'} {dict(self.counters)}>"

    def enter(self) -> None:
        """Make the calling thread's calls go to this device."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def check(self) -> None:
        """DeviceFailed if it has."""
        if self.failed:
            raise DeviceFailed(f"device {self.ordinal} has failed: {self.failed}")

    def begin(self, kind: str, pieces: Pieces, after: Sequence[int], host: HostSpan) -> Callable[[], None]:
        """Start a copy behind the events `after`. Returns what waits for its end, in another thread.

        An exception, from here or from the wait, means that nothing is copied any more.
        """
        self.check()
        stream = self._streams[kind]
        try:
            self.enter()
            pinned = self._pin(host)
            for event in after:
                self.driver.call("cuStreamWaitEvent", stream, event, 0)
            self._copy(pieces, stream, batch=pinned and self.driver.batches)
            event = self._take_event()
            self.driver.call("cuEventRecord", event, stream)
        except CudaError as error:
            self._drain(stream)
            raise self._noted(error) from error
        return partial(self._wait, stream, event)

    def _copy(self, pieces: Pieces, stream: int, *, batch: bool) -> None:
        for part in pieces.parts(PIECES_A_CALL):
            if batch:
                self.driver.copy_batch(*part, stream)
            else:
                self.driver.copy_each(zip(*(column.tolist() for column in part), strict=True), stream)

    def _drain(self, stream: int) -> None:
        """Wait for what was begun before an error. A context that is lost has nothing under way."""
        try:
            self.driver.call("cuStreamSynchronize", stream)
        except CudaError as error:
            self._noted(error)

    def _wait(self, stream: int, event: int) -> None:
        try:
            self.enter()
            self.driver.call("cuEventSynchronize", event)
        except CudaError as error:
            self._drain(stream)
            raise self._noted(error) from error
        with self._lock:
            self._events.append(event)

    def _take_event(self) -> int:
        with self._lock:
            if self._events:
                return self._events.pop()
        return self.driver.address("cuEventCreate", EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)

    def _noted(self, error: CudaError) -> CudaError:
        """Count an error; the first one that the context does not survive is told."""
        self.counters["errors"] += 1
        if error.sticky and not self.failed:
            self.failed = str(error)
            log.error("device %d has failed, its copies are misses from now on: %s", self.ordinal, error)
        return error

    # host memory

    def _pin(self, host: HostSpan) -> bool:
        """Register memory with the driver, once. False: it was refused, and copies through it are slower."""
        with self._pinning:
            if host.address not in self._pinned:
                self._pinned[host.address] = self._register(host)
                weakref.finalize(host.owner, self._unpin, host.address, host.buffer)
            return self._pinned[host.address]

    def _register(self, host: HostSpan) -> bool:
        if self.node is not None and prefer_node(host.address, host.size_bytes, self.node):
            self.counters["placed_bytes"] += host.size_bytes
        try:
            self.driver.call("cuMemHostRegister_v2", host.address, host.size_bytes, HOST_REGISTER_PORTABLE)
        except CudaError as error:
            if error.sticky:
                raise
            self.counters["unpinned_bytes"] += host.size_bytes
            log.warning("%d bytes stay unpinned (is `ulimit -l` too small?): %s", host.size_bytes, error)
            return False
        self.counters["pinned_bytes"] += host.size_bytes
        return True

    def _unpin(self, address: int, _buffer: object) -> None:
        """The arena is gone; its memory is still mapped, as long as this is called."""
        with self._pinning:
            pinned = self._pinned.pop(address)
        if pinned and not self.failed:
            with suppress(CudaError):  # at the end of a process the driver may be gone before us
                self.enter()
                self.driver.call("cuMemHostUnregister", address)


class CudaDevices:
    """The devices of this process, opened on first use, by what they are called everywhere: their UUID."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._open: dict[bytes, CudaDevice] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CudaDevices {list(self._open.values())}>"

    def stats(self) -> dict[str, int]:
        """Of all devices together."""
        devices = list(self._open.values())
        total = sum((device.counters for device in devices), Counter[str]())
        failed = sum(bool(device.failed) for device in devices)
        return {"cuda_devices": len(devices), "cuda_devices_failed": failed} | {
            f"cuda_{name}": total[name] for name in COUNTERS
        }

    def find(self, uuid: bytes) -> CudaDevice:
        """LookupError if this process cannot see the device. CudaError if it cannot be used."""
        with self._lock:
            if uuid not in self._open:
                self._open[uuid] = CudaDevice(self.driver, self._ordinal(uuid))
            return self._open[uuid]

    def _ordinal(self, uuid: bytes) -> int:
        uuids = self.driver.uuids()
        if uuid not in uuids:
            raise LookupError(f"no device {uuid.hex()} among {len(uuids)}")
        return uuids.index(uuid)


@cache
def cuda_devices() -> CudaDevices:
    """Those of this machine. CudaMissing where there is no driver."""
    return CudaDevices(load_driver())


def device_stats() -> dict[str, int]:
    """Counters of the devices that engines have brought; empty as long as none has."""
    return cuda_devices().stats() if cuda_devices.cache_info().currsize else {}
