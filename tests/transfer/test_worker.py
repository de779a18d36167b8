"""Workers copy in order, carry the metadata on the future, and outlive a failing copy."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.testing import ManualClock
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.transfer.worker import CopyFailed, CopyWorker
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


async def test_a_worker_that_is_closed_after_a_drop_fails_nothing_twice(memory: EngineMemory) -> None:
    worker = CopyWorker("store", HostArena(8, 64), CLOCK)
    future = worker.submit(transfer([1], [1]), memory)
    worker.drop(memory)
    worker.close()
    with pytest.raises(CopyFailed, match="owner is gone"):
        await future
