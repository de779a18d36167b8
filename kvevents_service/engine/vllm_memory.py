"""A rank's KV cache made readable for the sidecar, without moving it out of the engine's hands.

On the CPU platform a storage moves into POSIX shared memory in place: every view of it follows, and its descriptor
goes to the sidecar. On a GPU the driver gives a handle of the allocation, and events say what the device has done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvevents_service.cuda import CudaError, CudaMissing, Driver, load_driver
from kvevents_service.engine.cuda import ComputeEvents, NotShareable, Span, export_spans
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.errors import ConfigError
from kvevents_service.wire.control import Memory, Region


class RankMemory(NamedTuple):
    """What a rank's hello says of its memory."""

    memories: Sequence[Memory]
    regions: Sequence[Region]
    fds: Sequence[int] = ()
    events: Sequence[bytes] = ()


class RankDevice(Protocol):
    """Where a rank computes. `share` and `close` come in pairs. `behind`: a step may run on after its call."""

    behind: bool

    def share(self, places: Sequence[Place]) -> RankMemory:
        """Share every storage once. ConfigError if it cannot be."""

    def mark(self, step: int) -> bool:
        """All of this step has been given to the device. False: it is done, too, and needs no mark."""

    def close(self) -> None:
        """The sidecar has let go of the memory."""


# the CPU platform


class HostDevice:
    """A step has been computed when the call for it returns."""

    behind = False

    def share(self, places: Sequence[Place]) -> RankMemory:
        """Storages stay shared: it cannot be taken back, and need not be."""
        storages = {place.storage._cdata: place.storage for place in places}
        shared = [_share_in_place(storage) for storage in storages.values()]
        numbers = list(storages)
        regions = [place.region(numbers.index(place.storage._cdata)) for place in places]
        return RankMemory([memory for memory, _ in shared], regions, [fd for _, fd in shared])

    def mark(self, step: int) -> bool:
        return False

    def close(self) -> None:
        return


def _share_in_place(storage: Any) -> tuple[Memory, int]:
    """The storage keeps its descriptor open. ConfigError if there is no room for it in /dev/shm."""
    try:
        storage.share_memory_()
        fd, size = storage._share_fd_cpu_()  # as torch.multiprocessing does it
    except RuntimeError as error:
        expected = f"{storage.nbytes()} bytes of room for the KV cache (docker: --shm-size). {error}"
        raise ConfigError("/dev/shm", expected) from error
    return Memory(size), fd


# NVIDIA GPUs


class CudaDevice:
    """The device whose context is the calling thread's. `stream`: the one that the steps run on, now."""

    behind = True

    def __init__(self, driver: Driver, stream: Callable[[], int]) -> None:
        self._driver = driver
        self._stream = stream
        self._events: ComputeEvents | None = None

    def __repr__(self) -> str:
        return f"<CudaDevice {self._events!r}>"

    def share(self, places: Sequence[Place]) -> RankMemory:
        """Events that a sidecar would not let go of stay as they are: these are others."""
        try:
            memories, regions = export_spans(self._driver, [_span(place) for place in places])
            self._events = ComputeEvents(self._driver)
        except (NotShareable, CudaError) as error:
            raise ConfigError("the KV cache", f"memory that another process can open. {error}") from error
        return RankMemory(memories, regions, events=self._events.handles)

    def mark(self, step: int) -> bool:
        if self._events is None:
            return False
        self._events.record(step, self._stream())
        return True

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def _span(place: Place) -> Span:
    start = place.storage.data_ptr() + place.offset_bytes
    return Span(place.name, start, place.block_bytes, place.block_bytes, place.blocks)


def device_named(kind: str, stream: Callable[[], int]) -> RankDevice:
    """By torch's name for the type of device. ConfigError for one whose memory cannot be shared."""
    if kind == "cpu":
        return HostDevice()
    if kind != "cuda":
        raise ConfigError("device", f"one of cpu, cuda, not {kind}")
    try:
        return CudaDevice(load_driver(), stream)
    except CudaMissing as error:
        raise ConfigError("device", f"a GPU with NVIDIA's driver. {error}") from error
