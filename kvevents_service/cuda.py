"""The part of NVIDIA's driver interface that moving blocks needs, from libcuda.so.1 by ctypes. Loaded on first use.

Signatures are those of cuda.h 13.0, under the names that the library exports ("_v2" is the ABI). The driver is
wherever a GPU works; no package is needed, and an address array goes in as it is. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvevents_service.errors import KvEventsError

HANDLE_BYTES = 64
UUID_BYTES = 16
LIBRARY = "libcuda.so.1"

EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 1, 2, 4
STREAM_NON_BLOCKING = 1
HOST_REGISTER_PORTABLE = 1
IPC_LAZY_PEER_ACCESS = 1
IS_LEGACY_IPC_CAPABLE = 10
"""CUpointer_attribute: whether the memory can be shared by handle at all."""
_DOMAIN, _BUS, _SLOT = 50, 33, 34

STICKY = frozenset({4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})
"""Errors after which every call on the device's context fails: it is lost to this process."""


class CudaError(KvEventsError):
    """A driver call failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code

    @property
    def sticky(self) -> bool:
        """The device is lost to this process."""
        return self.code in STICKY


class CudaMissing(KvEventsError):
    """There is no NVIDIA driver, or no device."""


class Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]

    @classmethod
    def of(cls, data: bytes) -> Handle:
        return cls.from_buffer_copy(data)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("bytes", c_char * UUID_BYTES)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. `source_order` 1: copies read their source in the order of the stream."""

    _fields_ = [
        ("source_order", c_int),
        *((name, c_int) for name in ("source_type", "source_id", "target_type", "target_id")),
        ("flags", c_uint),
    ]


PREFER_OVERLAP = 1
_ADDRESSES = POINTER(c_uint64)
_SIZES = POINTER(c_size_t)
_BATCH = (_ADDRESSES, _ADDRESSES, _SIZES, c_size_t, POINTER(CopyAttributes), _SIZES, c_size_t)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (POINTER(Handle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), Handle),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}
"""Argument types of what every driver since CUDA 11 exports."""
NEWER = {
    "cuMemcpyBatchAsync_v2": (*_BATCH, c_void_p),
    "cuMemcpyBatchAsync": (*_BATCH, _SIZES, c_void_p),
}
"""Of CUDA 13 and of 12.8, which also says which copy failed."""


class Driver:
    """Calls into a library that exports the driver's functions. A failure is a `CudaError`."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        for name, types in SIGNATURES.items():
            self._functions[name] = _typed(getattr(library, name), types)
        for name, types in NEWER.items():
            if hasattr(library, name):
                self._functions[name] = _typed(getattr(library, name), types)

    def __repr__(self) -> str:
        return f"<Driver batches={self.batches}>"

    @property
    def batches(self) -> bool:
        """Many copies can be given in one call."""
        return any(name in self._functions for name in NEWER)

    def call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise CudaError(name, code, self._error_name(code))

    def number(self, name: str, *arguments: Any) -> int:
        """What a call writes into its first argument, an int."""
        result = c_int()
        self.call(name, byref(result), *arguments)
        return result.value

    def address(self, name: str, *arguments: Any) -> int:
        """What a call writes into its first argument, an address or an opaque pointer."""
        result = c_uint64()
        kind = (SIGNATURES | NEWER)[name][0]
        self.call(name, ctypes.cast(byref(result), kind), *arguments)
        return result.value

    def _error_name(self, code: int) -> str:
        text = c_char_p()
        self._functions["cuGetErrorName"](code, byref(text))
        return (text.value or b"unknown error").decode()

    # what takes more than one argument to say

    def uuids(self) -> list[bytes]:
        """Of the devices that this process sees, by their number."""
        found = []
        for ordinal in range(self.number("cuDeviceGetCount")):
            uuid = Uuid()
            self.call("cuDeviceGetUuid_v2", byref(uuid), self.number("cuDeviceGet", ordinal))
            found.append(bytes(uuid))
        return found

    def pci_address(self, ordinal: int) -> str:
        """As in /sys/bus/pci/devices."""
        device = self.number("cuDeviceGet", ordinal)
        domain, bus, slot = (self.number("cuDeviceGetAttribute", what, device) for what in (_DOMAIN, _BUS, _SLOT))
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address lies in."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def handle(self, name: str, what: int) -> bytes:
        """An IPC handle of memory or of an event."""
        handle = Handle()
        self.call(name, byref(handle), what)
        return bytes(handle)

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        """Copy n pieces: arrays of n uint64 addresses and sizes. Ordered with the stream, not among themselves."""
        attributes, first, failed = CopyAttributes(1, flags=PREFER_OVERLAP), c_size_t(0), c_size_t()
        arrays = (
            targets.ctypes.data_as(_ADDRESSES),
            sources.ctypes.data_as(_ADDRESSES),
            sizes.ctypes.data_as(_SIZES),
        )
        arguments = (*arrays, len(targets), byref(attributes), byref(first), 1)
        if "cuMemcpyBatchAsync_v2" in self._functions:
            self.call("cuMemcpyBatchAsync_v2", *arguments, stream)
        else:
            self.call("cuMemcpyBatchAsync", *arguments, byref(failed), stream)

    def copy_each(self, pieces: Iterable[tuple[int, int, int]], stream: int) -> None:
        """The same, a call for each (target, source, size)."""
        for piece in pieces:
            self.call("cuMemcpyAsync", *piece, stream)


def _typed(function: Any, types: tuple[Any, ...]) -> Callable[..., int]:
    function.argtypes = types
    function.restype = c_int
    typed: Callable[..., int] = function
    return typed


@cache
def load_driver() -> Driver:
    """The machine's driver, ready. CudaMissing where there is none."""
    try:
        driver = Driver(ctypes.CDLL(LIBRARY))
        driver.call("cuInit", 0)
    except (OSError, AttributeError, CudaError) as error:
        raise CudaMissing(f"no usable NVIDIA driver ({error})") from error
    return driver
