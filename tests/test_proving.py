"""The judges of the soak and the fuzzer: what they must see, they see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from peers import peer, take

from kvevents_service.items import Batch
from kvevents_service.subscriber import Gap, Resync
from kvevents_service.wire.control import Inspected, Step
from kvevents_service.wire.events import AllBlocksCleared, Event, EventBatch
from kvevents_service.wire.frames import live_frames
from tools.fuzz.messages import Keys, Messages, name
from tools.fuzz.mutate import bad_body
from tools.proving.follower import Follower, Observer, differences, level
from tools.proving.process import LogLine, SidecarProcess, lag_quantile_s
from tools.soak.numbers import Numbers
from tools.soak.verdict import (
    Growth,
    Sample,
    lag_faults,
    log_faults,
    memory_faults,
    rate_faults,
    reader_faults,
)

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


@pytest.mark.parametrize(("reached", "faults"), [(20_500.0, 0), (18_000.0, 0), (17_900.0, 1)])
def test_a_rate_far_below_what_was_asked_for_is_a_fault(reached: float, faults: int) -> None:
    assert len(rate_faults(reached, 20_000.0)) == faults


def reader(*faults: str, folds: bool = True, late: bool = False) -> dict[str, Any]:
    return {"folds": folds, "late_by_replay": late, "faults": list(faults)}


def test_what_a_reader_found_is_a_fault_of_the_soak() -> None:
    good = [reader(), reader(late=True), reader(folds=False)]
    assert reader_faults(good, 3) == []
    assert reader_faults([*good, reader("3 holes", folds=False)], 4) == ["reader 3: 3 holes"]
    assert reader_faults(good, 4) == ["3 of 4 readers told how they got on"]


@pytest.mark.parametrize("readers", [[reader(late=True), reader(folds=False)], [reader(), reader()]])
def test_too_few_folds_are_a_fault(readers: list[dict[str, Any]]) -> None:
    assert "folded all" in reader_faults(readers, 2)[0]


def test_a_warning_of_the_sidecar_is_a_fault_with_its_text() -> None:
    lines = [
        LogLine("info", "fine"),
        LogLine("warning", "a copy failed"),
        LogLine("error", "no", error="Traceback"),
    ]
    assert log_faults(lines) == ["log: warning: a copy failed ", "log: error: no Traceback"]


def test_what_is_no_line_of_the_log_counts_as_an_error(tmp_path: Path) -> None:
    sidecar = SidecarProcess.__new__(SidecarProcess)
    sidecar.log = tmp_path / "log"
    sidecar.log.write_bytes(b'{"level": "info", "message": "ready"}\nSegmentation fault\n')
    assert sidecar.log_lines("error") == [LogLine("error", "Segmentation fault")]


@pytest.mark.parametrize(("lag_s", "control_s", "faults"), [(0.01, 0.0, 0), (0.025, 0.001, 1), (0.025, 0.05, 0)])
def test_lag_is_judged_where_the_machine_is_not_too_busy(lag_s: float, control_s: float, faults: int) -> None:
    assert len(lag_faults(lag_s, control_s)) == faults


def test_a_quantile_of_lag_is_an_edge_of_its_bucket() -> None:
    counts = {"0.001": 90, "0.01": 98, "0.1": 100, "+Inf": 100}
    metrics = {f"kvevents_event_loop_lag_seconds_bucket,le={edge}": float(n) for edge, n in counts.items()}
    assert [lag_quantile_s(metrics, share) for share in (0.5, 0.98, 0.99)] == [0.001, 0.01, 0.1]


def batch(seq: int, *, replayed: bool = False, events: Sequence[Event] = ()) -> Batch:
    return Batch(b"", seq, EventBatch(0.0, list(events)), (), replayed)


class Books(Observer):
    """A sidecar's books, one answer after the other: at these numbers, with so many copies under way."""

    def __init__(self, *answers: tuple[int, int]) -> None:
        self.answers = list(answers)

    def inspect(self, *, residents: bool = True) -> Inspected:
        next_seq, copies = self.answers.pop(0)
        return Inspected(1, next_seq, 8, {"copies": copies})


async def test_books_are_held_against_no_fold_that_knows_more() -> None:
    follower = Follower()
    for item in (batch(4), batch(5, events=[AllBlocksCleared()]), batch(6)):
        follower.take(item)
    books = Books((5, 1), (5, 0), (6, 0), (9, 0))
    inspected = await level(books, follower, 10.0)
    assert inspected is not None
    assert inspected.next_seq == 6, "behind the last event; heartbeats are no events"
    assert await level(books, follower, 0.1) is None, "it never reaches 9"


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


async def test_a_state_told_in_many_batches_of_one_number_is_reached_at_its_end() -> None:
    follower = Follower()

    async def tell() -> None:
        follower.take(Resync(0, 9))
        for _ in range(8):
            follower.take(batch(8, replayed=True))
            await asyncio.sleep(0.02)

    telling = asyncio.create_task(tell())
    await asyncio.sleep(0)
    assert await follower.reach(9, 10.0)
    assert follower.batches == 8
    await telling
    assert not await follower.reach(10, 0.0)


async def test_a_reader_of_numbers_alone_fills_a_loss_by_replay_and_decodes_nothing() -> None:
    async with peer() as publisher, Numbers(publisher.source()) as numbers:
        await publisher.subscribed()
        publisher.send(1)
        publisher.lose(2)
        publisher.send(1)
        items = await take(numbers, 4)
        assert [item.seq for item in items if isinstance(item, Batch)] == [0, 1, 2, 3]
        assert all(item.payload and not item.batch.events for item in items if isinstance(item, Batch))


async def test_a_reader_of_numbers_alone_sees_what_is_no_batch() -> None:
    async with peer() as publisher, Numbers(publisher.source()) as numbers:
        await publisher.subscribed()
        publisher.xpub.send_multipart(live_frames(b"", 0, b"no batch"))
        follower = Follower()
        follower.take((await take(numbers, 1))[0])
        assert follower.faults() == ["1 batches that are none"]


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
