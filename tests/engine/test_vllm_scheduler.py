"""The connector's scheduler half: what is offered when, what is loaded, and that every block is given back once."""

import pytest
from engine.vllm_toy import FULL, UNIT, WINDOW, Pool, Request, ToyVllm

from kvevents_service.engine.offers import make_offer
from kvevents_service.wire.control import GroupSpec

PROMPT = list(range(20))


def used(pool: Pool) -> int:
    return sum(block.ref_cnt > 0 for block in pool.blocks)


def stored(vllm: ToyVllm) -> int:
    return len(vllm.client.core.pool.index[0])


def evict(vllm: ToyVllm) -> None:
    """The engine's own cache forgets everything."""
    vllm.client.end_copies()
    vllm.half.collect()
    assert vllm.pool.reset()


def serve(vllm: ToyVllm, request_id: str, prompt: list[int], more: int = 1) -> int:
    """From arrival to its end; returns its cached tokens."""
    vllm.add(request_id, prompt, more)
    for _ in range(60):
        vllm.client.end_copies()
        vllm.step()
        if request_id not in vllm.requests:
            break
    assert request_id not in vllm.requests
    vllm.step()
    vllm.client.end_copies()
    vllm.step()
    return vllm.cached[request_id]


BIG = GroupSpec(0, "full_attention", 8)


def evicted() -> ToyVllm:
    """PROMPT was served and stored; the engine itself has forgotten it."""
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT)
    evict(vllm)
    return vllm


def loading() -> ToyVllm:
    """And it has come again: its load is under way."""
    vllm = evicted()
    vllm.add("again", PROMPT)
    vllm.step()
    return vllm


# offers


def test_blocks_are_offered_when_their_step_has_been_reported() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT, 8)
    vllm.schedule()
    vllm.schedule()
    assert not vllm.client.copies.pending
    vllm.run()
    vllm.schedule()
    assert len(vllm.client.copies.pending) == 1
    assert vllm.client.copies.pending[0].blocks == 4


def test_a_step_that_one_rank_has_not_reported_offers_nothing() -> None:
    vllm = ToyVllm(lag=2)
    vllm.add("r", PROMPT, 8)
    vllm.step()
    vllm.step()
    assert not vllm.client.copies.pending
    vllm.step()
    vllm.step()
    assert vllm.client.copies.pending


def test_one_message_a_step_at_most() -> None:
    vllm = ToyVllm()
    for name in "abc":
        vllm.add(name, [ord(name), *PROMPT], 8)
    vllm.step()
    before = vllm.client._ids
    vllm.schedule()
    assert len(vllm.client._open) == 1
    assert vllm.client._ids - before == 1


def test_offered_blocks_are_held_until_the_sidecar_is_done() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT[:16], 0)
    vllm.step()
    vllm.step()
    assert "r" not in vllm.requests
    vllm.step()
    assert used(vllm.pool) == 4
    assert vllm.half.busy
    vllm.client.end_copies()
    vllm.step()
    assert used(vllm.pool) == 0
    assert not vllm.half.busy


def test_what_a_request_began_with_is_offered_in_its_second_step() -> None:
    vllm = ToyVllm()
    vllm.client.away = True
    serve(vllm, "r", PROMPT)
    vllm.client.away = False
    vllm.client.connect()
    vllm.add("again", PROMPT[:18], 1)
    vllm.step()
    vllm.schedule()
    assert vllm.cached["again"] == 16
    assert vllm.client.copies.pending[0].blocks == 4


def test_a_request_that_ends_before_its_report_is_held_and_stored() -> None:
    vllm = ToyVllm(lag=1)
    vllm.add("r", PROMPT[:16], 0)
    vllm.step()
    assert "r" not in vllm.requests
    assert used(vllm.pool) == 4
    assert vllm.half.busy
    vllm.drain()
    assert stored(vllm) == 4


def ended_in_flight(blocks: int = 41) -> ToyVllm:
    """The request "r" has ended, a step of it runs, and its first four blocks are being copied."""
    vllm = ToyVllm(blocks=blocks, lag=1)
    vllm.add("r", PROMPT[:16], 2)
    for _ in range(3):
        vllm.step()
    assert "r" not in vllm.requests
    assert vllm.client.copies.pending[0].blocks == 4
    return vllm


def test_a_request_may_be_preempted_and_aborted_before_its_step_ends() -> None:
    vllm = ToyVllm(lag=1)
    vllm.add("r", PROMPT, 0)
    vllm.schedule(1)
    vllm.preempt("r")
    vllm.abort("r")
    vllm.drain()


@pytest.mark.parametrize("length", [3, 4])
def test_an_id_may_be_used_again_while_a_step_of_its_first_request_runs(length: int) -> None:
    vllm = ToyVllm((FULL, WINDOW), lag=1)
    vllm.add("r", PROMPT[:4], 0)
    vllm.schedule()
    vllm.run()
    assert "r" not in vllm.requests
    vllm.add("r", PROMPT[:length], 0)
    vllm.drain()
    assert stored(vllm) == (length == 4)


def test_what_was_offered_before_an_end_is_held_once() -> None:
    vllm = ended_in_flight()
    assert [block.ref_cnt for block in vllm.pool.blocks if block.ref_cnt] == [1] * 5
    vllm.drain()
    assert stored(vllm) == 4


def test_a_step_that_is_lost_while_its_request_ends_is_not_offered_again() -> None:
    vllm = ended_in_flight()
    vllm.client.end_copy(good=False)
    vllm.half.collect()
    assert used(vllm.pool) == 1
    vllm.drain()
    assert stored(vllm) == 0


def test_stores_that_have_ended_are_looked_for_now_and_then() -> None:
    vllm = ToyVllm(blocks=200, batch=3)
    vllm.add("r", PROMPT[:16], 40)
    while not vllm.client.copies.pending:
        vllm.step()
    vllm.client.end_copies()
    held = []
    for _ in range(4):
        held.append(vllm.half.planner.book.held_blocks)
        vllm.step()
    assert held == [4, 4, 4, 1]
    vllm.drain()


def test_many_held_blocks_are_looked_for_in_every_step() -> None:
    vllm = ToyVllm(blocks=15)
    vllm.add("r", PROMPT[:16], 20)
    for _ in range(2):
        vllm.step()
    vllm.client.end_copies()
    assert vllm.half.planner.book.held_blocks == 4
    vllm.step()
    assert vllm.half.planner.book.held_blocks == 0
    vllm.drain()


def test_held_blocks_are_looked_for_when_the_engine_runs_out_of_others() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT[:16], 20)
    for _ in range(2):
        vllm.step()
    vllm.client.end_copies()
    taken = [vllm.pool.allocate() for _ in range(27)]
    vllm.step()
    assert vllm.half.planner.book.held_blocks == 0
    vllm.pool.free_blocks(taken)
    vllm.drain()


def test_ends_of_requests_are_told_with_the_next_offer() -> None:
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT[:16], 0)
    sent = vllm.client._ids
    vllm.add("other", PROMPT[:3], 0)
    vllm.drain()
    assert vllm.client._ids == sent, "nothing to offer"
    serve(vllm, "third", [40 + token for token in PROMPT], 0)
    assert not vllm.half.planner._finished[1:]


def test_an_aborted_request_offers_only_what_was_computed() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT, 8)
    vllm.step(8)
    vllm.schedule(8)
    vllm.abort("r")
    vllm.run()
    vllm.drain()
    assert stored(vllm) == 2


def test_a_preempted_request_is_offered_again_from_its_new_blocks() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT, 8)
    vllm.step()
    vllm.preempt("r")
    evict(vllm)
    vllm.drain()
    assert stored(vllm) == 7


def test_what_a_running_step_writes_is_not_found_by_name() -> None:
    vllm = ToyVllm((FULL, WINDOW))
    vllm.add("r", list(range(40)), 2)
    vllm.schedule(12)
    vllm.schedule(12)
    vllm.run()
    vllm.schedule(12)
    vllm.drain()
    assert stored(vllm) == 10


def test_the_sidecar_comes_back_and_gets_all_of_a_running_request() -> None:
    vllm = ToyVllm()
    vllm.add("r", PROMPT, 60)
    vllm.client.away = True
    for _ in range(4):
        vllm.step()
    vllm.client.away = False
    vllm.client.connect()
    vllm.step()
    vllm.step()
    assert vllm.client.copies.pending[0].blocks == 5


def test_a_sidecar_that_was_never_there_changes_nothing() -> None:
    vllm = ToyVllm()
    vllm.client.away = True
    assert serve(vllm, "r", PROMPT) == 0
    evict(vllm)
    assert serve(vllm, "again", PROMPT) == 0
    vllm.drain()


# loads


def test_a_hit_is_loaded_into_blocks_and_verified() -> None:
    vllm = evicted()
    assert serve(vllm, "again", PROMPT) == 16
    vllm.drain()


def test_a_hit_goes_on_where_the_engines_own_prefix_ends() -> None:
    vllm = evicted()
    vllm.client.away = True
    serve(vllm, "short", PROMPT[:9])
    vllm.client.away = False
    assert serve(vllm, "again", PROMPT) == 16
    assert vllm.half.loads.counters["loaded_tokens"] == 8


def test_a_failed_load_is_computed_and_not_asked_for_again() -> None:
    vllm = loading()
    vllm.client.end_copy(good=False)
    vllm.drain()
    assert vllm.half.loads.counters["loads"] == 1
    assert vllm.half.loads.counters["loads_failed"] == 1


def test_the_death_of_the_sidecar_ends_a_load() -> None:
    vllm = loading()
    vllm.client.connect()
    vllm.drain()
    assert vllm.half.loads.counters["loads_failed"] == 1


def test_a_load_that_takes_too_long_is_computed_in_other_blocks() -> None:
    vllm = loading()
    vllm.clock.advance(11.0)
    for _ in range(6):
        vllm.step()
    assert "again" not in vllm.requests
    assert vllm.half.loads.counters["loads_late"] == 1
    assert used(vllm.pool) >= 4, "the sidecar may still write to these"
    vllm.drain()


def test_a_request_that_is_aborted_while_it_is_loaded_leaves_nothing() -> None:
    vllm = loading()
    vllm.abort("again")
    vllm.client.end_copy(good=False)
    vllm.drain()
    assert not vllm.half.loads._missed
    assert not vllm.half.loads.under_way


def test_a_request_may_ask_not_to_be_served_from_a_cache() -> None:
    vllm = evicted()
    request = vllm.add("again", PROMPT)
    request.skip_reading_prefix_cache = True  # and so it is not asked for, or released
    vllm.step()
    assert vllm.cached["again"] == 0


def test_an_unaligned_prefix_of_the_engine_is_no_hit() -> None:
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT)
    request = vllm.add("again", PROMPT)
    assert vllm.half.find(request, 6) == 0
    assert vllm.half.find(request, 4) == 12


def test_a_hit_is_asked_for_once_while_its_lease_holds() -> None:
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT)
    request = vllm.add("again", PROMPT)
    asked = [vllm.half.find(request, 0) for _ in range(3)]
    before = vllm.client._ids
    vllm.clock.advance(6.0)
    assert [*asked, vllm.half.find(request, 0)] == [16] * 4
    assert vllm.client._ids == before + 1


# early lookups


def asked(vllm: ToyVllm) -> int:
    """Lookups that were sent since the last time."""
    count, vllm.client.counters["toy_lookups"] = vllm.client.counters["toy_lookups"], 0
    return count


def test_a_prompt_is_looked_up_when_it_arrives_and_not_again() -> None:
    vllm = evicted()
    asked(vllm)
    request = vllm.add("again", PROMPT)
    assert asked(vllm) == 1
    assert vllm.half.find(request, 0) == 16
    assert asked(vllm) == 0
    vllm.abort("again")
    vllm.drain()


def test_what_the_engine_has_of_it_itself_needs_no_second_lookup() -> None:
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT)
    asked(vllm)
    request = vllm.add("again", PROMPT)
    assert vllm.half.find(request, 16) == 0
    assert asked(vllm) == 1
    vllm.drain()


def test_behind_a_shorter_prefix_of_the_engine_it_is_looked_up_again() -> None:
    vllm = ToyVllm()
    serve(vllm, "r", PROMPT)
    asked(vllm)
    request = vllm.add("again", PROMPT)
    assert vllm.half.find(request, 8) == 8
    assert asked(vllm) == 2
    vllm.drain()


def test_windows_are_looked_up_from_where_the_engines_prefix_ends() -> None:
    """The tier lacks the window's block before that place: a prefix from token 0 could not be served."""
    vllm = ToyVllm((FULL, WINDOW))
    request = Request("r", PROMPT, 1)
    for group, numbers in ((0, (0, 1, 2)), (1, (2,))):
        for number in numbers:
            block, name = 1 + number + 3 * group, request.block_hashes[number]
            vllm.pool.content[block] = (group, name)
            parent = request.block_hashes[number - 1] if number else None
            tokens = PROMPT[number * UNIT : (number + 1) * UNIT]
            vllm.client.step([make_offer("r", [name], tokens, [block], group=group, parent=parent)], (), ())
            vllm.client.end_copies()
    vllm.half.arrive(request)
    assert vllm.half.find(request, 8) == 4
    vllm.half.loads.forget("r")
    vllm.drain()


def test_an_early_answer_is_void_after_a_reset() -> None:
    vllm = evicted()
    request = vllm.add("again", PROMPT)
    vllm.half.reset()
    assert vllm.half.find(request, 0) == 0
    vllm.drain()


def test_an_early_answer_that_has_become_old_is_asked_for_anew() -> None:
    vllm = evicted()
    request = vllm.add("again", PROMPT)
    asked(vllm)
    vllm.clock.advance(6.0)
    assert vllm.half.find(request, 0) == 16
    assert asked(vllm) == 1
    vllm.drain()


def test_a_long_queue_is_not_asked_for_all_at_once() -> None:
    vllm = ToyVllm()
    vllm.client.shows_names = False
    for number in range(100):
        vllm.add(f"r{number}", [number, *PROMPT])
    assert asked(vllm) == 2, "these fill the next step"
    vllm.half.loads.ask_more()
    assert asked(vllm) == 62


def test_prompts_behind_a_whole_step_are_asked_for_with_the_step_or_when_their_turn_comes() -> None:
    vllm = ToyVllm()
    vllm.client.shows_names = False
    requests = [vllm.add(f"r{number}", PROMPT) for number in range(4)]
    assert asked(vllm) == 2
    assert vllm.half.find(requests[2], 0) == 0
    assert asked(vllm) == 2
    vllm.add("r4", PROMPT)
    assert asked(vllm) == 0
    vllm.abort("r4")
    vllm.step()
    assert asked(vllm) == 0
    vllm.drain()


def test_a_miss_is_not_asked_for_in_every_step() -> None:
    vllm = ToyVllm()
    vllm.client.shows_names = False
    request = vllm.add("r", PROMPT)
    asked(vllm)
    for _ in range(3):
        vllm.clock.advance(0.03)
        assert vllm.half.find(request, 0) == 0
    assert asked(vllm) == 0
    vllm.clock.advance(0.2)
    assert vllm.half.find(request, 0) == 0
    assert asked(vllm) == 1


def test_what_the_sidecar_has_not_it_is_not_asked_for() -> None:
    vllm = ToyVllm()
    request = vllm.add("r", PROMPT)
    assert vllm.half.find(request, 0) == 0
    assert asked(vllm) == 0
    assert vllm.half.loads.counters["lookups_spared"] == 1
    vllm.drain()


def test_nor_for_what_would_be_behind_the_engines_own_blocks() -> None:
    vllm = evicted()
    request = vllm.add("longer", [*PROMPT[:16], *range(900, 920)])
    assert asked(vllm) == 1, "it has the first block"
    assert vllm.half.find(request, 16) == 0
    assert asked(vllm) == 0
    assert vllm.half.find(request, 8) == 8, "the ones between it has"
    vllm.drain()


def test_a_prompt_without_a_whole_block_is_asked_for_as_ever() -> None:
    vllm = ToyVllm((BIG,))
    request = vllm.add("r", PROMPT[:6])
    assert vllm.half.find(request, 0) == 0
    assert asked(vllm) == 1
    vllm.drain()


# reset


def test_a_reset_forgets_the_tier() -> None:
    vllm = evicted()
    assert vllm.half.reset()
    assert serve(vllm, "again", PROMPT) == 0


def test_a_reset_while_the_sidecar_is_away_is_made_up_for() -> None:
    vllm = evicted()
    vllm.client.away = True
    assert vllm.half.reset()
    assert vllm.client.counters["toy_recalls"], "what was posted may reach a sidecar that knows of no reset"
    vllm.client.away = False
    assert serve(vllm, "again", PROMPT) == 0
    assert stored(vllm) == 5


def test_a_load_under_way_at_a_reset_is_of_no_use() -> None:
    vllm = loading()
    vllm.client.away = True  # it hangs: the load goes on, and the reset is not heard
    vllm.half.reset()
    vllm.client.away = False
    vllm.drain()
    assert vllm.half.loads.counters["loads"] == 1
    assert vllm.half.loads.counters["loaded_tokens"] == 0


# lazy


def test_lazy_blocks_are_stored_when_they_are_about_to_be_reused() -> None:
    vllm = ToyVllm(blocks=24, lazy=True)
    serve(vllm, "r", PROMPT)
    serve(vllm, "other", [40 + token for token in PROMPT])
    serve(vllm, "third", [80 + token for token in PROMPT])
    evict(vllm)
    assert serve(vllm, "again", PROMPT) == 16
    vllm.drain()


@pytest.mark.parametrize("lazy", [False, True])
def test_its_name_says_what_is_going_on(lazy: bool) -> None:
    vllm = ToyVllm(lazy=lazy)
    vllm.add("r", PROMPT, 8)
    vllm.step()
    assert "1 requests" in repr(vllm.half)


# several steps at once


def test_several_steps_are_one_message_and_one_look() -> None:
    vllm = ToyVllm(blocks=200, batch=8)
    vllm.add("r", PROMPT, 30)
    sent = []
    for _ in range(16):
        sent.append(vllm.client._ids)
        vllm.step()
    assert len(set(sent[1:9])) == 1, "nothing is said in between"
    assert [job.blocks for job in vllm.client.copies.pending] == [6]
    vllm.drain()
    assert stored(vllm) == 12


def test_what_a_request_computed_since_the_last_message_is_held_from_its_end_on_and_stored() -> None:
    vllm = ToyVllm(batch=8)
    vllm.add("other", [50, 51, 52], 12)
    vllm.step()
    vllm.add("r", PROMPT[:16], 0)
    vllm.step()
    assert "r" not in vllm.requests
    assert [vllm.pool.blocks[block].ref_cnt for block in range(2, 6)] == [1] * 4
    vllm.drain()
    assert stored(vllm) == 4 + 3


def test_what_is_preempted_between_two_messages_is_not_offered_from_its_old_blocks() -> None:
    vllm = ToyVllm(batch=8)
    vllm.add("other", [50, 51, 52], 2)
    vllm.step()
    vllm.add("r", PROMPT, 8)
    vllm.step()
    assert vllm.half._books.noted
    vllm.preempt("r")
    vllm.schedule()
    assert [list(job.engine_blocks) for job in vllm.client.copies.pending] == [[1]], "the other one's"
    assert not vllm.half._books.noted
    vllm.drain()
    assert stored(vllm) == 7 + 1


def test_where_no_empty_steps_follow_the_last_step_says_what_is_left() -> None:
    vllm = ToyVllm(batch=8, last_steps=True)
    vllm.add("r", PROMPT[:16], 0)
    vllm.add("longer", [40, *PROMPT[:15]], 1)
    vllm.step()
    assert not vllm.client.copies.pending
    vllm.step()
    assert not vllm.requests
    assert sum(job.blocks for job in vllm.client.copies.pending) == 8
    vllm.client.end_copies()
    assert vllm.half.reset()
    assert used(vllm.pool) == 0, "a reset takes in what has ended"


def ended_with_stores(vllm: ToyVllm) -> int:
    """A request has ended in a step that told of it, and its copies with it: how many blocks are held."""
    vllm.add("r", PROMPT[:16], 60)
    while not vllm.client.copies.pending:
        vllm.step()
    vllm.abort("r")
    vllm.client.end_copies()
    return vllm.half.planner.book.held_blocks


def test_a_prompt_that_finds_no_room_is_reason_to_look_for_ended_stores() -> None:
    vllm = ToyVllm(blocks=41, batch=8)
    vllm.add("other", [50, 51, 52], 30)
    held = ended_with_stores(vllm)
    assert held > 0
    vllm.step()
    assert vllm.half.planner.book.held_blocks == held
    vllm.half.arrive(Request("long", list(range(150)), 1))
    vllm.step()
    assert vllm.half.planner.book.held_blocks < held


def test_blocks_that_their_request_holds_too_are_not_looked_for() -> None:
    vllm = ToyVllm(blocks=41, batch=8)
    vllm.add("r", PROMPT[:16], 60)
    while not vllm.client.copies.pending:
        vllm.step()
    vllm.client.end_copies()
    held = vllm.half.planner.book.held_blocks
    vllm.half.arrive(Request("long", list(range(150)), 1))
    vllm.step()
    assert vllm.half.planner.book.held_blocks == held > 0


def test_it_looks_for_ended_stores_at_growing_distances() -> None:
    vllm = ToyVllm(blocks=41, batch=16)
    vllm.add("other", [50, 51, 52], 60)
    vllm.add("r", PROMPT[:16], 60)
    while not vllm.client.copies.pending:
        vllm.step()
    vllm.abort("r")
    vllm.half.arrive(Request("long", list(range(150)), 1))
    looks = []
    for _ in range(12):
        before = vllm.client.counters["toy_polls"]
        vllm.step()
        looks.append(vllm.client.counters["toy_polls"] - before)
    assert looks == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    vllm.abort("other")


def test_what_a_worker_does_to_the_lists_it_is_given_is_not_taken_for_more_blocks() -> None:
    vllm = ToyVllm(blocks=200, batch=8)
    vllm.add("other", [50, 51, 52], 40)
    vllm.step()
    vllm.add("r", PROMPT, 30)
    vllm.drain()
    assert stored(vllm) == 12 + 10
