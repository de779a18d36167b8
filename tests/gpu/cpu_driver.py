"""A library with the driver's functions, for machines without a GPU: its device memory is shared memory.

The functions are C function pointers, so calls go through the same signatures and conversions as to libcuda.so.1.
A stream is a thread that does in order what it is given; events work between processes. It can be told to hold its
streams, and to fail.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvevents_service.cuda import HANDLE_BYTES, NEWER, SIGNATURES, Handle

SHM = Path("/dev/shm")
POLL_S = 0.0005
INVALID_VALUE, INVALID_CONTEXT, ILLEGAL_ADDRESS = 1, 201, 700
CONTEXT = 0xC0DE


class SharedFile:
    """A mapped file in /dev/shm. Its name is its handle."""

    def __init__(self, name: str, size: int = 0) -> None:
        self.name = name
        fd = os.open(SHM / name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0), 0o600)
        if size:
            os.ftruncate(fd, size)
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size)
        os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @property
    def handle(self) -> bytes:
        return self.name.encode().ljust(HANDLE_BYTES, b"\0")

    def unlink(self) -> None:
        with suppress(FileNotFoundError):
            (SHM / self.name).unlink()


class Event:
    """Two counters, how often it was recorded and how far that has come, and whose it is.

    Nobody waits for what a dead process has recorded.
    """

    def __init__(self, file: SharedFile) -> None:
        self.file = file

    @classmethod
    def made(cls) -> Event:
        event = cls(SharedFile(f"kvevents-cpu-{os.getpid()}-{uuid.uuid4().hex}", 24))
        struct.pack_into("<Q", event.file.map, 16, os.getpid())
        return event

    @property
    def owned(self) -> bool:
        return Path("/proc", str(struct.unpack_from("<Q", self.file.map, 16)[0])).exists()

    def read(self) -> tuple[int, int]:
        return struct.unpack_from("<QQ", self.file.map)

    def record(self) -> int:
        recorded = self.read()[0] + 1
        struct.pack_into("<Q", self.file.map, 0, recorded)
        return recorded

    def reach(self, number: int) -> None:
        struct.pack_into("<Q", self.file.map, 8, number)

    def wait(self, number: int) -> None:
        while self.read()[1] < number and self.owned:
            time.sleep(POLL_S)


class Stream:
    """Does what it is given, in order, as long as its gate is open, after `slow_s` each."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            self.gate.wait()
            time.sleep(self.slow_s)
            work()

    def finish(self) -> None:
        done = threading.Event()
        self.give(done.set)
        done.wait()


class CpuLibrary:
    """One device. `fail[name] = code`: the next call of this function fails. `lost`: what all say from now on."""

    def __init__(
        self,
        *,
        batches: str | None = "cuMemcpyBatchAsync_v2",
        uuid_bytes: bytes = b"cpu".ljust(16),
        slow_s: float = 0.0,
    ) -> None:
        self.uuid = uuid_bytes
        self.fail: dict[str, int] = {}
        self.lost = 0
        self.calls: Counter[str] = Counter()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.memory: dict[int, SharedFile] = {}
        self.open: dict[int, SharedFile] = {}
        self.pinned: dict[int, int] = {}
        self.legacy = True
        self.slow_s = slow_s
        self._current = threading.local()
        self._ids = iter(range(0x1000, 1 << 30))
        for name, types in (SIGNATURES | NEWER).items():
            if name in SIGNATURES or name == batches:
                function = getattr(self, f"_{name}".removesuffix("_v2"), None) or self._nothing
                setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._guarded(name, function)))

    def _guarded(self, name: str, function: Callable[..., int | None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if name != "cuGetErrorName":
                code = self.fail.pop(name, 0) or self.lost
                if code:
                    return code
            try:
                return function(*arguments) or 0
            except (LookupError, OSError, ValueError):
                return INVALID_VALUE

        return call

    def _nothing(self, *_: Any) -> int:
        return 0

    # what tests and engines do with the device

    def allocate(self, size: int) -> int:
        """Device memory; returns its address."""
        file = SharedFile(f"kvevents-cpu-{os.getpid()}-{uuid.uuid4().hex}", size)
        self.memory[file.address] = file
        return file.address

    def forget(self) -> None:
        """Remove every name in /dev/shm."""
        for file in [*self.memory.values(), *(event.file for event in self.events.values())]:
            file.unlink()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No stream does anything."""
        for stream in self.streams.values():
            stream.gate.clear()
        try:
            yield
        finally:
            for stream in self.streams.values():
                stream.gate.set()

    def _in_context(self) -> bool:
        return getattr(self._current, "context", None) == CONTEXT

    # the driver's functions

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text[0] = b"CUDA_ERROR_OF_TESTS"

    def _cuDeviceGetCount(self, count: Any) -> None:
        count[0] = 1

    def _cuDeviceGetUuid(self, result: Any, device: int) -> None:
        ctypes.memmove(result, self.uuid, 16)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        context[0] = CONTEXT

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._current.context = context

    def _cuMemGetAddressRange(self, base: Any, size: Any, address: int) -> None:
        everything = [*self.memory.values(), *self.open.values()]
        file = next(file for file in everything if file.address <= address < file.address + file.size)
        base[0], size[0] = file.address, file.size

    def _cuPointerGetAttribute(self, data: int, attribute: int, address: int) -> None:
        ctypes.c_int.from_address(data).value = self.legacy

    def _cuIpcGetMemHandle(self, handle: Any, address: int) -> int | None:
        if not self.legacy:
            return INVALID_VALUE
        ctypes.memmove(handle, self.memory[address].handle, HANDLE_BYTES)
        return None

    def _cuIpcOpenMemHandle(self, address: Any, handle: Handle, flags: int) -> int | None:
        if not self._in_context():
            return INVALID_CONTEXT
        file = SharedFile(_name(handle))
        self.open[file.address] = file
        address[0] = file.address
        return None

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        del self.open[address]

    def _cuIpcGetEventHandle(self, handle: Any, event: int) -> None:
        ctypes.memmove(handle, self.events[event].file.handle, HANDLE_BYTES)

    def _cuIpcOpenEventHandle(self, event: Any, handle: Handle) -> None:
        number = next(self._ids)
        self.events[number] = Event(SharedFile(_name(handle)))
        event[0] = number

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        number = next(self._ids)
        self.events[number] = Event.made()
        event[0] = number

    def _cuEventDestroy(self, event: int) -> None:
        self.events.pop(event).file.unlink()

    def _cuEventRecord(self, event: int, stream: int) -> None:
        number = self.events[event].record()
        self.streams[stream].give(lambda event=self.events[event]: event.reach(number))

    def _cuEventSynchronize(self, event: int) -> int:
        recorded, _ = self.events[event].read()
        self.events[event].wait(recorded)
        return self.lost

    def _cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:
        number = next(self._ids)
        self.streams[number] = Stream(self.slow_s)
        stream[0] = number

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        recorded, _ = self.events[event].read()
        self.streams[stream].give(lambda event=self.events[event]: event.wait(recorded))

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.streams[stream].finish()

    def _cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> int | None:
        if not self._in_context():
            return INVALID_CONTEXT
        self.streams[stream].give(lambda: self.lost or ctypes.memmove(target, source, size))
        return None

    def _cuMemcpyBatchAsync(
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, *rest: Any
    ) -> int | None:
        first, kinds, *_ = rest
        if (attributes[0].source_order, first[0], kinds) != (1, 0, 1):
            return INVALID_VALUE
        stream = rest[-1]
        for piece in range(count):
            code = self._cuMemcpyAsync(targets[piece], sources[piece], sizes[piece], stream)
            if code:
                return code
        return None

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self.pinned[address] = size

    def _cuMemHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def _name(handle: Handle) -> str:
    return bytes(handle).rstrip(b"\0").decode()
