"""The judges of the soak and the fuzzer: what they must see, they see."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from kvevents_service.items import Batch
from kvevents_service.subscriber import Gap, Resync
from kvevents_service.wire.control import Step
from kvevents_service.wire.events import EventBatch
from tools.fuzz.messages import Keys, Messages, name
from tools.fuzz.mutate import bad_body
from tools.proving.follower import Follower, differences
from tools.proving.process import lag_quantile_s
from tools.soak.verdict import Growth, Sample, lag_faults, memory_faults

MIB = 1 << 20


def samples(slope_mib: float, descriptors: int = 0) -> list[Sample]:
    """A minute, every 2 s. slope_mib: in each second, after a warm-up that grows fast."""
    return [
        Sample(at, 50_000 * at, int((200 + 10 * min(at, 20) + slope_mib * at) * MIB), 0, 50 + descriptors * at)
        for at in range(0, 60, 2)
    ]


def test_memory_that_grows_after_the_warm_up_is_a_fault() -> None:
    assert not memory_faults(Growth.of(samples(0.0)), samples(0.0))
    growth = Growth.of(samples(2.0))
    assert growth is not None
    assert growth.bytes_per_s == pytest.approx(2 * MIB, rel=0.01)
    assert "memory grew by" in memory_faults(growth, samples(2.0))[0]


def test_a_run_that_never_filled_the_tiers_is_not_judged() -> None:
    slow = [sample._replace(blocks=1000) for sample in samples(0.0)]
    assert "run it longer" in memory_faults(Growth.of(slow), slow)[0]


def test_files_left_open_are_a_fault() -> None:
    many = samples(0.0, descriptors=1)
    assert memory_faults(Growth.of(many), many) == ["open files grew from 74 to 108"]


@pytest.mark.parametrize(("lag_s", "control_s", "faults"), [(0.01, 0.0, 0), (0.025, 0.001, 1), (0.025, 0.05, 0)])
def test_lag_is_judged_where_the_machine_is_not_too_busy(lag_s: float, control_s: float, faults: int) -> None:
    assert len(lag_faults(lag_s, control_s)) == faults


def test_a_quantile_of_lag_is_an_edge_of_its_bucket() -> None:
    counts = {"0.001": 90, "0.01": 98, "0.1": 100, "+Inf": 100}
    metrics = {f"kvevents_event_loop_lag_seconds_bucket,le={edge}": float(n) for edge, n in counts.items()}
    assert [lag_quantile_s(metrics, share) for share in (0.5, 0.98, 0.99)] == [0.001, 0.01, 0.1]


def batch(seq: int, *, replayed: bool = False) -> Batch:
    return Batch(b"", seq, EventBatch(0.0, []), (), replayed)


def test_a_number_left_out_without_a_word_is_a_hole() -> None:
    follower = Follower()
    for item in (batch(0), batch(1), batch(3)):
        follower.take(item)
    assert follower.faults() == ["1 numbers left out without a word"]


def test_a_gap_is_made_good_by_the_whole_state() -> None:
    follower = Follower()
    for item in (batch(0), Gap(1, 5), batch(5)):
        follower.take(item)
    assert follower.faults() == ["a gap that was never made good"]
    for item in (Resync(6, 9), batch(9, replayed=True), batch(9, replayed=True), batch(10)):
        follower.take(item)
    assert follower.faults() == []


def test_a_block_too_many_is_a_difference() -> None:
    cpu = ("CPU", 0)
    assert differences({cpu: {1, 2}}, {cpu: {1, 2}}) == []
    assert differences({cpu: {1, 2}}, {cpu: {2, 3}}) == ["('CPU', 0): 1 blocks too many, 1 too few"]
    assert differences({}, {cpu: {2}}) == ["('CPU', 0): 0 blocks too many, 1 too few"]


# the inputs


def test_a_seed_makes_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        random = Random(seed)
        messages = Messages(random)
        return [bad_body(messages.any(), random) for _ in range(500)]

    assert inputs(1) == inputs(1) != inputs(2)


def test_two_hashes_that_readers_take_for_one_are_told_apart() -> None:
    keys, offer = Keys(), Messages(Random(1)).offer()
    first = msgspec.structs.replace(offer, block_hashes=name(1), inner=None)
    changed = msgspec.structs.replace(first, block_hashes=b"?" + name(1)[1:])
    assert keys.agree(Step(1, [first]))
    assert keys.agree(Step(2, [first]))
    assert not keys.agree(Step(3, [changed]))
