"""A rank's memory is shared where it is: whoever opens what is announced sees what the engine's tensors see."""

import mmap
import os
from collections.abc import Iterator

import pytest
import torch
from gpu.cpu_driver import CpuLibrary

from kvevents_service.cuda import Driver
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_memory import CudaDevice, HostDevice, device_named
from kvevents_service.errors import ConfigError

BLOCKS, PAGE = 4, 4096


def no_stream() -> int:
    raise AssertionError("nothing is computed here")


# the CPU platform


def test_views_follow_their_storage_into_shared_memory() -> None:
    cache = torch.arange(2 * BLOCKS * PAGE, dtype=torch.int32).view(2, BLOCKS, PAGE)
    layer = cache[1]
    size = cache.untyped_storage().nbytes()
    places = [
        Place(name, each.untyped_storage(), at, PAGE, BLOCKS)
        for name, each, at in (("a", cache, 0), ("b", layer, 64))
    ]
    shared = HostDevice().share(places)
    assert len(shared.memories) == len(shared.fds) == 1
    assert shared.memories[0].size_bytes == size
    assert [(region.memory, region.offset_bytes) for region in shared.regions] == [(0, 0), (0, 64)]
    with mmap.mmap(os.dup(shared.fds[0]), size) as mapped:
        seen = torch.frombuffer(mapped, dtype=torch.int32).view(2, BLOCKS, PAGE)
        assert torch.equal(seen, cache)
        layer[2, 7] = -5
        assert seen[1, 2, 7] == -5
        seen[1, 3, 0] = -6
        assert layer[3, 0] == -6
        del seen


def test_two_storages_are_two_memories() -> None:
    places = [Place(name, torch.zeros(PAGE).untyped_storage(), 0, PAGE, 1) for name in "ab"]
    shared = HostDevice().share(places)
    assert [region.memory for region in shared.regions] == [0, 1]
    assert len(set(shared.fds)) == 2
    assert not HostDevice().mark(1), "a step that has returned is done"


# a GPU, played by shared memory


@pytest.fixture
def library() -> Iterator[CpuLibrary]:
    made = CpuLibrary()
    yield made
    made.forget()


def allocated(library: CpuLibrary, size: int) -> torch.Tensor:
    return torch.frombuffer(library.memory[library.allocate(size)].map, dtype=torch.uint8)


def test_storages_of_a_gpu_go_by_handle_each_allocation_once(library: CpuLibrary) -> None:
    one, other = allocated(library, 2 * BLOCKS * PAGE), allocated(library, BLOCKS * PAGE)
    places = [
        Place(name, each.untyped_storage(), at, PAGE, BLOCKS)
        for name, each, at in (("a", one, 0), ("b", one, BLOCKS * PAGE), ("c", other, 0))
    ]
    shared = CudaDevice(Driver(library), no_stream).share(places)
    assert [memory.size_bytes for memory in shared.memories] == [2 * BLOCKS * PAGE, BLOCKS * PAGE]
    assert all(memory.cuda is not None and memory.cuda.device == library.uuid for memory in shared.memories)
    assert [(region.memory, region.offset_bytes) for region in shared.regions] == [
        (0, 0),
        (0, BLOCKS * PAGE),
        (1, 0),
    ]
    assert {(r.block_bytes, r.stride_bytes, r.blocks) for r in shared.regions} == {(PAGE, PAGE, BLOCKS)}
    assert not shared.fds
    assert len(set(shared.events)) == len(library.events) > 1


def test_a_step_is_marked_on_the_stream_that_it_ran_on(library: CpuLibrary) -> None:
    driver = Driver(library)
    stream = driver.address("cuStreamCreateWithPriority", 1, 0)
    device = CudaDevice(driver, lambda: stream)
    assert not device.mark(0), "nothing is shared yet"
    device.share([Place("a", allocated(library, PAGE).untyped_storage(), 0, PAGE, 1)])
    with library.held():
        assert device.mark(3)
        assert [event.read() for event in library.events.values()].count((1, 0)) == 1
    driver.call("cuStreamSynchronize", stream)
    assert [event.read() for event in library.events.values()][3] == (1, 1)
    device.close()
    assert library.events == {}


@pytest.mark.parametrize("refusal", ["the attribute", "the call"])
def test_memory_without_a_handle_is_one_error_that_says_what_to_set(library: CpuLibrary, refusal: str) -> None:
    place = Place("layers.0", allocated(library, PAGE).untyped_storage(), 0, PAGE, 1)
    library.legacy = refusal == "the call"
    library.fail["cuIpcGetMemHandle"] = 801
    expected = r"no CUDA IPC handle \(" if library.legacy else "expandable_segments:False, and without an allocator"
    with pytest.raises(
        ConfigError, match=f"the KV cache: expected memory that another process can open.*{expected}"
    ):
        CudaDevice(Driver(library), no_stream).share([place])


# by name


def test_a_device_that_nobody_can_share_is_one_clear_error() -> None:
    assert isinstance(device_named("cpu", no_stream), HostDevice)
    with pytest.raises(ConfigError, match="device: expected one of cpu, cuda, not xpu"):
        device_named("xpu", no_stream)


def test_a_gpu_without_nvidias_driver_is_one_clear_error() -> None:
    """As on AMD's: torch calls them by the same name."""
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="device: expected a GPU with NVIDIA's driver"):
        device_named("cuda", no_stream)
