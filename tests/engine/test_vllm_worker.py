"""The worker half: what it reports is computed, and a sidecar copies a rank's bytes out and back, in place."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.vllm_toy import FULL
from test_client import LONG_S, Sidecar

from kvevents_service.cuda import CudaError
from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.offers import make_offer
from kvevents_service.engine.vllm_border import WORKER_FAULT, or_leave
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_loads import LoadEnd
from kvevents_service.engine.vllm_memory import HostDevice
from kvevents_service.engine.vllm_scheduler import Said
from kvevents_service.engine.vllm_worker import Rank, WorkerHalf
from kvevents_service.wire.packing import pack_int32

RANK = Rank("run-1", 0, 1)
BLOCKS, PAGE = 8, 64


class Device(HostDevice):
    """A device whose marks are seen, and may fail."""

    behind = True

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.closed = 0
        self.fault: Exception | None = None

    def mark(self, step: int) -> bool:
        if self.fault:
            raise self.fault
        self.marks.append(step)
        return True

    def close(self) -> None:
        self.closed += 1


def place(cache: torch.Tensor) -> Place:
    return Place("layer", cache.untyped_storage(), 0, PAGE, BLOCKS)


def test_where_steps_end_before_they_return_each_is_computed_at_once() -> None:
    worker = WorkerHalf("/nowhere", RANK, HostDevice())
    assert worker.computed < 0
    worker.said = Said(5, {})
    worker.end_step()
    assert worker.computed == 5


def test_on_a_device_each_step_is_marked_and_the_last_one_again_for_a_new_client() -> None:
    device = Device()
    worker = WorkerHalf("/nowhere", RANK, device)
    worker.lend([place(torch.zeros(BLOCKS * PAGE, dtype=torch.uint8))])
    for step in (1, 2):
        worker.said = Said(step, {})
        worker.end_step()
        assert worker.computed == step
    assert device.marks == [0, 1, 2]
    assert worker.client is not None
    assert worker.client._marked == 2
    assert worker.take_back()
    assert device.closed == 1
    worker.said = Said(3, {})
    worker.end_step()
    assert device.marks == [0, 1, 2], "nobody to tell"
    worker.lend_again()
    assert device.marks == [0, 1, 2, 3]
    assert worker.client._marked == 3
    assert worker.take_back()


def test_a_device_that_fails_ends_the_lending_and_no_step() -> None:
    device, told = Device(), list[str]()
    worker = WorkerHalf("/nowhere", RANK, device)
    worker.lend([place(torch.zeros(BLOCKS * PAGE, dtype=torch.uint8))])
    device.fault = CudaError("cuEventRecord", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    for step in (1, 2):
        worker.said = Said(step, {})
        or_leave(worker, WorkerHalf.end_step, told.append)
        assert worker.computed == step
    assert told == [WORKER_FAULT]
    or_leave(worker, WorkerHalf.lend_again, told.append)
    assert worker.client is None


def test_ends_of_loads_are_passed_on() -> None:
    worker = WorkerHalf("/nowhere", RANK, HostDevice())
    worker.said = Said(1, {"a": LoadEnd(), "b": LoadEnd(True, (3, 4)), "c": LoadEnd(True)})
    assert worker.loaded() == {"a", "b", "c"}
    assert worker.failed() == {"c"}
    assert worker.bad_blocks() == {3, 4}
    worker.said = Said(2, {})
    assert not worker.loaded() | worker.failed()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path)
    made.start()
    yield made
    made.end()


def until(done: Any) -> Any:
    deadline = time.monotonic() + LONG_S
    while not (found := done()):
        assert time.monotonic() < deadline
    return found


def test_a_block_goes_out_and_comes_back_in_another_place(sidecar: Sidecar) -> None:
    cache = torch.arange(BLOCKS * PAGE, dtype=torch.uint8).view(BLOCKS, PAGE)
    worker = WorkerHalf(sidecar.path, RANK, HostDevice())
    worker.lend([place(cache)])
    client = OffloadClient(sidecar.path, EngineLayout("run-1", "tiny", [FULL]), Timeouts(lookup_s=5.0))
    assert client.wait_connected(LONG_S)
    before, name = cache[3].clone(), b"n" * 32
    assert client.step([make_offer("r", [name], range(4), [3])])
    assert until(lambda: client.poll(0.1).steps)[0].stored == 1
    hit = client.lookup("r", [name])
    assert client.load("r", hit, pack_int32([6]), 1)
    assert until(lambda: client.poll(0.1).loads)[0].blocks == 1
    assert torch.equal(cache[6], before)
    assert worker.take_back()
    worker.lend_again()
    assert worker.client is not None
    assert worker.client.wait_connected(LONG_S)
    assert worker.take_back()
    assert worker.take_back(), "there is nothing left to take back"
    client.close()
