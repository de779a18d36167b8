"""The worker half: what it reports is computed, and a sidecar copies a rank's bytes out and back, in place."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.vllm_toy import FULL
from test_client import LONG_S, Sidecar

from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.offers import make_offer
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_loads import LoadEnd
from kvevents_service.engine.vllm_scheduler import Said
from kvevents_service.engine.vllm_worker import Rank, WorkerHalf
from kvevents_service.wire.packing import pack_int32

RANK = Rank("run-1", 0, 1)
BLOCKS, PAGE = 8, 64


class Mark:
    """An event of a device, done when it is told so."""

    done = False

    def query(self) -> bool:
        return self.done


def test_where_steps_end_before_they_return_each_is_computed_at_once() -> None:
    worker = WorkerHalf("/nowhere", RANK, None)
    assert worker.report() < 0
    worker.said = Said(5, {})
    worker.computed()
    assert worker.report() == 5


def test_on_a_device_a_step_is_computed_when_its_event_and_all_before_it_are_done() -> None:
    marks = [Mark(), Mark(), Mark()]
    given: Any = iter(marks)
    worker = WorkerHalf("/nowhere", RANK, lambda: next(given))
    for step in (1, 2, 3):
        worker.said = Said(step, {})
        worker.computed()
    marks[1].done = True
    assert worker.report() < 0
    marks[0].done = True
    assert worker.report() == 2
    marks[2].done = True
    assert worker.report() == 3


def test_ends_of_loads_are_passed_on() -> None:
    worker = WorkerHalf("/nowhere", RANK, None)
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
    worker = WorkerHalf(sidecar.path, RANK, None)
    worker.lend([Place("layer", cache.untyped_storage(), 0, PAGE, BLOCKS)])
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
