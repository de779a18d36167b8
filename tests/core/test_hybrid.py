"""Directed cases of models with windows, chunks and states beside full attention."""

from __future__ import annotations

import msgspec
import pytest

from core.models import UNIT, Groups, groups, with_scratch
from core.prompts import Path, block_at, blocks_of, hashes, offer
from kvevents_service.core.announce import to_event
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.testing import HeldCopies, InstantCopies
from kvevents_service.wire.control import (
    GroupSpec,
    Hit,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Reset,
    Step,
    StepDone,
)
from kvevents_service.wire.events import BlockRemoved, BlockStored
from kvevents_service.wire.packing import pack_int32

PROMPT: Path = (0,) * 12
OTHER: Path = (4,) * 12
FULL2 = ("full_attention", 2)
WINDOW = groups(FULL2, ("sliding_window", 2, 5))  # token T reads T-4 .. T-1: two blocks
STATE = groups(FULL2, ("mamba", 4))
CHUNKS = groups(FULL2, ("chunked_local_attention", 2, 8))
COARSE = groups(("full_attention", 4), ("sliding_window", 2, 5))


def open_tier(model: Groups, capacity: int = 40, **limits: float) -> OffloadScheduler:
    scheduler = OffloadScheduler(TierSpec("CPU", capacity, 32, model, UNIT), Limits(**limits))  # type: ignore[arg-type]
    scheduler.hello(1, 1000)
    return scheduler


def part(group: GroupSpec, first: int, stop: int, path: Path = PROMPT) -> Offer:
    """Logical blocks [first, stop) of a prompt; block n lies in engine block 100 * group + n."""
    return offer(path, [100 * group.index + number for number in range(first, stop)], first, group)


def all_of(group: GroupSpec, path: Path = PROMPT) -> Offer:
    return part(group, 0, blocks_of(path, group), path)


def step(copies: HeldCopies, *offers: Offer, step_id: int = 1) -> list:
    return copies.perform(copies.scheduler.step(1, Step(step_id, list(offers)), 0.0))


def lookup(copies: HeldCopies, units: int = 12, start: int = 0, path: Path = PROMPT) -> Hit:
    return copies.scheduler.lookup(1, Lookup(1, "r", hashes(path[:units], start), 10.0, start * UNIT), 0.0)


def load(copies: HeldCopies, hit: Hit, units: int | None, blocks: int) -> list:
    assert hit.lease_id is not None
    ids = pack_int32(list(range(500, 500 + blocks)))
    return copies.perform(copies.scheduler.load(1, Load(9, "r", hit.lease_id, ids, units), 0.0))


def names(group: GroupSpec, *numbers: int, path: Path = PROMPT) -> list[bytes]:
    return [block_at(path, group, number).block_hash for number in numbers]


def slots(copies: HeldCopies, group: GroupSpec, *numbers: int) -> list[int | None]:
    return [copies.scheduler.pool.slot_of(group.index, name) for name in names(group, *numbers)]


def resident(copies: HeldCopies, group: GroupSpec, path: Path = PROMPT) -> list[int]:
    """Numbers of the logical blocks that can be loaded."""
    ready = set(copies.scheduler.pool.ready_hashes(group.index))
    return [n for n in range(blocks_of(path, group)) if block_at(path, group, n).block_hash in ready]


# lookups


def test_a_hit_needs_only_the_tail_of_the_window() -> None:
    copies = InstantCopies(open_tier(WINDOW))
    assert step(copies, all_of(WINDOW[0]), part(WINDOW[1], 10, 12)) == [StepDone(1, 14, 0, 0)]
    assert lookup(copies).blocks == 12
    assert lookup(copies, 11).blocks == 0  # block 9 is missing


@pytest.mark.parametrize(
    ("missing", "units"),
    [(11, 11), (10, 10), (9, 12), (0, 12)],
)
def test_a_missing_block_of_the_window_shortens_the_hit_to_where_it_is_not_needed(missing: int, units: int) -> None:
    copies = InstantCopies(open_tier(WINDOW))
    present = [part(WINDOW[1], number, number + 1) for number in range(12) if number != missing]
    step(copies, all_of(WINDOW[0]), *present)
    assert lookup(copies).blocks == units


def test_a_shortened_hit_is_whole_blocks_in_every_group() -> None:
    copies = InstantCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), part(COARSE[1], 0, 11))
    assert lookup(copies).blocks == 10
    assert lookup(copies, 11).blocks == 10
    assert lookup(copies, 1).blocks == 0


def test_a_block_of_the_window_that_is_still_being_copied_is_missing() -> None:
    copies = HeldCopies(open_tier(WINDOW))
    step(copies, all_of(WINDOW[0]), part(WINDOW[1], 0, 11))
    step(copies, part(WINDOW[1], 11, 12), step_id=2)
    copies.complete()
    assert lookup(copies).blocks == 11
    copies.complete()
    assert lookup(copies).blocks == 12


def test_a_chain_that_is_shorter_than_the_window_limits_the_hit() -> None:
    copies = InstantCopies(open_tier(WINDOW))
    step(copies, part(WINDOW[0], 0, 7), all_of(WINDOW[1]))
    assert lookup(copies).blocks == 7


def test_a_window_wider_than_the_prompt_needs_all_of_it() -> None:
    model = groups(FULL2, ("sliding_window", 2, 100))
    copies = InstantCopies(open_tier(model))
    step(copies, all_of(model[0]), part(model[1], 1, 12))
    assert lookup(copies).blocks == 0
    step(copies, part(model[1], 0, 1), step_id=2)
    assert lookup(copies).blocks == 12


def test_a_state_at_one_boundary_limits_the_hit_to_it() -> None:
    copies = InstantCopies(open_tier(STATE))
    step(copies, all_of(STATE[0]), part(STATE[1], 2, 3))
    assert lookup(copies).blocks == 6
    assert lookup(copies, 7).blocks == 6
    assert lookup(copies, 5).blocks == 0


def test_the_last_of_two_states_wins() -> None:
    copies = InstantCopies(open_tier(STATE))
    step(copies, all_of(STATE[0]), part(STATE[1], 1, 2), part(STATE[1], 4, 5))
    assert [lookup(copies, units).blocks for units in (12, 10, 9, 4, 3)] == [10, 10, 4, 4, 0]


def test_a_hit_at_the_beginning_of_a_chunk_needs_none_of_its_blocks() -> None:
    copies = InstantCopies(open_tier(CHUNKS))
    step(copies, all_of(CHUNKS[0]), part(CHUNKS[1], 4, 6))
    assert [lookup(copies, units).blocks for units in (12, 11, 7, 6, 5, 4, 3)] == [12, 8, 6, 6, 5, 4, 0]


@pytest.mark.parametrize("chain", [11, 12])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_groups_that_serve_different_lengths_agree_on_one_that_all_can(order: tuple[int, ...], chain: int) -> None:
    """The state is there at 10 and 6, the window at 12, 7 and 6, later at 10 too."""
    kinds = [FULL2, ("sliding_window", 2, 4), ("mamba", 4)]
    model = groups(*(kinds[place] for place in order))
    full, window, state = (model[order.index(place)] for place in range(3))
    copies = InstantCopies(open_tier(model))
    states = [part(state, 2, 3), part(state, 4, 5)]
    step(copies, part(full, 0, chain), part(window, 4, 7), part(window, 10, 12), *states)
    assert lookup(copies).blocks == 6
    step(copies, part(window, 8, 10), step_id=2)
    assert lookup(copies).blocks == 10


@pytest.mark.parametrize("chain", [0, 1])
def test_a_group_is_asked_again_when_another_one_serves_less(chain: int) -> None:
    """The window can serve 12 and 6; the chain ends at 11, which the window cannot serve."""
    kinds = [("sliding_window", 2, 4), ("sliding_window", 2, 4)]
    kinds[chain] = FULL2
    model = groups(*kinds)
    copies = InstantCopies(open_tier(model))
    window = model[1 - chain]
    step(copies, part(model[chain], 0, 11), part(window, 4, 6), part(window, 10, 12))
    assert lookup(copies).blocks == 6


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize(
    ("window_blocks", "states", "units"),
    [
        ([3, 4, 10, 11], [4, 10], 5),  # the state rules out 12; then 11 needs a block that 12 did not
        ([0, 1, 2, 8, 9], range(12), 10),  # the window rules out 12, and 11 as well
        ([4, 5, 8, 9, 11], [5, 9, 10], 10),
        ([0, 1, 2, 10, 11], range(11), 3),
        ([10, 11], range(11), 0),
        ([], range(12), 0),
    ],
)
def test_what_one_group_rules_out_is_asked_of_the_others(
    order: tuple[int, ...], window_blocks: list[int], states: list[int], units: int
) -> None:
    kinds = [FULL2, ("sliding_window", 2, 4), ("mamba", 2)]
    model = groups(*(kinds[place] for place in order))
    full, window, state = (model[order.index(place)] for place in range(3))
    copies = InstantCopies(open_tier(model))
    offers = [part(window, number, number + 1) for number in window_blocks]
    offers += [part(state, number, number + 1) for number in states]
    step(copies, all_of(full), *offers)
    assert lookup(copies).blocks == units


def test_a_scratch_group_says_nothing_about_a_hit() -> None:
    model = with_scratch(STATE, 0)
    copies = InstantCopies(open_tier(model))
    done = step(copies, all_of(model[0]), all_of(model[1]), part(model[2], 5, 6))
    assert done == [StepDone(1, 13, 0, 12)]
    assert lookup(copies).blocks == 12


# local prefixes


@pytest.mark.parametrize(("start", "units"), [(0, 12), (1, 0), (2, 10), (3, 0), (10, 2), (11, 0), (12, 0)])
def test_a_local_prefix_that_does_not_end_on_a_block_boundary_gets_no_hit(start: int, units: int) -> None:
    copies = InstantCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), part(COARSE[1], 10, 12))
    assert lookup(copies, start=start).blocks == units


def test_what_is_before_the_local_prefix_ends_is_not_needed() -> None:
    copies = HeldCopies(open_tier(WINDOW))
    step(copies, all_of(WINDOW[0]), part(WINDOW[1], 11, 12))
    copies.complete()
    assert lookup(copies, start=10).blocks == 0
    hit = lookup(copies, start=11)
    assert hit.blocks == 1
    assert load(copies, hit, 1, 2) == []
    wanted = [*slots(copies, WINDOW[0], 11), *slots(copies, WINDOW[1], 11)]
    assert list(copies.pending[0].slots) == wanted


# loads


def test_a_load_copies_the_blocks_that_are_needed_group_after_group() -> None:
    copies = HeldCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), all_of(COARSE[1]))
    copies.complete()
    assert load(copies, lookup(copies), 12, 8) == []
    wanted = [*slots(copies, COARSE[0], 0, 1, 2, 3, 4, 5), *slots(copies, COARSE[1], 10, 11)]
    assert list(copies.pending[0].slots) == wanted
    assert list(copies.pending[0].engine_blocks) == list(range(500, 508))
    assert copies.complete() == [Loaded(9, 12)]


def test_fewer_units_need_another_window() -> None:
    copies = HeldCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), all_of(COARSE[1]))
    copies.complete()
    assert load(copies, lookup(copies), 6, 5) == []
    wanted = [*slots(copies, COARSE[0], 0, 1, 2), *slots(copies, COARSE[1], 4, 5)]
    assert list(copies.pending[0].slots) == wanted
    assert copies.complete() == [Loaded(9, 6)]
    assert copies.scheduler.pool.pinned() == 0


def test_fewer_units_whose_window_is_not_there_are_a_miss() -> None:
    copies = InstantCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), part(COARSE[1], 10, 12))
    assert load(copies, lookup(copies), 6, 5) == [Loaded(9, 0)]
    assert copies.scheduler.stats()["loads_refused"] == 1
    assert copies.scheduler.pool.pinned() == 0


@pytest.mark.parametrize(
    ("units", "blocks"),
    [(12, 7), (12, 9), (12, 0), (14, 9), (11, 7), (11, 8), (5, 4), (5, 5), (0, 0), (-2, 0), (None, 3), (None, 8)],
)
def test_units_and_blocks_that_do_not_fit_are_a_miss(units: int | None, blocks: int) -> None:
    copies = InstantCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), all_of(COARSE[1]))
    assert load(copies, lookup(copies), units, blocks) == [Loaded(9, 0)]
    assert copies.scheduler.pool.pinned() == 0


def test_where_every_group_takes_every_block_their_number_says_the_units() -> None:
    model = groups(FULL2, ("mla_attention", 4))
    copies = InstantCopies(open_tier(model))
    step(copies, all_of(model[0]), all_of(model[1]))
    assert load(copies, lookup(copies), None, 9) == [Loaded(9, 6)]
    assert load(copies, lookup(copies), None, 8) == [Loaded(9, 0)]


def test_a_window_of_one_token_has_nothing_to_load() -> None:
    model = groups(FULL2, ("sliding_window", 2, 1))
    copies = InstantCopies(open_tier(model))
    step(copies, all_of(model[0]))
    assert load(copies, lookup(copies), 12, 12) == [Loaded(9, 12)]


def test_a_reset_voids_the_window_too() -> None:
    copies = HeldCopies(open_tier(WINDOW))
    step(copies, all_of(WINDOW[0]), all_of(WINDOW[1]))
    copies.complete()
    before, under_way = lookup(copies), lookup(copies)
    load(copies, under_way, 12, 14)
    copies.perform(copies.scheduler.reset(1, Reset(1)))
    assert load(copies, before, 12, 14) == [Loaded(9, 0)]
    assert copies.complete() == [Loaded(9, 0)]
    assert copies.scheduler.pool.free_slots == 40


# eviction


def test_blocks_of_a_window_leave_without_touching_the_chain() -> None:
    copies = InstantCopies(open_tier(WINDOW, capacity=16))
    step(copies, all_of(WINDOW[1]))
    step(copies, part(WINDOW[0], 0, 4), step_id=2)
    step(copies, part(WINDOW[0], 4, 9), step_id=3)
    assert resident(copies, WINDOW[0]) == list(range(9))
    assert len(resident(copies, WINDOW[1])) == 7
    copies.scheduler.pool.check()


def test_a_block_in_the_middle_of_a_window_leaves_by_itself() -> None:
    copies = InstantCopies(open_tier(WINDOW, capacity=4))
    for number in (1, 0, 2):
        step(copies, part(WINDOW[1], number, number + 1))
    step(copies, part(WINDOW[0], 0, 2))
    assert resident(copies, WINDOW[1]) == [0, 2]
    (gone,) = [item for item in copies.published if isinstance(item, RemovedRun)]
    assert (gone.group, list(gone.block_hashes)) == (WINDOW[1], names(WINDOW[1], 1))


def test_a_lease_pins_the_blocks_of_the_window_that_it_needs_and_no_others() -> None:
    copies = InstantCopies(open_tier(WINDOW, capacity=24))
    step(copies, all_of(WINDOW[0]), all_of(WINDOW[1]))
    hit = lookup(copies)
    assert copies.scheduler.pool.pinned() == 1 + 2
    assert step(copies, all_of(WINDOW[0], OTHER), step_id=2) == [StepDone(2, 10, 0, 2)]
    assert resident(copies, WINDOW[0]) == list(range(12))
    assert resident(copies, WINDOW[1]) == [10, 11]
    assert load(copies, hit, 12, 14) == [Loaded(9, 12)]
    assert copies.scheduler.pool.pinned() == 0
    assert step(copies, part(WINDOW[0], 10, 12, OTHER), step_id=3) == [StepDone(3, 2, 0, 0)]


def test_a_load_keeps_what_it_copies_from_leaving() -> None:
    copies = HeldCopies(open_tier(WINDOW, capacity=24))
    step(copies, all_of(WINDOW[0]), all_of(WINDOW[1]))
    copies.complete()
    load(copies, lookup(copies), 6, 8)
    step(copies, all_of(WINDOW[1], OTHER), all_of(WINDOW[0], OTHER), step_id=2)
    assert resident(copies, WINDOW[0]) == list(range(6))
    assert resident(copies, WINDOW[1]) == [4, 5]
    assert copies.complete() == [Loaded(9, 6)]


def test_a_released_lease_leaves_nothing_pinned() -> None:
    copies = InstantCopies(open_tier(STATE))
    step(copies, all_of(STATE[0]), part(STATE[1], 5, 6))
    hit = lookup(copies)
    assert copies.scheduler.pool.pinned() == 2
    copies.scheduler.release(1, Release(hit.lease_id or 0))
    assert copies.scheduler.pool.pinned() == 0


def test_a_window_that_was_looked_up_last_leaves_last() -> None:
    copies = InstantCopies(open_tier(STATE, capacity=4))
    state, chain = STATE[1], STATE[0]
    step(copies, part(chain, 0, 2), part(state, 0, 1), part(state, 0, 1, OTHER))
    copies.scheduler.release(1, Release(lookup(copies, 2).lease_id or 0))
    step(copies, part(state, 1, 2, OTHER), step_id=2)
    assert (resident(copies, state), resident(copies, state, OTHER)) == ([0], [1])


def test_a_window_that_is_offered_again_was_used_now() -> None:
    """As the chain before it is: else the window would leave first, and the chain alone is no hit."""
    copies = InstantCopies(open_tier(STATE, capacity=2))
    state = STATE[1]
    step(copies, part(state, 0, 1))
    step(copies, part(state, 0, 1, OTHER), step_id=2)
    assert step(copies, part(state, 0, 1), step_id=3) == [StepDone(3, 0, 1, 0)]
    step(copies, part(state, 1, 2, OTHER), step_id=4)
    assert (resident(copies, state), resident(copies, state, OTHER)) == ([0], [1])


def test_removals_name_the_group_they_are_of() -> None:
    model = groups(FULL2, ("sliding_window", 2, 5), ("mamba", 2))
    copies = InstantCopies(open_tier(model, capacity=6))
    step(copies, *(part(group, 0, 2) for group in model))
    step(copies, part(model[1], 0, 6, OTHER), step_id=2)
    gone = [to_event(item) for item in copies.published if isinstance(item, RemovedRun)]
    assert all(isinstance(event, BlockRemoved) for event in gone)
    assert [(event.group_idx, len(event.block_hashes)) for event in gone] == [(0, 2), (1, 2), (2, 2)]
    copies.published.clear()
    copies.perform(copies.scheduler.reset(1, Reset(1)))
    assert [(item.group.index, len(item.block_hashes)) for item in copies.published] == [(1, 6)]


# stores


def test_a_hole_in_the_table_shifts_nothing() -> None:
    """Blocks 0, 3 and 4 are null: what is announced has its own tokens, and the parent that the prompt has."""
    copies = InstantCopies(open_tier(WINDOW))
    assert step(copies, part(WINDOW[1], 1, 3), part(WINDOW[1], 5, 7)) == [StepDone(1, 4, 0, 0)]
    first, second = (to_event(item) for item in copies.published)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.token_ids == [2000, 2001, 3000, 3001]
    assert second.token_ids == [6000, 6001, 7000, 7001]
    before = names(WINDOW[1], 4)[0]
    assert second.parent_block_hash == int.from_bytes(before[-8:], "big")
    assert (second.group_idx, second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == (
        1,
        WINDOW[1].kind,
        5,
    )


def test_known_blocks_in_the_middle_cut_a_run_in_two() -> None:
    copies = HeldCopies(open_tier(WINDOW))
    step(copies, part(WINDOW[1], 2, 4))
    copies.complete()
    copies.published.clear()
    step(copies, part(WINDOW[1], 0, 6), step_id=2)
    assert list(copies.pending[0].engine_blocks) == [100, 101, 104, 105]
    assert copies.complete() == [StepDone(2, 4, 2, 0)]
    metas = [item for item in copies.published if isinstance(item, BlockStoreMeta)]
    assert [meta.blocks for meta in metas] == [2, 2]
    assert [meta.parent_block_hash for meta in metas] == [None, *names(WINDOW[1], 3)]


def test_the_parent_of_a_block_of_several_units_is_the_block_before() -> None:
    model = groups(("full_attention", 4), ("mamba", 6))
    copies = InstantCopies(open_tier(model))
    step(copies, all_of(model[0]), part(model[1], 2, 3))
    state = copies.published[-1]
    assert isinstance(state, BlockStoreMeta)
    assert (state.parent_block_hash, state.group.block_size) == (names(model[1], 1)[0], 6)
    assert state.parent_block_hash == block_at(PROMPT, model[0], 2).block_hash


def test_one_hash_lives_in_each_group_by_itself() -> None:
    copies = InstantCopies(open_tier(WINDOW))
    step(copies, all_of(WINDOW[0]), all_of(WINDOW[1]))
    assert names(WINDOW[0], 3) == names(WINDOW[1], 3)
    assert slots(copies, WINDOW[0], 3) != slots(copies, WINDOW[1], 3)


def test_hashes_that_repeat_are_not_stored_where_no_chain_forbids_them() -> None:
    copies = InstantCopies(open_tier(WINDOW))
    step(copies, part(WINDOW[1], 1, 2))
    once = part(WINDOW[1], 0, 3)
    twice = {name: getattr(once, name) * 2 for name in ("block_hashes", "token_ids", "block_ids")}
    assert step(copies, msgspec.structs.replace(once, **twice), step_id=2) == [StepDone(2, 0, 2, 4)]
    assert copies.scheduler.stats()["declined_not_a_chain"] == 4
    copies.scheduler.pool.check()


def test_a_window_stores_what_there_is_room_for() -> None:
    copies = HeldCopies(open_tier(WINDOW, capacity=3))
    step(copies, part(WINDOW[1], 0, 5))
    assert copies.complete() == [StepDone(1, 3, 0, 2)]
    assert copies.scheduler.stats()["declined_no_room"] == 2
    assert resident(copies, WINDOW[1]) == [0, 1, 2]


def test_what_waits_to_be_copied_is_bounded_in_a_window_too() -> None:
    copies = HeldCopies(open_tier(WINDOW, max_pending_blocks=3))
    step(copies, part(WINDOW[1], 0, 3))
    assert step(copies, part(WINDOW[1], 3, 4), step_id=2) == [StepDone(2, 0, 0, 1)]
    assert copies.scheduler.stats()["declined_backlog"] == 1


def test_a_failed_copy_of_a_window_announces_nothing_and_frees_its_slots() -> None:
    copies = HeldCopies(open_tier(WINDOW, capacity=5))
    step(copies, part(WINDOW[1], 0, 5))
    assert copies.fail() == [StepDone(1, 0, 0, 5)]
    assert copies.published == []
    assert copies.scheduler.pool.free_slots == 5


def test_a_block_of_a_window_does_not_wait_for_the_one_before() -> None:
    copies = HeldCopies(open_tier(WINDOW))
    step(copies, part(WINDOW[1], 0, 1))
    step(copies, part(WINDOW[1], 1, 2), step_id=2)
    assert copies.complete(1) == [StepDone(2, 1, 0, 0)]
    assert resident(copies, WINDOW[1]) == [1]


# adapters, salts and images


@pytest.mark.parametrize("root", [1, 2, 3])
def test_an_adapter_or_a_salt_makes_another_prompt_of_the_same_tokens(root: int) -> None:
    """The salt is on the first block only, the adapter on every one, an image on those that show it."""
    path = (root, 0, 1, *PROMPT[3:])
    copies = InstantCopies(open_tier(COARSE))
    step(copies, all_of(COARSE[0]), all_of(COARSE[1]))
    assert lookup(copies, path=path).blocks == 0
    copies.published.clear()
    step(copies, all_of(COARSE[0], path), all_of(COARSE[1], path), step_id=2)
    assert lookup(copies, path=path).blocks == 12
    lora = ("ada",) if root & 1 else ()
    salt = (f"salt {root}",) if root & 2 else ()
    image = (("image", 3),)
    rest = lora or None
    for item, shown in zip(copies.published, (1, 2), strict=True):
        event = to_event(item)
        assert isinstance(event, BlockStored)
        assert (event.lora_id, event.lora_name) == ((7, "ada") if root & 1 else (None, None))
        wanted = [rest] * len(event.block_hashes)
        wanted[0] = (*lora, *salt) or None
        wanted[shown] = (*lora, *image)
        assert event.extra_keys == wanted
        assert event.token_ids[:4] == [1000, 1001, 2000, 2001]
