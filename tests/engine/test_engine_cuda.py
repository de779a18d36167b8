"""KV tensors become regions however they lie; memory without a handle is refused with what to set."""

from collections.abc import Iterator

import pytest
import torch
from gpu.cpu_driver import CpuLibrary

from kvevents_service.cuda import Driver
from kvevents_service.engine.cuda import ComputeEvents, KvTensor, NotShareable, Span, export, spans_of

BLOCKS, TOKENS, HEADS, DIM = 6, 4, 2, 8
BLOCK_BYTES = TOKENS * HEADS * DIM * 2


@pytest.fixture
def library() -> Iterator[CpuLibrary]:
    made = CpuLibrary()
    yield made
    made.forget()


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def test_keys_and_values_apart_are_two_regions() -> None:
    tensor = half(2, BLOCKS, TOKENS, HEADS, DIM)
    start = tensor.data_ptr()
    assert spans_of(KvTensor("layer", tensor, 1)) == [
        Span("layer.0", start, BLOCK_BYTES, BLOCK_BYTES, BLOCKS),
        Span("layer.1", start + BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCKS),
    ]


def test_keys_and_values_of_a_block_together_are_one() -> None:
    tensor = half(BLOCKS, 2, TOKENS, HEADS, DIM)
    assert spans_of(KvTensor("layer", tensor)) == [
        Span("layer", tensor.data_ptr(), 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCKS)
    ]


def test_blocks_of_all_layers_together_have_a_stride() -> None:
    whole = half(BLOCKS, 3, TOKENS, HEADS, DIM)
    assert spans_of(KvTensor("layer", whole[:, 1])) == [
        Span("layer", whole.data_ptr() + BLOCK_BYTES, BLOCK_BYTES, 3 * BLOCK_BYTES, BLOCKS)
    ]


def test_a_block_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="layer: the dimensions behind 0 have gaps"):
        spans_of(KvTensor("layer", half(BLOCKS, HEADS, TOKENS, DIM).transpose(1, 2)))


def on_device(library: CpuLibrary, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel() * 2
    return torch.frombuffer(library.memory[library.allocate(size)].map, dtype=torch.float16).view(shape)


def test_each_allocation_has_one_handle(library: CpuLibrary) -> None:
    one, other = (on_device(library, (2, 2, BLOCKS, TOKENS, HEADS, DIM)) for _ in range(2))
    layers = [
        KvTensor(f"l{number}", tensor, 1) for number, tensor in enumerate((one[0], one[1], other[0], other[1]))
    ]
    memories, regions = export(Driver(library), layers)
    assert [memory.size_bytes for memory in memories] == [4 * BLOCKS * BLOCK_BYTES] * 2
    assert [memory.cuda.device for memory in memories] == [library.uuid] * 2
    assert [region.memory for region in regions] == [0] * 4 + [1] * 4
    assert [region.offset_bytes for region in regions] == [BLOCKS * BLOCK_BYTES * number for number in range(4)] * 2
    assert {(r.block_bytes, r.stride_bytes, r.blocks) for r in regions} == {(BLOCK_BYTES, BLOCK_BYTES, BLOCKS)}


def test_memory_without_a_handle_is_refused_with_what_to_set(library: CpuLibrary) -> None:
    tensor = on_device(library, (BLOCKS, TOKENS))
    library.legacy = False
    with pytest.raises(NotShareable, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        export(Driver(library), [KvTensor("layer", tensor)])


def test_events_are_recorded_in_turns(library: CpuLibrary) -> None:
    driver = Driver(library)
    stream, events = driver.address("cuStreamCreateWithPriority", 1, 0), ComputeEvents(driver, 2)
    for number in range(3):
        events.record(number, stream)
    driver.call("cuStreamSynchronize", stream)
    assert [event.read() for event in library.events.values()] == [(2, 2), (1, 1)]
    assert len(set(events.handles)) == 2
    events.close()
    assert library.events == {}
