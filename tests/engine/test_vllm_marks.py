"""What the scheduler half sends waits for the steps that its blocks need, on a sidecar of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine.vllm_toy import FULL
from test_client import LONG_S, Sidecar

from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.offers import make_offer
from kvevents_service.engine.registration import Timeouts
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_marks import MarkingClient
from kvevents_service.engine.vllm_memory import HostDevice
from kvevents_service.engine.vllm_scheduler import Said
from kvevents_service.engine.vllm_worker import Rank, WorkerHalf
from kvevents_service.wire.packing import pack_int32

BLOCKS, PAGE = 8, 64
NAME = b"n" * 32
SOON_S = 0.1


class Marked(HostDevice):
    """A device without events: there a mark says that the bytes are written."""

    behind = True

    def mark(self, step: int) -> bool:
        return True


class Both:
    """Both halves' ends of one sidecar."""

    def __init__(self, path: str) -> None:
        self.cache = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
        self.worker = WorkerHalf(path, Rank("run-1", 0, 1), Marked())
        self.worker.lend([Place("layer", self.cache.untyped_storage(), 0, PAGE, BLOCKS)])
        self.client = MarkingClient(path, EngineLayout("run-1", "tiny", [FULL]), Timeouts(lookup_s=5.0))
        assert self.client.wait_connected(LONG_S)

    def compute(self, step: int) -> None:
        self.worker.said = Said(step, {})
        self.worker.end_step()

    def close(self) -> None:
        self.client.close()
        self.worker.take_back()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    sidecar = Sidecar(tmp_path)
    sidecar.start()
    made = Both(sidecar.path)
    yield made
    made.close()
    sidecar.end()


def test_a_store_waits_for_the_step_that_has_landed_and_a_load_for_the_one_that_was_begun(both: Both) -> None:
    both.client.landed = 5
    assert both.client.step([make_offer("r", [NAME], range(4), [3])])
    assert not both.client.poll(SOON_S).steps, "not computed yet"
    both.cache[3] = 7
    both.compute(5)
    assert both.client.poll(LONG_S).steps[0].stored == 1
    both.client.begun = 6
    assert both.client.load("r", both.client.lookup("r", [NAME]), pack_int32([6]), 1)
    assert not both.client.poll(SOON_S).loads, "step 6 may still use block 6"
    both.cache[6] = 9
    both.compute(6)
    assert both.client.poll(LONG_S).loads[0].blocks == 1
    assert torch.equal(both.cache[6], both.cache[3])


def test_before_the_first_step_nothing_waits(both: Both) -> None:
    assert both.client.step([make_offer("r", [NAME], range(4), [3])])
    assert both.client.poll(LONG_S).steps[0].stored == 1
    assert both.client.load("r", both.client.lookup("r", [NAME]), pack_int32([6]), 1)
    assert both.client.poll(LONG_S).loads[0].blocks == 1


def test_memory_that_is_lent_again_is_as_far_as_it_was(both: Both) -> None:
    both.compute(5)
    assert both.worker.take_back()
    both.worker.lend_again()
    assert both.worker.client is not None
    assert both.worker.client.wait_connected(LONG_S)
    both.client.landed = 5
    assert both.client.step([make_offer("r", [NAME], range(4), [3])])
    assert both.client.poll(LONG_S).steps[0].stored == 1
