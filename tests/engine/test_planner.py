"""The eager planner: what is offered when, verb by verb, and what odd orders of verbs leave behind."""

from array import array

import pytest
from engine.toy import FULL, HYBRID, UNIT, WINDOW, Toy

from kvevents_service.engine.identity import PLAIN, Identity
from kvevents_service.engine.offers import OfferBook, make_offer
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.spans import RequestView
from kvevents_service.wire.control import GroupSpec, StepDone


def settled(toy: Toy) -> bool:
    """Nothing is held or referenced any more."""
    return not (any(toy.references) or toy.book.held_blocks or toy.promised)


# confirmed, and once


def test_confirmed_blocks_are_offered_once() -> None:
    toy = Toy()
    life = toy.start("r", 40)
    assert toy.blocks_of() == []
    toy.compute(life, 18)
    assert toy.blocks_of() == [("r", 0, [0, 1, 2, 3])]
    toy.compute(life, 19)
    assert toy.blocks_of() == []
    toy.compute(life, 28)
    assert toy.blocks_of() == [("r", 0, [4, 5, 6])]


def test_tokens_of_the_running_step_are_never_offered() -> None:
    toy = Toy()
    life = toy.start("r", 40)
    toy.compute(life, 8)
    life.tables[0] += [toy.allocate(), toy.allocate()]  # scheduled, not computed
    toy.planner.confirm("r", 8, computed=16)
    assert toy.blocks_of() == [("r", 0, [0, 1])]


def test_blocks_without_a_hash_wait_for_it() -> None:
    toy = Toy()
    life = toy.start("r", 16)
    unit_hashes = life.view.unit_hashes
    assert isinstance(unit_hashes, list)
    late = unit_hashes.pop()
    toy.planner.confirm("r", 16)
    life.tables[0] += [toy.allocate() for _ in range(4)]
    for number in range(3):
        toy._fill(life, FULL, number)
    assert toy.blocks_of() == [("r", 0, [0, 1, 2])]
    unit_hashes.append(late)
    toy._fill(life, FULL, 3)
    assert toy.blocks_of() == [("r", 0, [3])]


def test_a_hit_counts_as_confirmed_from_its_start() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 40), 40)
    assert [said.blocks for said in toy.send()[0]] == [range(10)]


def test_each_group_has_blocks_and_names_of_its_own() -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 40), 24)
    assert sorted(toy.blocks_of()) == [
        ("r", 0, [0, 1, 2, 3, 4, 5]),
        ("r", 1, [0, 1, 2]),
        *[("r", 2, [number]) for number in range(3)],
    ]


def test_scratch_groups_are_never_offered() -> None:
    toy = Toy((FULL, GroupSpec(1, "full_attention", 4, None, False)))
    toy.compute(toy.start("r", 16), 16)
    toy.finish("r")
    assert toy.blocks_of() == [("r", 0, [0, 1, 2, 3])]


# null blocks


def test_null_blocks_are_skipped_and_shift_nothing() -> None:
    toy = Toy((FULL, WINDOW), find=False)
    life = toy.start("r", 48)
    toy.compute(life, 48)
    for number in (0, 3):
        toy.drop(life, 1, number)
    assert toy.blocks_of()[1:] == [("r", 1, [1, 2]), ("r", 1, [4, 5])]


def test_the_retained_tail_of_a_window_is_found_by_its_hash() -> None:
    toy = Toy((FULL, WINDOW))
    life = toy.start("r", 48)
    toy.compute(life, 48, trim=True)
    assert life.tables[1][:4] == [None] * 4
    assert toy.blocks_of()[1:] == [("r", 1, [0, 1, 2, 3, 4, 5])]
    assert toy.planner.counts.recovered == 4


def test_a_block_that_left_the_window_and_was_reused_is_not_offered() -> None:
    toy = Toy((FULL, WINDOW), blocks=18)
    life = toy.start("r", 48)
    toy.compute(life, 48)
    stale = list(life.tables[1][:4])
    for number in range(4):
        toy.drop(life, 1, number)
    life.tables[1][:4] = stale  # the adapter was not told
    assert len({toy.allocate() for _ in range(2)} & set(stale)) == 2
    assert toy.blocks_of()[1:] == [("r", 1, [2, 3, 4, 5])]


def test_a_window_that_running_steps_have_moved_on_is_not_trusted() -> None:
    toy = Toy((FULL, WINDOW))
    life = toy.start("r", 48)
    toy.compute(life, 24)
    for number in range(3):
        block = life.tables[1][number]
        assert block is not None
        toy.content[block] = None  # freed and reused meanwhile
        toy.cached = {content: at for content, at in toy.cached.items() if at != block}
    toy.planner.confirm("r", 24, computed=48)
    assert toy.blocks_of() == [("r", 0, [0, 1, 2, 3, 4, 5])]


# room


def test_what_does_not_fit_is_offered_next_time() -> None:
    toy = Toy(HYBRID, room=5)
    toy.compute(toy.start("r", 32), 32, hand_off=False)
    offered = []
    for step in range(4):
        offered += toy.blocks_of()
        toy.end(step)
    assert sorted(block for _, group, blocks in offered for block in blocks if group == 0) == list(range(8))
    assert sorted(block for _, group, blocks in offered for block in blocks if group == 1) == list(range(4))
    assert toy.blocks_of() == []


def test_no_room_at_all_is_no_offer() -> None:
    toy = Toy(room=2)
    toy.compute(toy.start("r", 32), 32)
    assert [toy.blocks_of(), toy.blocks_of()] == [[("r", 0, [0, 1])], []]
    toy.end(0)
    toy.end(1)
    assert toy.blocks_of() == [("r", 0, [2, 3])]


# the end


def test_what_was_not_offered_at_the_end_goes_out_in_the_next_step() -> None:
    toy = Toy(HYBRID, blocks=40)
    toy.compute(toy.start("r", 32), 32)
    toy.finish("r")
    for _ in range(len(toy.queue)):  # everything that is free is reused
        toy.allocate()
    said, step = toy.send()
    assert {(each.group, block) for each in said for block in each.blocks} == {
        *((0, block) for block in range(8)),
        *((group, block) for group in (1, 2) for block in range(4)),
    }
    assert step.finished == ["r"]
    toy.end(0)
    assert toy.book.held_blocks == 0


def test_what_does_not_fit_at_the_end_is_counted() -> None:
    toy = Toy(room=3)
    toy.compute(toy.start("r", 32), 32)
    toy.finish("r")
    assert toy.planner.counts.skipped == 5
    assert toy.blocks_of() == [("r", 0, [0, 1, 2])]
    toy.end(0)
    assert settled(toy)


def test_abort_before_the_first_schedule_is_told_and_nothing_else() -> None:
    toy = Toy()
    toy.finish("never seen")
    said, step = toy.send()
    assert (said, step.finished) == ([], ["never seen"])
    toy.end(0)
    assert toy.planner.plan().empty


def test_finish_while_a_load_is_pending_offers_nothing() -> None:
    toy = Toy()
    life = toy.start("r", 32)
    life.tables[0] += [toy.allocate() for _ in range(8)]  # being loaded
    toy.finish("r")
    assert toy.blocks_of() == []
    toy.end(0)
    assert settled(toy)


def test_finish_while_a_store_is_pending_holds_its_blocks_to_the_end() -> None:
    toy = Toy(blocks=8)
    toy.compute(toy.start("r", 32), 32)
    assert len(toy.blocks_of()) == 1
    toy.finish("r")
    assert len(toy.queue) == 0
    toy.send()
    toy.end(1)
    assert len(toy.queue) == 0
    toy.end(0)
    assert settled(toy)


# preemption


def test_a_preempted_request_is_offered_from_its_start_with_its_new_blocks() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 32), 32)
    (first,), _ = toy.send()
    toy.preempt("r")
    _, step = toy.send()
    assert step.preempted == ["r"]
    assert all(toy.references[block] == 1 for block in first.block_ids)
    toy.compute(toy.start("r", 32), 16)
    (again,), _ = toy.send()
    assert (again.blocks, set(again.block_ids) & set(first.block_ids)) == (range(4), set())
    toy.end(0, declined=3)  # of the life before: no reason to offer this one again
    assert toy.blocks_of() == []


def test_what_was_not_offered_before_a_preemption_is_not_offered() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 32), 32)
    toy.preempt("r")
    assert toy.blocks_of() == []
    assert not any(toy.references)


def test_a_request_that_ends_while_it_waits_again_is_only_told() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 32), 32)
    toy.preempt("r")
    toy.finish("r")
    said, step = toy.send()
    assert (said, step.finished, step.preempted) == ([], ["r"], ["r"])


# ids and adapters


def test_a_reused_id_is_another_request() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 32), 32)
    toy.send()
    toy.finish("r")
    toy.compute(toy.start("r", range(100, 116)), 16)
    assert toy.blocks_of() == [("r", 0, [0, 1, 2, 3])]
    toy.end(0, declined=8)
    assert toy.blocks_of() == []
    toy.end(1, declined=1)
    assert toy.blocks_of() == [("r", 0, [0, 1, 2, 3])]


def test_an_id_that_comes_twice_at_once_is_the_later_one() -> None:
    toy = Toy()
    old = toy.start("r", 32)
    toy.compute(old, 32)
    toy.compute(toy.start("r", range(100, 108)), 8)
    assert toy.blocks_of() == [("r", 0, [0, 1])]
    toy.finish("r")
    toy.free(old.held())
    toy.send()
    for step in (0, 1):
        toy.end(step)
    assert settled(toy)


def test_another_adapter_under_the_same_id_is_said_to_be_another() -> None:
    toy = Toy()
    for number, identity in enumerate([Identity(1, "a"), Identity(2, "b", "salt"), PLAIN]):
        toy.compute(toy.start("r", 16, identity), 16)
        _, step = toy.send()
        (offer,) = step.offers
        assert (offer.lora_id, offer.lora_name) == identity[:2]
        keys = [("a",), ("b",), None][number]
        assert offer.extra_keys == (None if keys is None else [("b", "salt") if number else keys, keys, keys, keys])
        toy.preempt("r")


# lost and declined


def test_a_declined_step_is_offered_again_from_the_start_after_longer_and_longer_rests() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 32), 32)
    rests = []
    for _ in range(9):
        plans = 1
        while not toy.blocks_of():
            plans += 1
        rests.append(plans)
        toy.end(toy.steps - 1, declined=1)
    assert rests == [1, 1, 2, 4, 8, 16, 32, 64, 64]


def test_a_step_that_is_stored_whole_ends_the_rests() -> None:
    toy = Toy()
    life = toy.start("r", 64)
    for tokens, declined in ((16, 1), (16, 1), (16, 1), (16, 0), (32, 1)):
        toy.compute(life, tokens)
        while not toy.blocks_of():
            pass
        toy.end(toy.steps - 1, declined=declined)
    assert toy.blocks_of() == [("r", 0, [*range(8)])]


def test_steps_that_were_under_way_when_one_is_declined_are_one_loss() -> None:
    toy = Toy()
    life = toy.start("r", 32)
    for tokens in (8, 16, 24):
        toy.compute(life, tokens)
        toy.send()
    for step in range(3):
        toy.end(step, declined=1)
    assert toy.blocks_of() == [("r", 0, [*range(6)])]


def test_a_step_that_was_lost_with_its_link_is_offered_again() -> None:
    toy = Toy()
    toy.compute(toy.start("r", 16), 16)
    first = toy.blocks_of()
    toy.settle(StepDone(0, 0, 0, 0))
    assert toy.blocks_of() == first
    toy.settle(StepDone(1, 1, 3, 0))
    assert toy.blocks_of() == []


def test_a_dropped_step_is_offered_again() -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 32), 32)
    dropped = sorted(toy.blocks_of(dropped=True))
    assert toy.book.held_blocks == 0
    assert sorted(toy.blocks_of()) == dropped


def test_the_last_blocks_of_a_request_are_given_back_when_their_step_is_dropped() -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 32), 32)
    toy.finish("r")
    toy.send(dropped=True)
    assert settled(toy)
    assert toy.blocks_of() == []


def test_a_new_sidecar_is_offered_everything_at_once() -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 32), 32)
    first = sorted(toy.blocks_of())
    toy.planner.settle([StepDone(0, 0, 0, 0)])  # the link was lost
    toy.promised.clear()
    toy.blocks_of()
    toy.end(1, declined=1)
    toy.planner.offer_all_again()
    assert sorted(toy.blocks_of()) == first


# reset


def test_after_a_reset_a_request_is_offered_only_when_it_is_admitted_again() -> None:
    toy = Toy(HYBRID)
    life = toy.start("r", 64)
    toy.compute(life, 16)
    toy.send()
    toy.start("ended", range(100, 116))
    toy.compute(toy.lives["ended"], 16)
    toy.finish("ended")
    toy.planner.reset()
    assert toy.book.held_blocks == len(toy.promised[0])
    toy.compute(life, 32)
    toy.end(0, declined=2)
    said, step = toy.send()
    assert (said, step.finished) == ([], ["ended"])
    toy.end(1)
    toy.preempt("r")
    toy.compute(toy.start("r", 64), 16)
    assert sorted(toy.blocks_of()) == [("r", 0, [0, 1, 2, 3]), ("r", 1, [0, 1]), ("r", 2, [0]), ("r", 2, [1])]
    toy.finish("r")
    toy.send()
    toy.end(2)
    toy.end(3)
    assert settled(toy)


# states


def test_a_state_is_never_offered_by_its_place() -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 32), 32, hand_off=False)
    toy.finish("r")
    assert {group for _, group, _ in toy.blocks_of()} == {0, 1}


def test_a_state_that_is_handed_over_is_held_whatever_becomes_of_its_request() -> None:
    toy = Toy(HYBRID, blocks=40)
    life = toy.start("r", 32)
    toy.compute(life, 8)
    toy.send()
    toy.compute(life, 16)
    toy.preempt("r")
    for _ in range(len(toy.queue)):
        toy.allocate()
    assert toy.blocks_of() == [("r", 2, [1])]


def test_a_state_of_tokens_that_are_not_confirmed_waits_and_is_found_by_its_hash() -> None:
    toy = Toy(HYBRID)
    life = toy.start("r", 32)
    toy.compute(life, 8, hand_off=False)
    life.tables[2] += [toy.allocate()]
    toy.planner.hand_off("r", 2, 16, life.tables[2][1] or 0)
    assert {group for _, group, _ in toy.blocks_of()} == {0, 1}
    toy.compute(life, 16, hand_off=False)
    assert ("r", 2, [1]) in toy.blocks_of()
    assert toy.blocks_of() == []


def test_states_without_room_are_found_later() -> None:
    toy = Toy(HYBRID, room=1)
    toy.compute(toy.start("r", 24), 24)
    states = []
    for step in range(14):
        states += [blocks for _, group, blocks in toy.blocks_of() if group == 2]
        toy.end(step)
    assert sorted(states) == [[0], [1], [2]]


@pytest.mark.parametrize("boundary", [0, 3, 6])
def test_a_state_that_does_not_end_where_a_hash_unit_does_is_counted(boundary: int) -> None:
    toy = Toy(HYBRID)
    toy.compute(toy.start("r", 32), 16, hand_off=False)
    toy.planner.hand_off("r", 2, boundary, 0)
    toy.planner.hand_off("nobody", 2, 8, 0)
    assert toy.planner.counts.dropped_hand_offs == 2
    assert {group for _, group, _ in toy.blocks_of()} == {0, 1}


# cost


class Tokens(array):  # type: ignore[type-arg]
    """Token ids that may be sliced, never walked."""

    def __getitem__(self, place: object) -> "Tokens":
        assert isinstance(place, slice)
        return Tokens("i", super().__getitem__(place).tobytes())

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("a Python object for each token")


def test_no_token_becomes_an_object() -> None:
    view = RequestView(
        "r", [bytes([unit]) * 32 for unit in range(64)], Tokens("i", array("i", range(256)).tobytes())
    )
    planner = EagerPlanner((FULL,), UNIT, OfferBook(list, list, 64))
    planner.admit(view, [list(range(64))])
    planner.confirm("r", 256)
    (offer,) = planner.plan().offers()
    assert offer.token_ids == array("i", range(256)).tobytes()
    with pytest.raises(OverflowError):
        make_offer("r", [], [2**31], [])


@pytest.mark.parametrize(("held", "taken"), [([3, 4, 5, 6], 4), ([3, 4, 5, 6, 7], 4), ([3, 4, 6], 0), ([], 0)])
def test_blocks_that_are_held_for_an_ended_request_are_taken_over(held: list[int], taken: int) -> None:
    touched: list[int] = []
    book = OfferBook(touched.extend, list, 64)
    planner = EagerPlanner((FULL,), UNIT, book)
    planner.admit(RequestView("r", [bytes([unit]) * 32 for unit in range(4)], range(4 * UNIT)), [[3, 4, 5, 6, 7]])
    assert planner.finish("r", 4 * UNIT, 4 * UNIT, held) == taken
    assert touched == ([] if taken else [3, 4, 5, 6])
    assert book.held_blocks == 4


@pytest.mark.parametrize("rewritten", [False, True])
def test_offers_of_buffers_that_may_be_rewritten_are_made_at_once(rewritten: bool) -> None:
    tokens, hashes = list(range(2 * UNIT)), [b"a" * 32, b"b" * 32]
    planner = EagerPlanner((FULL,), UNIT, OfferBook(list, list, 64))
    planner.admit(RequestView("r", hashes, tokens, rewritten=rewritten), [[3, 4]])
    planner.confirm("r", 2 * UNIT)
    plan = planner.plan()
    hashes[:], tokens[:] = [b"c" * 32, b"d" * 32], [9] * 2 * UNIT
    (offer,) = plan.offers()
    assert offer.block_hashes == (b"a" * 32 + b"b" * 32 if rewritten else b"c" * 32 + b"d" * 32)
