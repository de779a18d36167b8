"""Copies by direction and tier: how many, how long, how old, how many bytes."""

from array import array

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.service.copy_meter import CopyMeter, Route
from kvevents_service.testing import ManualClock

STORE, LOAD = Route("store", "CPU"), Route("load", "CPU")


def transfer(kind: str, blocks: int = 2) -> TransferMeta:
    slots = array("i", range(blocks))
    return TransferMeta(1, kind, 1, 1, slots, slots, 30.0)


def test_a_copy_is_timed_from_its_decision_to_its_end() -> None:
    clock = ManualClock(100.0)
    meter = CopyMeter(clock)
    store, load = transfer("store"), transfer("load", 3)
    meter.begin(store, "CPU")
    clock.advance(1.0)
    meter.begin(load, "CPU")
    clock.advance(0.5)
    assert (meter.oldest_s, meter.pending(STORE), meter.pending(LOAD)) == (1.5, 1, 1)
    meter.end(store, 10, good=True)
    assert (meter.oldest_s, meter.pending(STORE)) == (0.5, 0)
    clock.advance(0.25)
    meter.end(load, 10, good=True)
    assert meter.oldest_s == 0.0
    assert (meter.traffic[STORE].bytes, meter.traffic[STORE].seconds.total_s) == (20, 1.5)
    assert (meter.traffic[LOAD].bytes, meter.traffic[LOAD].seconds.total_s) == (30, 0.75)


def test_a_failed_copy_moves_nothing_and_is_counted() -> None:
    meter = CopyMeter(ManualClock())
    store = transfer("store")
    meter.begin(store, "CPU")
    meter.end(store, 10, good=False)
    traffic = meter.traffic[STORE]
    assert (traffic.bytes, traffic.failed, traffic.seconds.count) == (0, 1, 1)


def test_tiers_are_apart() -> None:
    meter = CopyMeter(ManualClock())
    meter.begin(transfer("store"), "CPU")
    meter.begin(transfer("store"), "STORAGE")
    assert [meter.pending(route) for route in meter.traffic] == [1, 1]
