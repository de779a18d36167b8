"""Directed inputs that made systems of this kind fail, and the right behaviour of this one."""

from __future__ import annotations

import msgspec
import pytest

from kvevents_service.core.commands import Copy, Publish, Reply
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun
from kvevents_service.core.offers import DECLINE_REASONS
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.errors import ControlError
from kvevents_service.testing import Chain, HeldCopies, InstantCopies, make_chain
from kvevents_service.wire.control import (
    GroupSpec,
    Hit,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from kvevents_service.wire.packing import pack_int32

ONE = (GroupSpec(0, "full_attention", 2),)
TWO = (*ONE, GroupSpec(1, "mla_attention", 2))
ABCD = make_chain(range(8), 2)
EF = make_chain(range(50, 54), 2)


def open_tier(capacity: int = 4, groups: tuple[GroupSpec, ...] = ONE, **limits: float) -> OffloadScheduler:
    scheduler = OffloadScheduler(TierSpec("CPU", capacity, 32, groups, groups[0].block_size), Limits(**limits))  # type: ignore[arg-type]
    scheduler.hello(1, 100)
    scheduler.hello(2, 100)
    return scheduler


def step(copies: HeldCopies, *offers: Offer, step_id: int = 1, session_id: int = 1) -> list:
    return copies.perform(copies.scheduler.step(session_id, Step(step_id, list(offers)), 0.0))


def store(copies: HeldCopies, chain: Chain, *, step_id: int = 1, session_id: int = 1) -> list:
    return step(copies, chain.offer(range(len(chain.hashes))), step_id=step_id, session_id=session_id)


def lookup(scheduler: OffloadScheduler, chain: Chain, *, session_id: int = 1, lease_s: float = 10.0) -> Hit:
    return scheduler.lookup(session_id, Lookup(1, "r", chain.packed, lease_s), 0.0)


def load(copies: HeldCopies, hit: Hit, *block_ids: int, session_id: int = 1) -> list:
    assert hit.lease_id is not None
    return copies.perform(copies.scheduler.load(session_id, Load(9, "r", hit.lease_id, pack_int32(block_ids)), 0.0))


def stored(copies: HeldCopies) -> list[bytes]:
    """Hashes announced as stored, in order."""
    metas = [item for item in copies.published if isinstance(item, BlockStoreMeta)]
    return [meta.hash_at(position) for meta in metas for position in range(meta.blocks)]


def removed(copies: HeldCopies) -> list[bytes]:
    return [name for item in copies.published if isinstance(item, RemovedRun) for name in item.block_hashes]


# stores


def test_a_stored_block_is_announced_when_its_copy_has_ended() -> None:
    copies = HeldCopies(open_tier())
    assert store(copies, ABCD) == []
    assert copies.published == []
    assert copies.complete() == [StepDone(1, 4, 0, 0)]
    assert stored(copies) == list(ABCD.hashes)


def test_a_step_without_news_ends_at_once() -> None:
    copies = InstantCopies(open_tier())
    assert step(copies) == [StepDone(1, 0, 0, 0)]
    store(copies, ABCD)
    assert store(copies, ABCD, step_id=2) == [StepDone(2, 0, 4, 0)]


def test_an_offer_of_no_blocks_stores_nothing() -> None:
    copies = InstantCopies(open_tier())
    assert step(copies, Offer("r", 0, b"", b"", b"")) == [StepDone(1, 0, 0, 0)]


def test_only_the_new_blocks_of_a_known_prompt_are_copied() -> None:
    copies = HeldCopies(open_tier())
    step(copies, ABCD.part(0, 2).offer([10, 11]))
    step(copies, ABCD.offer([10, 11, 12, 13]), step_id=2)
    assert [list(copy.engine_blocks) for copy in copies.pending] == [[10, 11], [12, 13]]


def test_duplicate_request_ids_are_nobodys_problem() -> None:
    copies = InstantCopies(open_tier())
    first = ABCD.offer(range(4), request_id="same")
    second = EF.offer(range(4, 6), request_id="same")
    assert step(copies, first, second) == [StepDone(1, 4, 0, 2)]
    assert step(copies, first, step_id=2, session_id=2) == [StepDone(2, 0, 4, 0)]


def test_two_sessions_that_offer_one_block_store_it_once() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    assert store(copies, ABCD, session_id=2) == [StepDone(1, 0, 4, 0)]
    copies.complete()
    assert stored(copies) == list(ABCD.hashes)


def test_a_prompt_that_leaves_another_within_its_step_is_stored_behind_it() -> None:
    """The parent is in the middle of a run of the same copy: nothing to wait for."""
    copies = InstantCopies(open_tier(8))
    branch = make_chain([9, 9], 2, ABCD.hashes[1])
    assert step(copies, ABCD.offer(range(4)), branch.offer([4])) == [StepDone(1, 5, 0, 0)]
    assert stored(copies) == [*ABCD.hashes, *branch.hashes]


def test_a_copy_that_ends_before_its_parents_is_held_until_that_is_decided() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    store(copies, ABCD.part(2), step_id=2)
    assert copies.complete(1) == []
    assert copies.published == []
    assert copies.complete() == [StepDone(1, 2, 0, 0), StepDone(2, 2, 0, 0)]
    assert stored(copies) == list(ABCD.hashes)


def test_a_store_whose_parents_store_fails_is_dropped() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    store(copies, ABCD.part(2), step_id=2)
    copies.complete(1)
    assert copies.fail() == [StepDone(1, 0, 0, 2), StepDone(2, 0, 0, 2)]
    assert copies.published == []
    assert copies.scheduler.stats()["declined_store_dropped"] == 4
    assert copies.scheduler.pool.free_slots == 4


def test_a_failed_store_can_be_offered_again() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.fail()
    store(copies, ABCD, step_id=2)
    assert copies.complete() == [StepDone(2, 4, 0, 0)]


def test_a_removal_is_announced_before_its_slot_is_rewritten() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    commands = copies.scheduler.step(1, Step(2, [EF.offer([5, 6])]), 0.0)
    assert [type(command) for command in commands] == [Publish, Copy]
    (gone,) = commands[0].announcements
    assert gone.block_hashes == (ABCD.hashes[3], ABCD.hashes[2])


def test_blocks_are_announced_before_their_step_is_done() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    commands = copies.scheduler.complete(copies.pending.pop())
    assert [type(command) for command in commands] == [Publish, Reply]


def test_the_prompt_that_was_looked_up_last_leaves_last() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    store(copies, EF, step_id=2)
    hit = lookup(copies.scheduler, ABCD.part(0, 2))
    assert hit.lease_id is not None
    copies.scheduler.release(1, Release(hit.lease_id))
    store(copies, make_chain([7] * 4, 2), step_id=3)
    assert removed(copies) == list(EF.hashes[::-1])


def test_the_prompt_that_was_offered_last_leaves_last() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    store(copies, EF, step_id=2)
    store(copies, ABCD.part(0, 2), step_id=3)
    store(copies, make_chain([7] * 4, 2), step_id=4)
    assert removed(copies) == list(EF.hashes[::-1])


def test_removals_name_the_group_of_each_block() -> None:
    copies = InstantCopies(open_tier(4, TWO))
    pair = ABCD.part(0, 2)
    step(copies, pair.offer([0, 1]), pair.offer([2, 3], group=1))
    store(copies, make_chain(range(60, 68), 2), step_id=2)
    gone = [item for item in copies.published if isinstance(item, RemovedRun)]
    assert [(run.group.index, run.block_hashes) for run in gone] == [(0, pair.hashes[::-1]), (1, pair.hashes[::-1])]


def test_a_preempted_request_keeps_what_it_is_storing() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.scheduler.step(1, Step(2, [], [], ["r"]), 0.0)
    assert copies.complete() == [StepDone(1, 4, 0, 0)]


def test_metadata_outlives_its_request() -> None:
    copies = HeldCopies(open_tier())
    chain = ABCD.part(1)
    store(copies, ABCD.part(0, 1))
    lora = {"lora_id": 3, "lora_name": "ada", "extra_keys": [("x",), None, ("y", 1)]}
    step(copies, msgspec.structs.replace(chain.offer([7, 8, 9]), **lora), step_id=2)
    copies.scheduler.finish(1, "r")
    copies.scheduler.goodbye(2)
    copies.complete()
    copies.complete()
    meta = copies.published[-1]
    assert isinstance(meta, BlockStoreMeta)
    assert (meta.block_hashes, meta.token_ids) == (chain.packed, pack_int32(chain.token_ids))
    assert (meta.parent_block_hash, meta.lora_id, meta.lora_name) == (ABCD.hashes[0], 3, "ada")
    assert (meta.extra_keys, meta.medium, meta.group) == (lora["extra_keys"], "CPU", ONE[0])


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("bad_lengths", {"token_ids": ABCD.offer([]).token_ids[:-4]}),
        ("bad_lengths", {"block_hashes": ABCD.packed[:-1]}),
        ("bad_lengths", {"block_hashes": ABCD.packed[:-32]}),
        ("bad_lengths", {"extra_keys": [None] * 3}),
        ("bad_hash", {"parent": b"\x01" * 31}),
        ("parent_absent", {"parent": b"\x01" * 32}),
        ("not_a_chain", {"block_hashes": ABCD.hashes[0] * 4}),
    ],
)
def test_what_cannot_be_described_is_counted_and_never_announced(reason: str, fields: dict) -> None:
    copies = InstantCopies(open_tier())
    bad = msgspec.structs.replace(ABCD.offer(range(4)), **fields)
    assert step(copies, bad) == [StepDone(1, 0, 0, 4)]
    assert copies.scheduler.stats()[f"declined_{reason}"] == 4
    assert copies.published == []
    assert copies.scheduler.pool.free_slots == 4


def test_a_scratch_group_is_never_stored() -> None:
    groups = (*ONE, GroupSpec(1, "mamba", 2, None, False))
    copies = InstantCopies(open_tier(4, groups))
    assert step(copies, ABCD.offer(range(4), group=1)) == [StepDone(1, 0, 0, 4)]
    assert copies.scheduler.stats()["declined_scratch_group"] == 4


def test_one_bad_offer_of_a_step_does_not_harm_its_neighbours() -> None:
    copies = InstantCopies(open_tier())
    bad = msgspec.structs.replace(EF.offer([5, 6]), token_ids=b"")
    assert step(copies, bad, ABCD.offer(range(4)), bad) == [StepDone(1, 4, 0, 4)]


def test_a_prompt_larger_than_the_tier_is_stored_as_far_as_it_fits() -> None:
    copies = InstantCopies(open_tier(3))
    assert store(copies, ABCD) == [StepDone(1, 3, 0, 1)]
    assert copies.scheduler.stats()["declined_no_room"] == 1
    assert stored(copies) == list(ABCD.hashes[:3])


def test_what_waits_to_be_copied_is_bounded() -> None:
    copies = HeldCopies(open_tier(8, max_pending_blocks=5))
    store(copies, ABCD)
    assert store(copies, EF, step_id=2) == [StepDone(2, 0, 0, 2)]
    assert copies.scheduler.stats()["declined_backlog"] == 2
    copies.complete()
    assert store(copies, EF, step_id=3) == []


def test_a_block_of_a_step_that_is_impossible_changes_nothing() -> None:
    scheduler = open_tier()
    bad = msgspec.structs.replace(EF.offer([5, 6]), group=1)
    with pytest.raises(ControlError, match="bad_group"):
        scheduler.step(1, Step(1, [ABCD.offer(range(4)), bad]), 0.0)
    assert scheduler.pool.free_slots == 4


@pytest.mark.parametrize("block_id", [-1, 100, 2**31 - 1])
def test_a_block_outside_the_engines_memory_is_refused(block_id: int) -> None:
    with pytest.raises(ControlError, match="bad_block_ids"):
        step(InstantCopies(open_tier()), EF.offer([5, block_id]))


# ranks


def test_without_all_its_ranks_a_session_is_answered_at_once_and_nothing_is_copied() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    hit = lookup(copies.scheduler, ABCD)
    copies.scheduler.rank_gone(1)
    assert step(copies, EF.offer([5, 600])) == [StepDone(1, 0, 0, 2)]
    assert lookup(copies.scheduler, ABCD) == Hit(1, 0)
    assert load(copies, hit, 8, 9) == [Loaded(9, 0)]
    stats = copies.scheduler.stats()
    assert (stats["declined_ranks_absent"], stats["loads_refused"], stats["leases"]) == (2, 1, 0)
    assert lookup(copies.scheduler, ABCD, session_id=2).blocks == 2
    copies.scheduler.hello(1, 6)
    assert lookup(copies.scheduler, ABCD).blocks == 2
    with pytest.raises(ControlError, match="bad_block_ids"):
        step(copies, EF.offer([5, 6]))


def test_a_step_without_all_ranks_still_ends_its_requests() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    lookup(copies.scheduler, ABCD)
    copies.scheduler.rank_gone(1)
    copies.scheduler.step(1, Step(2, [], ["r"]), 0.0)
    assert copies.scheduler.stats()["leases"] == 0


def test_a_rank_of_a_session_that_left_changes_nothing() -> None:
    scheduler = open_tier()
    scheduler.goodbye(1)
    scheduler.goodbye(2)
    scheduler.rank_gone(1)
    assert not scheduler.in_use


def test_a_session_that_never_had_memory_stores_nothing() -> None:
    assert step(InstantCopies(open_tier()), EF.offer([5, 6]), session_id=3) == [StepDone(1, 0, 0, 2)]


# lookups and loads


def test_a_hit_is_not_evicted_before_it_is_loaded() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD.part(0, 2))
    assert hit.blocks == 2
    assert store(copies, EF, step_id=2) == [StepDone(2, 2, 0, 0)]
    assert removed(copies) == [ABCD.hashes[3], ABCD.hashes[2]]
    assert store(copies, make_chain([7, 7], 2), step_id=3) == [StepDone(3, 1, 0, 0)]
    assert load(copies, hit, 20, 21) == [Loaded(9, 2)]


def test_a_hit_after_eviction_is_shorter() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    store(copies, EF, step_id=2)
    hit = lookup(copies.scheduler, ABCD)
    assert hit.blocks == 2
    assert load(copies, hit, 20, 21) == [Loaded(9, 2)]


def test_a_block_that_is_still_being_copied_is_no_hit() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    assert lookup(copies.scheduler, ABCD) == Hit(1, 0)
    copies.complete()
    assert lookup(copies.scheduler, ABCD).blocks == 4


def test_a_hit_is_what_every_group_has() -> None:
    copies = InstantCopies(open_tier(8, TWO))
    step(copies, ABCD.offer(range(4)), ABCD.part(0, 2).offer([4, 5], group=1))
    hit = lookup(copies.scheduler, ABCD)
    assert hit.blocks == 2
    held = HeldCopies(copies.scheduler)
    load(held, hit, 20, 21, 30, 31)
    pool = copies.scheduler.pool
    wanted = [pool.slot_of(group, name) for group in (0, 1) for name in ABCD.hashes[:2]]
    assert list(held.pending[0].slots) == wanted


def test_fewer_blocks_than_the_hit_can_be_loaded() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    assert load(copies, lookup(copies.scheduler, ABCD), 20, 21) == [Loaded(9, 2)]


@pytest.mark.parametrize("blocks", [0, 5])
def test_more_blocks_than_the_hit_or_none_is_a_miss(blocks: int) -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    assert load(copies, lookup(copies.scheduler, ABCD), *range(blocks)) == [Loaded(9, 0)]
    assert copies.scheduler.pool.pinned() == 0


def test_a_load_that_is_not_the_same_in_every_group_is_a_miss() -> None:
    copies = InstantCopies(open_tier(8, TWO))
    step(copies, ABCD.offer(range(4)), ABCD.offer(range(4, 8), group=1))
    assert load(copies, lookup(copies.scheduler, ABCD), 20, 21, 22) == [Loaded(9, 0)]


def test_a_lease_is_loaded_once_and_by_its_session_only() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD)
    assert load(copies, hit, 20, session_id=2) == [Loaded(9, 0)]
    assert load(copies, hit, 20) == [Loaded(9, 1)]
    assert load(copies, hit, 20) == [Loaded(9, 0)]
    assert copies.scheduler.stats()["loads_refused"] == 2


def test_a_load_into_blocks_outside_the_memory_keeps_the_lease() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD)
    with pytest.raises(ControlError, match="bad_block_ids"):
        load(copies, hit, 100)
    assert load(copies, hit, 99) == [Loaded(9, 1)]


def test_a_failed_load_is_a_miss_and_the_blocks_stay() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 20, 21)
    assert copies.fail() == [Loaded(9, 0)]
    assert copies.scheduler.pool.pinned() == 0
    assert lookup(copies.scheduler, ABCD).blocks == 4


def test_finish_while_a_load_is_under_way_ends_it_once() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 20, 21)
    copies.scheduler.finish(1, "r")
    assert copies.scheduler.pool.pinned() == 1
    assert copies.complete() == [Loaded(9, 2)]
    assert copies.scheduler.pool.pinned() == 0


def test_abort_before_the_first_schedule_unpins_the_hit() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD)
    copies.scheduler.step(1, Step(2, [], ["r", "never seen"]), 0.0)
    assert copies.scheduler.pool.pinned() == 0
    assert load(copies, hit, 20) == [Loaded(9, 0)]


def test_a_preempted_request_looks_up_again() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD)
    copies.scheduler.preempt(1, "r")
    assert load(copies, hit, 20) == [Loaded(9, 0)]
    assert load(copies, lookup(copies.scheduler, ABCD), 20) == [Loaded(9, 1)]


def test_a_released_hit_is_unpinned() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD)
    assert hit.lease_id is not None
    copies.scheduler.release(2, Release(hit.lease_id))
    assert copies.scheduler.pool.pinned() == 1
    copies.scheduler.release(1, Release(hit.lease_id))
    copies.scheduler.release(1, Release(hit.lease_id))
    assert copies.scheduler.pool.pinned() == 0


def test_a_forgotten_hit_is_unpinned_at_its_deadline() -> None:
    copies = InstantCopies(open_tier(max_lease_s=60.0))
    store(copies, ABCD)
    lookup(copies.scheduler, ABCD, lease_s=float("inf"))
    copies.scheduler.tick(59.9)
    assert copies.scheduler.stats()["leases"] == 1
    copies.scheduler.tick(60.0)
    assert copies.scheduler.pool.pinned() == 0
    assert copies.scheduler.stats()["leases_expired"] == 1


def test_leases_are_bounded_and_a_refusal_is_a_miss() -> None:
    copies = InstantCopies(open_tier(max_leases=2))
    store(copies, ABCD)
    hits = [lookup(copies.scheduler, ABCD) for _ in range(3)]
    assert [hit.blocks for hit in hits] == [4, 4, 0]
    assert copies.scheduler.stats()["lookups_refused"] == 1
    assert lookup(copies.scheduler, EF).blocks == 0
    assert copies.scheduler.stats()["lookups_refused"] == 1


@pytest.mark.parametrize("lease_s", [float("nan"), -0.001, float("-inf")])
def test_a_lease_without_a_length_is_refused(lease_s: float) -> None:
    with pytest.raises(ControlError, match="bad_lease"):
        lookup(open_tier(), ABCD, lease_s=lease_s)


def test_a_lookup_of_half_a_hash_is_refused() -> None:
    with pytest.raises(ControlError, match="bad_hashes"):
        open_tier().lookup(1, Lookup(1, "r", ABCD.packed[:-1]), 0.0)


def test_a_lookup_of_nothing_is_a_miss() -> None:
    assert open_tier().lookup(1, Lookup(1, "r", b""), 0.0) == Hit(1, 0)


def test_a_list_that_is_no_chain_is_never_loaded() -> None:
    """A hit is the chain that ends in its last block: a list that starts elsewhere gets nothing."""
    copies = InstantCopies(open_tier(8))
    store(copies, ABCD)
    store(copies, EF, step_id=2)
    mixed = Lookup(1, "r", EF.hashes[0] + ABCD.hashes[1])
    hit = copies.scheduler.lookup(1, mixed, 0.0)
    assert load(copies, hit, *range(20, 20 + hit.blocks)) == [Loaded(9, 0)]
    assert copies.scheduler.pool.pinned() == 0


def test_a_shuffled_offer_leaves_the_tier_sound() -> None:
    copies = InstantCopies(open_tier(8))
    store(copies, ABCD.part(0, 2))
    for order in ((3, 0, 2, 1), (1, 3, 0, 2), (2, 0, 1, 3), (0, 0, 1, 1)):
        names = b"".join(ABCD.hashes[place] for place in order)
        step(copies, msgspec.structs.replace(ABCD.offer(range(4)), block_hashes=names))
        copies.scheduler.pool.check()
    assert set(stored(copies)) <= set(ABCD.hashes)
    assert len(stored(copies)) == len(set(stored(copies)))


def test_repeated_text_is_four_blocks() -> None:
    copies = InstantCopies(open_tier())
    same = make_chain([1] * 8, 2)
    assert store(copies, same) == [StepDone(1, 4, 0, 0)]
    assert lookup(copies.scheduler, same).blocks == 4


# reset


def test_reset_says_what_is_gone_children_first() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    assert copies.perform(copies.scheduler.reset(1, Reset(5))) == [ResetDone(5, 4)]
    assert removed(copies) == list(ABCD.hashes[::-1])
    assert lookup(copies.scheduler, ABCD) == Hit(1, 0)


def test_reset_of_an_empty_tier_announces_nothing() -> None:
    assert open_tier().reset(1, Reset(5)) == [Reply(1, ResetDone(5, 0))]


def test_a_store_that_reset_met_registers_and_announces_nothing() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 1))
    copies.complete()
    store(copies, ABCD, step_id=2)
    copies.perform(copies.scheduler.reset(1, Reset(5)))
    assert copies.complete() == [StepDone(2, 0, 1, 3)]
    assert stored(copies) == [ABCD.hashes[0]]
    assert lookup(copies.scheduler, ABCD).blocks == 0
    assert copies.scheduler.pool.free_slots == 4


def test_slots_under_a_copy_are_not_reused_after_a_reset() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.perform(copies.scheduler.reset(1, Reset(5)))
    assert store(copies, EF, step_id=2) == [StepDone(2, 0, 0, 2)]
    copies.complete()
    assert store(copies, EF, step_id=3) == []


def test_a_block_can_be_stored_anew_while_its_old_copy_is_still_running() -> None:
    copies = HeldCopies(open_tier(8))
    store(copies, ABCD)
    copies.perform(copies.scheduler.reset(1, Reset(5)))
    store(copies, ABCD, step_id=2)
    assert set(copies.pending[0].slots).isdisjoint(copies.pending[1].slots)
    assert copies.complete(1) == [StepDone(2, 4, 0, 0)]
    assert copies.complete() == [StepDone(1, 0, 0, 4)]
    assert stored(copies) == list(ABCD.hashes)


def test_a_hit_from_before_a_reset_is_never_loaded() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    hit = lookup(copies.scheduler, ABCD.part(0, 2))
    copies.perform(copies.scheduler.reset(1, Reset(5)))
    store(copies, ABCD.part(0, 2), step_id=2)
    assert load(copies, hit, 20, 21) == [Loaded(9, 0)]
    assert copies.scheduler.pool.pinned() == 0


def test_a_load_that_reset_met_is_a_miss_and_its_slots_wait_for_it() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 20, 21, 22, 23)
    copies.perform(copies.scheduler.reset(1, Reset(5)))
    assert copies.scheduler.pool.free_slots == 0
    assert copies.complete() == [Loaded(9, 0)]
    assert copies.scheduler.pool.free_slots == 4


# engines that die


def test_a_dead_engines_stores_announce_nothing() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.scheduler.goodbye(1)
    assert copies.complete() == [StepDone(1, 0, 0, 4)]
    assert copies.published == []
    assert copies.scheduler.pool.free_slots == 4


def test_a_dead_engines_held_store_announces_nothing() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 2), session_id=2)
    store(copies, ABCD.part(2), step_id=2)
    copies.complete(1)
    copies.scheduler.goodbye(1)
    copies.complete()
    assert stored(copies) == list(ABCD.hashes[:2])


def test_what_a_dead_engine_stored_stays() -> None:
    copies = InstantCopies(open_tier())
    store(copies, ABCD)
    lookup(copies.scheduler, ABCD)
    copies.scheduler.goodbye(1)
    assert copies.scheduler.pool.pinned() == 0
    assert lookup(copies.scheduler, ABCD, session_id=2).blocks == 4


def test_goodbye_twice_is_fine() -> None:
    scheduler = open_tier()
    scheduler.goodbye(1)
    scheduler.goodbye(1)


# instruments


def test_stats_name_every_reason_from_the_start() -> None:
    stats = open_tier().stats()
    assert {f"declined_{reason}" for reason in DECLINE_REASONS} <= set(stats)
    assert {name: value for name, value in stats.items() if value} == {"blocks_free": 4}


def test_stats_tell_what_is_held() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 1))
    copies.complete()
    lookup(copies.scheduler, ABCD)
    store(copies, ABCD, step_id=2)
    names = ("blocks_resident", "blocks_pending", "blocks_free", "leases", "transfers")
    assert [copies.scheduler.stats()[name] for name in names] == [1, 3, 0, 1, 1]


def test_repr_tells_the_live_state() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    assert repr(copies.scheduler) == "<OffloadScheduler <BlockPool 4/4 indexed, 0 free> stores=1 loads=0>"


def test_a_parents_hash_is_kept_once() -> None:
    """The offer's own object would cost as much again for every block that is stored alone."""
    copies = InstantCopies(open_tier())
    store(copies, ABCD.part(0, 1))
    store(copies, ABCD.part(1, 2)._replace(parent=bytes(bytearray(ABCD.hashes[0]))), step_id=2)
    pool = copies.scheduler.pool
    child, parent = (pool.slot_of(0, name) for name in (ABCD.hashes[1], ABCD.hashes[0]))
    assert child is not None
    assert parent is not None
    meta = pool.meta_of(child)
    assert meta is not None
    assert meta.parent_block_hash is pool.hash_of(parent)


# lost blocks


def lose(copies: HeldCopies, *places: int) -> list:
    """The load that is under way fails: what it reads at these places is gone for good."""
    slots = copies.pending[0].slots
    return copies.fail(lost=[slots[place] for place in places])


def test_a_lost_block_is_a_miss_at_once_and_leaves_with_all_behind_it() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    assert lose(copies, 2) == [Loaded(9, 0)]
    assert removed(copies) == [ABCD.hashes[3], ABCD.hashes[2]]
    stats = copies.scheduler.stats()
    assert (stats["blocks_lost"], stats["blocks_removed"], stats["loads_failed"]) == (1, 2, 1)
    assert (lookup(copies.scheduler, ABCD).blocks, stats["blocks_free"]) == (2, 2)


def test_a_lost_block_is_there_again_when_it_is_stored_again() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    lose(copies, 0)
    assert lookup(copies.scheduler, ABCD).blocks == 0
    store(copies, ABCD)
    assert copies.complete() == [StepDone(1, 4, 0, 0)]
    assert lookup(copies.scheduler, ABCD).blocks == 4


def test_a_leased_hit_behind_a_lost_block_loads_nothing_even_if_it_is_stored_again() -> None:
    copies = HeldCopies(open_tier(8))
    store(copies, ABCD)
    copies.complete()
    leased = lookup(copies.scheduler, ABCD)
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    lose(copies, 1)
    store(copies, ABCD)
    copies.complete()
    assert load(copies, leased, 0, 1, 2, 3) == [Loaded(9, 0)]
    copies.scheduler.pool.check()
    assert (copies.scheduler.pool.free_slots, copies.scheduler.pool.pinned()) == (4, 0)


def test_a_load_that_another_ones_loss_met_is_a_miss_and_one_before_it_is_none() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    load(copies, lookup(copies.scheduler, ABCD.part(0, 2)), 0, 1)
    lose(copies, 2)
    assert copies.complete() == [Loaded(9, 0)]
    assert copies.complete() == [Loaded(9, 2)]
    assert copies.scheduler.pool.free_slots == 2


def test_a_loss_that_a_reset_or_another_rank_has_met_before_says_nothing_more() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD)
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 0, 1, 2, 3)
    transfer = copies.pending[0]
    copies.perform(copies.scheduler.lose(transfer, [transfer.slots[3]]))
    assert removed(copies) == [ABCD.hashes[3]]
    copies.perform(copies.scheduler.lose(transfer, [transfer.slots[3]]))
    copies.perform(copies.scheduler.reset(1, Reset(1)))
    lose(copies, 0, 1)
    assert removed(copies) == [ABCD.hashes[3], *ABCD.hashes[2::-1]]
    assert copies.scheduler.stats()["blocks_lost"] == 1


def test_a_store_behind_a_lost_block_announces_nothing() -> None:
    copies = HeldCopies(open_tier())
    store(copies, ABCD.part(0, 2))
    copies.complete()
    load(copies, lookup(copies.scheduler, ABCD), 0, 1)
    store(copies, ABCD.part(2), step_id=5)
    lose(copies, 1)
    copies.published.clear()
    assert copies.complete() == [StepDone(5, 0, 0, 2)]
    assert copies.published == []
    assert copies.scheduler.pool.free_slots == 3
