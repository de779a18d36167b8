"""Blocks that running requests lend for their copies: who holds them when the request lets go (I9)."""

from __future__ import annotations

import pytest
from engine.vllm_toy import FULL, WINDOW, ToyVllm

PROMPT = range(16)


def references(vllm: ToyVllm) -> list[int]:
    """Of the blocks of the open steps' copies."""
    return [vllm.pool.blocks[block].ref_cnt for promises in vllm.client._open.values() for block, _ in promises]


@pytest.fixture
def vllm() -> ToyVllm:
    """Four blocks of request `r`, which goes on, are being copied."""
    made = ToyVllm()
    made.add("r", PROMPT, 20)
    made.step()
    made.schedule()
    return made


def test_a_running_request_holds_its_blocks_itself(vllm: ToyVllm) -> None:
    assert references(vllm) == [1] * 4
    assert vllm.half.planner.book.held_blocks == 4, "they may have to be held any time"
    vllm.client.end_copies()
    vllm.half.collect()
    assert vllm.half.planner.book.held_blocks == 0
    vllm.drain()


def test_one_that_ends_before_its_copies_leaves_them_to_us(vllm: ToyVllm) -> None:
    vllm.run()
    vllm.abort("r")
    assert references(vllm) == [1] * 4
    vllm.drain()


def test_before_one_is_preempted_all_are_held(vllm: ToyVllm) -> None:
    vllm.half.secure()
    assert references(vllm) == [2] * 4
    vllm.half.secure()
    assert references(vllm) == [2] * 4, "once"
    vllm.run()
    vllm.preempt("r")
    assert references(vllm) == [1] * 4
    vllm.drain()


def test_after_a_reset_of_running_requests_no_step_runs_before_the_copies_end(vllm: ToyVllm) -> None:
    vllm.run()
    vllm.preempt("r", asked=False)
    assert references(vllm) == [0] * 4
    vllm.schedule()
    assert not vllm.client.copies.pending
    assert vllm.client.counters["toy_recalls"] == 0, "nothing was reset"
    vllm.drain()


def test_or_before_all_that_is_stored_is_void(vllm: ToyVllm) -> None:
    vllm.client.sluggish = True
    vllm.run()
    vllm.preempt("r", asked=False)
    vllm.schedule()
    assert vllm.client.copies.pending
    vllm.client.end_copies()
    assert not vllm.client.core.tier.counters["blocks_stored"], "what was copied meanwhile is not kept"
    assert not vllm.half.planner.book.held_blocks
    vllm.drain()


def test_a_reset_that_is_not_answered_leaves_what_is_copied_to_us(vllm: ToyVllm) -> None:
    vllm.client.sluggish = vllm.client.deaf = True
    assert not vllm.half.reset()
    assert references(vllm) == [2] * 4
    vllm.run()
    vllm.abort("r")
    vllm.schedule()
    assert references(vllm) == [1] * 4
    vllm.client.deaf = False
    vllm.drain()


def test_no_load_is_begun_into_what_is_being_copied() -> None:
    """A reset of running requests has given it away, and the step that must wait is not there yet."""
    vllm = ToyVllm(blocks=9)
    vllm.add("short", range(100, 109))
    for _ in range(3):
        vllm.step()
        vllm.client.end_copies()
    vllm.pool.reset()
    vllm.add("r", PROMPT, 4)
    vllm.step()
    vllm.schedule()
    vllm.run()
    copied = [block for promises in vllm.client._open.values() for block, _ in promises]
    assert len(copied) == 4
    vllm.preempt("r", asked=False)
    vllm.pool.reset()
    vllm.pool.queue = dict.fromkeys([vllm.pool.blocks[block] for block in copied] + list(vllm.pool.queue))
    vllm.add("again", range(100, 109), 4)
    vllm.waiting.reverse()
    vllm.schedule()
    assert vllm.half.loads.counters["loads_failed"] == 1
    assert not vllm.client._loads
    vllm.client.end_copies()
    vllm.drain()


def test_what_has_been_copied_by_now_is_not_taken_over(vllm: ToyVllm) -> None:
    vllm.client.end_copies()
    vllm.half.secure()
    assert all(block.ref_cnt == 1 for block in vllm.pool.blocks if block.ref_cnt)
    vllm.drain()


def test_a_preemption_of_others_waits_for_nothing(vllm: ToyVllm) -> None:
    vllm.client.end_copies()
    vllm.run()
    vllm.schedule()
    vllm.run()
    vllm.add("other", range(100, 103), 5)
    vllm.step()
    polls = vllm.client.counters["toy_long_polls"]
    vllm.preempt("other", asked=False)
    vllm.step()
    assert vllm.client.counters["toy_long_polls"] == polls
    vllm.drain()


def test_a_vllm_that_may_not_ask_has_every_block_held_at_once() -> None:
    vllm = ToyVllm(lent=False)
    vllm.add("r", PROMPT, 4)
    vllm.step()
    vllm.schedule()
    assert references(vllm) == [2] * 4
    vllm.drain()


def test_a_session_and_what_windows_have_left_are_held_at_once() -> None:
    session = ToyVllm()
    session.add("r", PROMPT, 20).resumable = True
    session.step()
    session.schedule()
    assert references(session) == [2] * 4
    windowed = ToyVllm((FULL, WINDOW))
    windowed.add("r", PROMPT, 20)
    windowed.step()
    windowed.schedule()
    assert set(references(windowed)) == {1, 2}, "those that the window has left are ours alone"
