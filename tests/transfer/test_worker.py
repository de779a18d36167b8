"""Workers copy in order, carry the metadata on the future, and outlive a failing copy."""

import asyncio
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.testing import ManualClock
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.transfer.worker import MAX_BEGUN, CopyFailed, CopyWorker
from kvevents_service.wire.control import Memory

CLOCK = ManualClock(100.0)


def transfer(blocks: list[int], slots: list[int], deadline: float = 200.0) -> TransferMeta:
    return TransferMeta(1, "store", 1, 1, array("i", blocks), array("i", slots), deadline)


def engine_memory() -> EngineMemory:
    shared = SharedMemory.create(8 * 64)
    return attach([Memory(8 * 64)], uniform_layers(1, 8, 64), [shared.fd])


@pytest.fixture
def memory() -> EngineMemory:
    return engine_memory()


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[CopyWorker]:
    made = CopyWorker("store", HostArena(8, 64), CLOCK)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    made.close()


async def test_the_future_carries_the_metadata(worker: CopyWorker, memory: EngineMemory) -> None:
    meta = transfer([1], [2])
    future = worker.submit(meta, memory)
    await asyncio.wait_for(future, 10)
    assert future.meta is meta
    assert worker.bytes_moved == 64


async def test_a_transfer_past_its_deadline_is_failed_without_a_copy(
    worker: CopyWorker, memory: EngineMemory
) -> None:
    with pytest.raises(CopyFailed, match="deadline"):
        await asyncio.wait_for(worker.submit(transfer([1], [2], deadline=99.0), memory), 10)
    assert worker.bytes_moved == 0


async def test_a_failing_copy_fails_alone(worker: CopyWorker, memory: EngineMemory) -> None:
    bad = worker.submit(transfer([1, 3, 5], [2, 400, 6]), memory)
    good = worker.submit(transfer([1], [2]), memory)
    with pytest.raises(CopyFailed):
        await asyncio.wait_for(bad, 10)
    await asyncio.wait_for(good, 10)


async def test_transfers_end_in_the_order_they_were_given(worker: CopyWorker, memory: EngineMemory) -> None:
    ended: list[int] = []
    futures = [worker.submit(transfer([i], [i]), memory) for i in range(8)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ended.append(number))
    await asyncio.wait_for(asyncio.gather(*futures), 10)
    assert ended == list(range(8))


async def test_what_is_queued_on_memory_that_is_gone_fails_at_once_and_nothing_else(
    worker: CopyWorker, memory: EngineMemory
) -> None:
    gate = threading.Event()
    worker._copier.submit(gate.wait)
    other = engine_memory()
    running, queued, others = (
        worker.submit(transfer([i], [i]), one) for i, one in enumerate([memory, memory, other])
    )
    await asyncio.sleep(0)  # the worker takes the first one
    worker.drop(memory)
    assert (running.done(), queued.done(), others.done()) == (False, True, False)
    with pytest.raises(CopyFailed, match="owner is gone"):
        await queued
    gate.set()
    await asyncio.wait_for(asyncio.gather(running, others), 10)
    assert worker.bytes_moved == 2 * 64


# marks


async def test_a_transfer_waits_for_its_mark_and_the_others_do_not(
    worker: CopyWorker, memory: EngineMemory
) -> None:
    held = worker.submit(transfer([1], [1]), memory, mark=2)
    await asyncio.wait_for(worker.submit(transfer([2], [2]), memory), 10)
    memory.marks.note(1)
    await asyncio.sleep(0.01)
    assert not held.done()
    memory.marks.note(2)
    await asyncio.wait_for(held, 10)
    await asyncio.wait_for(worker.submit(transfer([3], [3]), memory, mark=1), 10)


async def test_a_mark_that_does_not_come_in_time_fails_its_transfer(
    worker: CopyWorker, memory: EngineMemory
) -> None:
    held = worker.submit(transfer([1], [1], deadline=CLOCK() + 0.01), memory, mark=2)
    with pytest.raises(CopyFailed, match="mark 2"):
        await asyncio.wait_for(held, 10)
    assert repr(memory.marks) == "<Marks -1 waiting=0>"
    memory.marks.note(2)
    await asyncio.wait_for(worker.submit(transfer([2], [2]), memory), 10)
    assert worker.bytes_moved == 64


async def test_what_waits_for_a_mark_of_memory_that_is_gone_fails_at_once(
    worker: CopyWorker, memory: EngineMemory
) -> None:
    held = worker.submit(transfer([1], [1]), memory, mark=2)
    worker.drop(memory)
    with pytest.raises(CopyFailed, match="owner is gone"):
        await held
    await asyncio.sleep(0)
    assert repr(memory.marks) == "<Marks -1 waiting=0>"


# copies that a device does


class Device:
    """An arena whose copies end when they are told to, in order."""

    block_bytes = 64

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ends: list[threading.Event] = []
        self.errors: dict[int, Exception] = {}

    def store(self, memory: object, blocks: array, slots: array) -> Callable[[], None]:
        end, block = threading.Event(), blocks[0]
        self.begun.append(block)
        self.ends.append(end)

        def rest() -> None:
            end.wait(10)
            if block in self.errors:
                raise self.errors[block]

        return rest

    load = store


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.001)


async def test_some_copies_of_a_device_are_under_way_at_once(memory: EngineMemory) -> None:
    device = Device()
    worker = CopyWorker("load", device, CLOCK)
    task = asyncio.create_task(worker.run())
    futures = [worker.submit(transfer([block % 8], [0]), memory) for block in range(MAX_BEGUN + 2)]
    await until(lambda: len(device.begun) == MAX_BEGUN)
    await asyncio.sleep(0.01)
    assert (len(device.begun), [future.done() for future in futures]) == (MAX_BEGUN, [False] * len(futures))
    device.errors[0] = OSError("broken")
    device.ends[0].set()
    with pytest.raises(CopyFailed, match="broken"):
        await asyncio.wait_for(futures[0], 10)
    await until(lambda: len(device.begun) == MAX_BEGUN + 1)
    worker.drop(memory)
    assert [future.done() for future in futures[1:]] == [False] * MAX_BEGUN + [True]
    assert isinstance(futures[-1].exception(), CopyFailed)
    for end in device.ends:
        end.set()
    await asyncio.wait_for(asyncio.gather(*futures[1:-1]), 10)
    assert worker.bytes_moved == MAX_BEGUN * 64
    task.cancel()
    worker.close()


async def test_a_worker_is_closed_only_when_the_device_is_done(memory: EngineMemory) -> None:
    device = Device()
    worker = CopyWorker("store", device, CLOCK)
    task = asyncio.create_task(worker.run())
    futures = [worker.submit(transfer([block], [0]), memory) for block in range(2)]
    await until(lambda: len(device.begun) == 2)
    task.cancel()
    for number, end in enumerate(device.ends):
        threading.Timer(0.05 * (number + 1), end.set).start()
    worker.close()
    assert [end.is_set() for end in device.ends] == [True, True]
    for future in futures:
        with pytest.raises(CopyFailed, match="closed"):
            await future
    await asyncio.sleep(0.01)  # what the other thread has told the loop finds them done


async def test_a_worker_that_is_closed_after_a_drop_fails_nothing_twice(memory: EngineMemory) -> None:
    worker = CopyWorker("store", HostArena(8, 64), CLOCK)
    future = worker.submit(transfer([1], [1]), memory)
    worker.drop(memory)
    worker.close()
    with pytest.raises(CopyFailed, match="owner is gone"):
        await future


HUNG = """
import asyncio, os, sys
sys.path.insert(0, "tests")
from transfer.test_worker import CLOCK, CopyFailed, CopyWorker, HostArena, engine_memory, transfer


class Hanging(HostArena):
    def store(self, *_):
        os.close(os.open(sys.argv[1], os.O_RDONLY))  # nobody ever writes to this FIFO


async def main() -> None:
    worker = CopyWorker("store", Hanging(8, 64), CLOCK)
    running = asyncio.create_task(worker.run())
    futures = [worker.submit(transfer([block], [block]), engine_memory()) for block in (1, 2)]
    await asyncio.sleep(0.2)
    running.cancel()
    assert not worker.close(CLOCK() + 0.2), "it hangs"
    for future in futures:
        try:
            await future
        except CopyFailed as error:
            print(error)


asyncio.run(main())
"""


def test_a_disk_that_hangs_holds_neither_close_nor_the_end_of_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "disk")
    command = [sys.executable, "-c", HUNG, str(tmp_path / "disk")]
    ended = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["the worker was closed"] * 2
