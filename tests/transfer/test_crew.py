"""A crew does every job, side by side, and is done with all of them when it says so."""

import os
import threading

import pytest

from kvevents_service.transfer.crew import Crew, Hand

DEADLINE_S = 30


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_job_is_done_once(threads: int) -> None:
    crew, done = Crew(threads), list[int]()
    crew.perform([lambda number=number: done.append(number) for number in range(7)])
    assert sorted(done) == list(range(7))
    crew.close()


def test_jobs_run_side_by_side() -> None:
    crew, meeting = Crew(3), threading.Barrier(3)

    def meet() -> None:
        meeting.wait(DEADLINE_S)

    crew.perform([meet] * 3)
    crew.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_when_no_job_runs_any_more(failing: int) -> None:
    crew, started, go, ended = Crew(2), threading.Event(), threading.Event(), list[str]()

    def fail() -> None:
        assert started.wait(DEADLINE_S)
        threading.Timer(0.05, go.set).start()
        raise OSError("broken")

    def slow() -> None:
        started.set()
        assert go.wait(DEADLINE_S)
        ended.append("slow")

    with pytest.raises(OSError, match="broken"):
        crew.perform([fail, slow] if failing == 0 else [slow, fail])
    assert ended == ["slow"]
    crew.close()


def test_a_hand_does_jobs_in_order_and_tells_what_became_of_each() -> None:
    hand, done = Hand("hand"), list[int]()

    def fail() -> None:
        raise OSError("broken")

    futures = [hand.submit(done.append, 1), hand.submit(fail), hand.submit(done.append, 2)]
    assert futures[2].result(DEADLINE_S) is None
    assert str(futures[1].exception(0)) == "broken"
    assert done == [1, 2]
    assert hand.close()
    with pytest.raises(RuntimeError):
        hand.submit(done.append, 3)


def test_a_hand_yields_to_the_loop() -> None:
    hand = Hand("yielding")
    assert hand.submit(os.getpriority, os.PRIO_PROCESS, 0).result(DEADLINE_S) > os.getpriority(os.PRIO_PROCESS, 0)
    assert hand.submit(os.sched_getscheduler, 0).result(DEADLINE_S) == os.SCHED_BATCH
    assert hand.close(DEADLINE_S)


def test_a_hand_works_where_it_may_not_change_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    hand = Hand("sandboxed")
    assert hand.submit(int, "7").result(DEADLINE_S) == 7
    assert hand.close(DEADLINE_S)


def test_a_hand_that_hangs_is_left_alone_and_what_is_behind_it_never_begins() -> None:
    hand, begun, go, done = Hand("hand"), threading.Event(), threading.Event(), list[int]()

    def hang() -> bool:
        begun.set()
        return go.wait(DEADLINE_S)

    hanging, behind = hand.submit(hang), hand.submit(done.append, 1)
    assert begun.wait(DEADLINE_S)  # what has not begun is cancelled
    assert not hand.close(0.05)
    assert behind.cancelled()
    go.set()
    assert hanging.result(DEADLINE_S)
    assert hand.close(DEADLINE_S)
    assert done == []


def test_a_hand_may_be_closed_behind_all_that_is_queued() -> None:
    hand, go, done = Hand("hand"), threading.Event(), list[int]()
    hand.submit(go.wait, DEADLINE_S)
    for number in range(3):
        hand.submit(done.append, number)
    threading.Timer(0.05, go.set).start()
    assert hand.close(DEADLINE_S, cancel=False)
    assert done == [0, 1, 2]


def test_a_hand_that_never_had_a_job_is_closed_at_once() -> None:
    assert Hand("hand").close()
