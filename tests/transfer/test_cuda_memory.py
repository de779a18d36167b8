"""GPU memory is opened as announced, or refused by name with nothing left open; closed, it is not touched again."""

from collections.abc import Iterator

import pytest
from gpu_world import BLOCKS, GpuWorld

from kvevents_service.cuda import CudaMissing
from kvevents_service.errors import ControlError
from kvevents_service.transfer.cuda_device import CudaDevices
from kvevents_service.transfer.cuda_memory import attach_cuda
from kvevents_service.transfer.memory import attach
from kvevents_service.transfer.pieces import Rows
from kvevents_service.wire.control import CudaHandle, Memory, Region


@pytest.fixture
def world() -> Iterator[GpuWorld]:
    made = GpuWorld()
    yield made
    made.library.forget()


def test_memory_is_opened_and_closed_once(world: GpuWorld) -> None:
    memory = world.attach((world.event()[1],))
    (base,) = world.library.open
    assert memory.rows == [Rows(base + 64, 48, 48), Rows(base + 64 + BLOCKS * 48, 40, 40)]
    assert (memory.blocks, memory.block_sizes, memory.block_bytes, memory.intact()) == (
        BLOCKS,
        (24, 24, 40),
        88,
        True,
    )
    memory.close()
    memory.close()
    assert world.library.open == {}
    assert world.library.calls["cuIpcCloseMemHandle"] == world.library.calls["cuEventDestroy_v2"] == 1


def test_the_newest_mark_names_the_event_that_is_waited_for(world: GpuWorld) -> None:
    memory = world.attach((world.event()[1], world.event()[1]))
    assert memory.after() == []
    events = memory._opened.events
    for mark, event in ((0, events[0]), (3, events[1]), (4, events[0])):
        memory.marks.note(mark)
        assert memory.after() == [event]
    assert world.attach().after() == []


def changed(memory: Memory, **fields: object) -> Memory:
    handle = memory.cuda
    assert handle is not None
    values = {name: getattr(handle, name) for name in handle.__struct_fields__} | fields
    return Memory(memory.size_bytes, None, CudaHandle(**values))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"handle": b"short"}, "64 bytes of handle"),
        ({"device": b"short"}, "16 of device"),
        ({"offset_bytes": 1}, "inside its allocation"),
        ({"offset_bytes": -1}, "inside its allocation"),
        ({"base_bytes": 1 << 40}, "the size of the allocation"),
        ({"handle": b"gone".ljust(64, b"\0")}, "handles that can be opened"),
        ({"device": b"another device!!"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_stays_open(
    world: GpuWorld, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(ControlError, match=said):
        attach_cuda([changed(world.memory, **fields)], world.regions, (), lambda: world.devices)
    assert world.library.open == {}


def test_all_memory_of_a_rank_is_of_one_kind_and_device(world: GpuWorld) -> None:
    with pytest.raises(ControlError, match="one kind"):
        attach_cuda([world.memory, Memory(64)], world.regions, (), lambda: world.devices)
    with pytest.raises(ControlError, match="one device"):
        attach_cuda(
            [world.memory, changed(world.memory, device=b"o" * 16)], world.regions, (), lambda: world.devices
        )


def test_an_event_that_cannot_be_opened_closes_everything(world: GpuWorld) -> None:
    for events, said in (((b"short",), "events"), ((world.event()[1], b"gone".ljust(64, b"\0")), "opened")):
        with pytest.raises(ControlError, match=said):
            world.attach(events)
    assert world.library.open == {}
    assert world.library.calls["cuEventDestroy_v2"] == 1


def test_a_machine_without_a_driver_refuses_the_engine(world: GpuWorld) -> None:
    def missing() -> CudaDevices:
        raise CudaMissing("no usable NVIDIA driver (libcuda.so.1)")

    with pytest.raises(ControlError, match="no usable NVIDIA driver"):
        attach_cuda([world.memory], world.regions, (), missing)


def test_a_region_that_leaves_its_memory_is_refused_before_anything_is_opened(world: GpuWorld) -> None:
    outside = [Region("x", 0, 0, world.size + 1, world.size + 1, 1)]
    with pytest.raises(ControlError, match=r"regions\[0\]"):
        attach([world.memory], outside, [])


def test_an_error_while_closing_is_counted(world: GpuWorld) -> None:
    memory = world.attach()
    world.library.fail["cuIpcCloseMemHandle"] = 1
    memory.close()
    assert memory.device.counters["close_errors"] == 1
