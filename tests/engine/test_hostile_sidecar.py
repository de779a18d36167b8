"""Whatever a sidecar says, the step loop goes on: nothing is raised, every request ends, every block comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine.hostile import ANSWERS, Answer, HostileSidecar, hits_that_never_load, silent, unknown_numbers
from engine.vllm_toy import FULL, UNIT, WINDOW, ToyVllm

from kvevents_service.core.groups import check_groups
from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.engine.vllm_stats import METRICS, StatsReader
from kvevents_service.wire.control import GroupSpec

PATIENT = Timeouts(lookup_s=20.0)
QUICK = Timeouts(lookup_s=0.02, send_s=0.01, hello_s=0.1, redial_s=0.01)
LONG_S = 20.0
STEPS = 60
Serve = Callable[[Answer], HostileSidecar]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    made: list[HostileSidecar] = []

    def start(answer: Answer) -> HostileSidecar:
        made.append(HostileSidecar(tmp_path / "engine.sock", answer))
        return made[0]

    yield start
    for each in made:
        each.stop()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def engine(path: Path, *groups: GroupSpec, lazy: bool = False, timeouts: Timeouts = QUICK) -> ToyVllm:
    layout = EngineLayout("toy", "toy", check_groups(groups, UNIT), hash_tokens=UNIT)
    return ToyVllm(groups, lazy=lazy, client=OffloadClient(str(path / "engine.sock"), layout, timeouts))


def play(vllm: ToyVllm) -> None:
    """Requests of all kinds come and go. Every one ends: by its last token, or aborted in the middle."""
    for number in range(8):
        vllm.add(f"r{number}", range(number % 3, number % 3 + 17), 3)
        vllm.step()
        if number == 4:
            vllm.abort("r4")
        if number == 6:
            vllm.preempt("r6")
    for _ in range(STEPS):
        if not vllm.requests and not vllm.loading:
            return
        vllm.clock.advance(1.0)
        vllm.step()
    raise AssertionError(f"still there: {[*vllm.requests, *vllm.loading]}")


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
@pytest.mark.parametrize(("groups", "lazy"), [((FULL,), False), ((FULL, WINDOW), True)], ids=["eager", "lazy"])
def test_requests_end_and_blocks_come_back(
    serve: Serve, tmp_path: Path, answer: Answer, groups: tuple[GroupSpec, ...], lazy: bool
) -> None:
    sidecar = serve(answer)
    vllm = engine(tmp_path, *groups, lazy=lazy)
    half = vllm.half
    reader = StatsReader(half, vllm.clock)
    half.client.wait_connected(0.3)
    play(vllm)
    vllm.pool.reset()
    half.reset(0.05)
    values = reader.read()
    assert values is None or values.keys() == {metric.name for metric in METRICS}
    sidecar.stop()
    until(lambda: half.collect() is None and not half._under_way)
    assert not any(block.ref_cnt for block in vllm.pool.blocks)
    assert not half.planner.book.held_blocks
    assert not half._under_way
    half.close()


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_a_rank_marks_and_leaves(serve: Serve, tmp_path: Path, answer: Answer) -> None:
    sidecar = serve(answer)
    rank = RankClient(str(tmp_path / "engine.sock"), RankLayout("toy", 0, 1, [], []), QUICK)
    rank.wait_connected(0.3)
    for number in range(200):
        rank.mark(number)
    assert rank._keeper.is_alive()
    sidecar.stop()
    assert rank.close(LONG_S)
    assert not rank._keeper.is_alive()


def test_an_end_that_nobody_waits_for_is_not_counted(serve: Serve, tmp_path: Path) -> None:
    sidecar = serve(unknown_numbers)
    vllm = engine(tmp_path, FULL, timeouts=PATIENT)
    assert vllm.half.client.wait_connected(LONG_S)
    play(vllm)
    until(lambda: vllm.step() and not vllm.half.planner.book.held_blocks)
    assert vllm.half.stored_blocks == 0
    assert 0 < vllm.half.declined_blocks < 100
    sidecar.stop()
    vllm.half.close()


def test_while_a_load_is_late_nothing_more_is_loaded(serve: Serve, tmp_path: Path) -> None:
    """Or a sidecar whose copies hang would get hold of every block, one request after another."""
    sidecar = serve(hits_that_never_load)
    vllm = engine(tmp_path, FULL, timeouts=PATIENT)
    assert vllm.half.client.wait_connected(LONG_S)
    for number in range(12):
        vllm.add(f"r{number}", range(number * 50, number * 50 + 17), 1)
        for _ in range(6):
            vllm.clock.advance(6.0)
            vllm.step()
        assert f"r{number}" not in vllm.requests
    assert vllm.half.loads.counters["loads"] == 1
    assert vllm.half.loads.counters["loads_late"] == 1
    sidecar.stop()
    vllm.half.close()


def test_a_sidecar_that_has_fallen_silent_gets_hold_of_nothing_more(serve: Serve, tmp_path: Path) -> None:
    """Its process may have been stopped: what it holds then stays held, and the engine needs the rest."""
    sidecar = serve(silent)
    vllm = engine(tmp_path, FULL)
    assert vllm.half.client.wait_connected(LONG_S)
    vllm.add("looked up in vain", range(17), 1)
    while vllm.requests:
        vllm.step()
    vllm.step()
    assert vllm.half.client.counters["deadlines_missed"] == 1
    assert vllm.half.planner.book.held_blocks == 0
    assert vllm.half.client.counters["steps_dropped"] > 0
    sidecar.stop()
    vllm.half.close()
