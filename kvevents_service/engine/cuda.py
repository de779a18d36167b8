"""KV tensors on a GPU, made known to a sidecar: handles of allocations, and events that say what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int
from itertools import product
from typing import NamedTuple

import torch

from kvevents_service.cuda import (
    EVENT_DISABLE_TIMING,
    EVENT_INTERPROCESS,
    IS_LEGACY_IPC_CAPABLE,
    CudaError,
    Driver,
)
from kvevents_service.errors import KvEventsError
from kvevents_service.wire.control import CudaHandle, Memory, Region

REMEDY = (
    "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, "
    "and without an allocator that maps memory itself, as sleep mode's does"
)


class NotShareable(KvEventsError):
    """GPU memory that no handle can be had of."""


class KvTensor(NamedTuple):
    """One layer's KV cache. Dimension `block_dim` counts blocks; what is behind it is one block's, without gaps.

    What is before it (keys and values, say) makes regions of their own.
    """

    name: str
    tensor: torch.Tensor
    block_dim: int = 0


class Exported(NamedTuple):
    """What a layout needs of memory on a GPU."""

    memories: list[Memory]
    regions: list[Region]


class Span(NamedTuple):
    """Block i of a region is `block_bytes` bytes at `address` + i * `stride_bytes`."""

    name: str
    address: int
    block_bytes: int
    stride_bytes: int
    blocks: int


def spans_of(layer: KvTensor) -> list[Span]:
    """The regions of one layer. ValueError if a block's bytes are not in one piece."""
    tensor, dim = layer.tensor, layer.block_dim
    block = tensor[(0,) * (dim + 1)]
    if not block.is_contiguous():
        raise ValueError(f"{layer.name}: the dimensions behind {dim} have gaps")
    parts = [tensor[index] for index in product(*map(range, tensor.shape[:dim]))]
    names = [layer.name] if len(parts) == 1 else [f"{layer.name}.{number}" for number in range(len(parts))]
    size, stride = block.numel() * tensor.itemsize, parts[0].stride(0) * tensor.itemsize
    return [
        Span(name, part.data_ptr(), size, stride, tensor.shape[dim])
        for name, part in zip(names, parts, strict=True)
    ]


def export(driver: Driver, layers: Sequence[KvTensor]) -> Exported:
    """Handles and regions of these layers; see `export_spans`."""
    return export_spans(driver, [span for layer in layers for span in spans_of(layer)])


def export_spans(driver: Driver, spans: Sequence[Span]) -> Exported:
    """Handles and regions of memory of one device, whose context is the calling thread's.

    The memory must live until the sidecar has let go (`close` returned True). NotShareable says what to set.
    """
    bases = list(dict.fromkeys(_allocation(driver, span) for span in spans))
    device = driver.uuids()[driver.number("cuCtxGetDevice")]
    memories = [Memory(size, None, CudaHandle(_handle(driver, base), device, size)) for base, size in bases]
    starts = [base for base, _ in bases]
    regions = []
    for name, address, block_bytes, stride_bytes, blocks in spans:
        memory = starts.index(driver.allocation(address)[0])
        regions.append(Region(name, memory, address - starts[memory], block_bytes, stride_bytes, blocks))
    return Exported(memories, regions)


def _allocation(driver: Driver, span: Span) -> tuple[int, int]:
    capable = c_int()
    driver.call("cuPointerGetAttribute", byref(capable), IS_LEGACY_IPC_CAPABLE, span.address)
    if not capable.value:
        raise NotShareable(f"{span.name} is in memory that has no CUDA IPC handle: {REMEDY}")
    return driver.allocation(span.address)


def _handle(driver: Driver, base: int) -> bytes:
    try:
        return driver.handle("cuIpcGetMemHandle", base)
    except CudaError as error:
        raise NotShareable(f"the driver gives no CUDA IPC handle ({error}): under WSL it has none") from error


class ComputeEvents:
    """Events of one device, recorded in turns on one stream. They must live until the sidecar has let go.

    `record` after every forward pass, on the stream that it runs on; then tell the number (`RankClient.mark`).
    """

    def __init__(self, driver: Driver, count: int = 8) -> None:
        self._driver = driver
        flags = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING
        self._events = [driver.address("cuEventCreate", flags) for _ in range(count)]
        self.handles = [driver.handle("cuIpcGetEventHandle", event) for event in self._events]

    def __repr__(self) -> str:
        return f"<ComputeEvents {len(self._events)}>"

    def record(self, number: int, stream: int) -> None:
        """Behind what the stream has been given for passes up to `number`. `stream`: its cudaStream_t."""
        self._driver.call("cuEventRecord", self._events[number % len(self._events)], stream)

    def close(self) -> None:
        """Only when the sidecar has let go."""
        for event in self._events:
            self._driver.call("cuEventDestroy_v2", event)
        self._events.clear()
