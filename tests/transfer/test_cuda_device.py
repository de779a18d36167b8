"""Copies of a device: every byte, in the stream's order, done when it is said; errors end copies, or the device."""

import gc
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from gpu.cpu_driver import ILLEGAL_ADDRESS
from gpu_world import BLOCKS, GpuWorld

from kvevents_service.cuda import CudaError
from kvevents_service.transfer import cuda_device
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.cuda_device import DeviceFailed

SLOTS, BLOCK_BYTES = 24, 88


@pytest.fixture(params=["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", None])
def world(request: Any) -> Iterator[GpuWorld]:
    made = GpuWorld(batches=request.param)
    yield made
    made.library.forget()


@pytest.fixture
def one() -> Iterator[GpuWorld]:
    made = GpuWorld()
    yield made
    made.library.forget()


def numbered(values: Any) -> array:
    return array("i", values)


def done(rest: Callable[[], None] | None) -> None:
    assert rest is not None
    rest()


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize("most", [4096, 3])
def test_every_byte_arrives_and_nothing_else_changes(
    world: GpuWorld, monkeypatch: pytest.MonkeyPatch, most: int, scattered: bool
) -> None:
    monkeypatch.setattr(cuda_device, "PIECES_A_CALL", most)
    memory, arena, rng = world.attach(), HostArena(SLOTS, BLOCK_BYTES), random.Random(3)
    blocks = rng.sample(range(BLOCKS), 10) if scattered else list(range(2, 12))
    slots = rng.sample(range(SLOTS), 10) if scattered else list(range(5, 15))
    before = [world.block(block) for block in range(BLOCKS)]
    done(arena.store(memory, numbered(blocks), numbered(slots)))
    kept = {slot: before[block] for block, slot in zip(blocks, slots, strict=True)}
    assert [bytes(arena.bytes_of(slot, 1)) for slot in range(SLOTS)] == [
        kept.get(slot, bytes(BLOCK_BYTES)) for slot in range(SLOTS)
    ]
    back = [(block + 5) % BLOCKS for block in blocks]
    done(arena.load(memory, numbered(back), numbered(slots)))
    arrived = {to: before[block] for block, to in zip(blocks, back, strict=True)}
    assert [world.block(block) for block in range(BLOCKS)] == [
        arrived.get(block, before[block]) for block in range(BLOCKS)
    ]


def test_a_copy_that_leaves_its_memory_is_refused(one: GpuWorld) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    for blocks, slots in (([BLOCKS], [0]), ([0], [SLOTS]), ([-1], [0])):
        with pytest.raises(ValueError, match=r"(blocks|slots) from -?\d+ to -?\d+, of"):
            arena.load(memory, numbered(blocks), numbered(slots))


def test_a_copy_waits_for_the_event_of_the_newest_mark(one: GpuWorld) -> None:
    event, handle = one.event()
    computing = one.driver.address("cuStreamCreateWithPriority", 1, 0)
    memory, arena = one.attach((handle,)), HostArena(SLOTS, BLOCK_BYTES)
    gate = threading.Event()
    one.library.streams[computing].give(gate.wait)
    one.library.streams[computing].give(lambda: one.write(b"\7" * one.size))
    one.driver.call("cuEventRecord", event, computing)
    memory.marks.note(0)
    rest = arena.store(memory, numbered([3]), numbered([4]))
    time.sleep(0.02)
    assert bytes(arena.bytes_of(4, 1)) == bytes(BLOCK_BYTES)
    gate.set()
    done(rest)
    assert bytes(arena.bytes_of(4, 1)) == b"\7" * BLOCK_BYTES


def test_loads_do_not_wait_for_stores(one: GpuWorld) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    arena.bytes_of(1, 1)[:] = b"\1" * BLOCK_BYTES
    one.library.streams[memory.device._streams["store"]].gate.clear()
    store = arena.store(memory, numbered([0]), numbered([0]))
    done(arena.load(memory, numbered([2]), numbered([1])))
    assert one.block(2) == b"\1" * BLOCK_BYTES
    assert bytes(arena.bytes_of(0, 1)) == bytes(BLOCK_BYTES)
    one.library.streams[memory.device._streams["store"]].gate.set()
    done(store)


# errors


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync_v2", "cuEventRecord", "cuCtxSetCurrent"])
def test_an_error_fails_one_copy_when_nothing_of_it_runs(one: GpuWorld, call: str) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    done(arena.store(memory, numbered([0]), numbered([0])))
    one.library.fail[call] = 2
    synchronised = one.library.calls["cuStreamSynchronize"]
    with pytest.raises(CudaError):
        arena.store(memory, numbered([1]), numbered([1]))
    assert one.library.calls["cuStreamSynchronize"] == synchronised + 1
    done(arena.store(memory, numbered([2]), numbered([2])))
    assert (memory.device.failed, memory.device.counters["errors"]) == ("", 1)


@pytest.mark.parametrize("when", ["beginning", "ending"])
def test_a_sticky_error_is_the_end_of_the_device(
    one: GpuWorld, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    rest = arena.store(memory, numbered([0]), numbered([0]))
    if when == "beginning":
        done(rest)
        rest = partial(arena.store, memory, numbered([1]), numbered([1]))  # type: ignore[arg-type]
    one.library.lost = ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        done(rest)
    calls = one.library.calls.total()
    for verb in (arena.store, arena.load):
        with pytest.raises(DeviceFailed, match="700"):
            verb(memory, numbered([2]), numbered([2]))
    assert one.library.calls.total() == calls
    assert "700" in repr(memory.device)
    assert sum("misses from now on" in record.message for record in caplog.records) == 1
    memory.close()


def test_the_other_device_goes_on(one: GpuWorld) -> None:
    other = GpuWorld(uuid_bytes=b"other".ljust(16))
    memories = [one.attach(), other.attach()]
    one.library.lost = ILLEGAL_ADDRESS
    arena = HostArena(SLOTS, BLOCK_BYTES)
    with pytest.raises(CudaError):
        arena.store(memories[0], numbered([0]), numbered([0]))
    done(arena.store(memories[1], numbered([0]), numbered([0])))
    other.library.forget()


def test_the_counters_of_all_devices_are_told_together(one: GpuWorld) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    done(arena.store(memory, numbered([0]), numbered([0])))
    one.library.lost = ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        arena.store(memory, numbered([0]), numbered([0]))
    stats = one.devices.stats()
    assert (stats["cuda_devices"], stats["cuda_devices_failed"]) == (1, 1)
    assert (stats["cuda_errors"], stats["cuda_pinned_bytes"]) == (2, SLOTS * BLOCK_BYTES)


def test_machines_without_devices_have_no_counters_of_them() -> None:
    cuda_device.cuda_devices.cache_clear()
    assert cuda_device.device_stats() == {}


# pinned memory


def test_an_arena_is_pinned_once_and_let_go_with_it(one: GpuWorld) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    for block in range(3):
        done(arena.store(memory, numbered([block]), numbered([block])))
    assert list(one.library.pinned.values()) == [SLOTS * BLOCK_BYTES]
    assert memory.device.counters["pinned_bytes"] == SLOTS * BLOCK_BYTES
    del arena
    gc.collect()
    assert one.library.pinned == {}


def test_memory_that_may_not_be_pinned_is_used_as_it_is(one: GpuWorld, caplog: pytest.LogCaptureFixture) -> None:
    memory, arena = one.attach(), HostArena(SLOTS, BLOCK_BYTES)
    one.library.fail["cuMemHostRegister_v2"] = 2
    for block in range(2):
        done(arena.store(memory, numbered([block]), numbered([block])))
        assert bytes(arena.bytes_of(block, 1)) == one.block(block)
    assert memory.device.counters["unpinned_bytes"] == SLOTS * BLOCK_BYTES
    assert (one.library.calls["cuMemHostRegister_v2"], one.library.calls["cuMemcpyBatchAsync_v2"]) == (1, 0)
    assert sum("unpinned" in record.message for record in caplog.records) == 1
