"""Two tiers: what is demoted before it leaves, what a hit is read from, and what each tier says."""

from __future__ import annotations

from typing import Any

import pytest

from core.models import UNIT, groups
from core.prompts import Path, hashes, offer, with_inner, with_tail
from kvevents_service.core.cascade import Cascade
from kvevents_service.core.commands import Copy, Keep, Publish, Reply
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun, StoreRun, snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.slots import READY
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.testing import Chain, HeldCopies, InstantCopies, make_chain
from kvevents_service.wire.control import GroupSpec, Hit, Load, Loaded, Lookup, Reset, ResetDone, Step, StepDone
from kvevents_service.wire.packing import pack_int32

ONE = (GroupSpec(0, "full_attention", 2),)
ABCD = make_chain(range(8), 2)
EFGH = make_chain(range(50, 58), 2)


def two_tiers(front: int = 4, back: int = 8, model: tuple[GroupSpec, ...] = ONE, **limits: Any) -> Cascade:
    """All of the front tier is headroom, unless said otherwise: a step demotes whatever has been stored before."""
    bounds = Limits(**{"headroom_divisor": 1, **limits})
    specs = [TierSpec(medium, size, 32, model, UNIT) for medium, size in (("CPU", front), ("STORAGE", back))]
    scheduler = Cascade(specs[0], specs[1], bounds)
    scheduler.hello(1, 1000)
    scheduler.hello(2, 1000)
    return scheduler


def store(copies: HeldCopies, chain: Chain, session_id: int = 1) -> list[Any]:
    offers = [chain.offer(range(len(chain.hashes)))]
    return copies.perform(copies.scheduler.step(session_id, Step(1, offers), 0.0))


def tick(copies: HeldCopies) -> None:
    copies.perform(copies.scheduler.tick(0.0))


def lookup(copies: HeldCopies, chain: Chain) -> Hit:
    return copies.scheduler.lookup(1, Lookup(1, "r", chain.packed, 10.0), 0.0)


def load(copies: HeldCopies, hit: Hit, blocks: int | None = None) -> list[Any]:
    ids = pack_int32(range(500, 500 + (hit.blocks if blocks is None else blocks)))
    return copies.perform(copies.scheduler.load(1, Load(9, "r", hit.lease_id or 0, ids), 0.0))


def kinds(copies: HeldCopies) -> list[tuple[str, int]]:
    """What is being copied, and how many blocks."""
    return [(transfer.kind, transfer.blocks) for transfer in copies.pending]


def said(copies: HeldCopies) -> list[tuple[str, str, int]]:
    """Stores (+) and removals (-) since the last call, with their medium and how many blocks they name."""
    signs = {BlockStoreMeta: "+", RemovedRun: "-"}
    told = []
    for item in copies.published:
        assert isinstance(item, BlockStoreMeta | RemovedRun)
        blocks = item.blocks if isinstance(item, BlockStoreMeta) else len(item.block_hashes)
        told.append((signs[type(item)], item.medium, blocks))
    copies.published.clear()
    return told


def behind(chain: Chain, front: int = 4, back: int = 8, **limits: Any) -> HeldCopies:
    """Two tiers that hold this chain behind only; the front one is full, and demotes nothing until a tick."""
    scheduler = two_tiers(front, back, **limits)
    copies = HeldCopies(scheduler)
    store(copies, chain)
    copies.complete()
    tick(copies)
    while copies.pending:
        copies.complete()
    store(copies, make_chain(range(200, 200 + 2 * front), 2))
    while copies.pending:
        (copies.complete if copies.pending[0].kind == "store" else copies.fail)()
    assert scheduler.pool.known_prefix(0, list(chain.hashes)) == 0
    assert scheduler.back.pool.known_prefix(0, list(chain.hashes)) == len(chain.hashes)
    said(copies)
    scheduler.demotions.rest()
    return copies


def check(scheduler: Cascade) -> None:
    """Nothing is held, and both pools are whole."""
    for tier in scheduler.tiers:
        tier.pool.check()
        assert not tier.pool.pinned()
        assert tier.pool.free_slots + tier.pool.count(READY) == tier.pool.capacity
    assert scheduler.stats()["transfers"] == 0


# demotion


def test_what_is_cold_is_copied_before_it_leaves_and_announced_when_it_is_behind() -> None:
    copies = HeldCopies(two_tiers())
    store(copies, ABCD)
    assert copies.complete() == [StepDone(1, 4, 0, 0)]
    assert said(copies) == [("+", "CPU", 4)]
    tick(copies)
    assert kinds(copies) == [("demote", 4)]
    assert said(copies) == []
    copies.complete()
    assert said(copies) == [("+", "STORAGE", 4)]
    store(copies, EFGH)
    assert said(copies) == [("-", "CPU", 4)]
    assert copies.scheduler.stats()["evicted_unsaved"] == 0
    while copies.pending:
        copies.complete()
    check(copies.scheduler)


def test_a_block_is_written_behind_once_while_it_is_there() -> None:
    copies = HeldCopies(two_tiers())
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    tick(copies)
    assert kinds(copies) == [("demote", 4)]
    copies.complete()
    tick(copies)
    assert kinds(copies) == []


def test_what_is_not_copied_in_time_goes_and_is_counted() -> None:
    copies = HeldCopies(two_tiers(4))
    store(copies, ABCD)
    copies.complete()
    store(copies, EFGH)
    assert copies.scheduler.stats()["evicted_unsaved"] == 4
    assert [kind for kind, _ in kinds(copies)] == ["store"]


def test_what_is_being_demoted_stays_and_offers_are_declined_rather_than_held_up() -> None:
    copies = HeldCopies(two_tiers())
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    assert store(copies, EFGH) == [StepDone(1, 0, 0, 4)]
    assert copies.scheduler.stats()["declined_no_room"] == 4
    copies.complete()
    store(copies, EFGH)
    assert kinds(copies) == [("store", 4)]


def test_a_chain_that_is_only_in_part_behind_is_copied_from_there_on() -> None:
    copies = HeldCopies(two_tiers(8))
    store(copies, ABCD.part(0, 2))
    copies.complete()
    tick(copies)
    copies.complete()
    store(copies, ABCD)
    copies.complete()
    said(copies)
    tick(copies)
    assert kinds(copies) == [("demote", 2)]
    copies.complete()
    assert said(copies) == [("+", "STORAGE", 2)]


def test_children_that_arrive_before_their_parents_are_announced_behind_them() -> None:
    copies = HeldCopies(two_tiers(8))
    store(copies, ABCD.part(0, 2))
    copies.complete()
    tick(copies)
    store(copies, ABCD)
    copies.complete(1)
    tick(copies)
    assert kinds(copies) == [("demote", 2), ("demote", 2)]
    said(copies)
    copies.complete(1)
    assert said(copies) == []
    copies.complete()
    assert said(copies) == [("+", "STORAGE", 2), ("+", "STORAGE", 2)]
    check(copies.scheduler)


@pytest.mark.parametrize("good", [True, False])
def test_a_demotion_that_fails_leaves_the_block_in_front_and_is_tried_again_later(good: bool) -> None:
    copies = HeldCopies(two_tiers())
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    (copies.complete if good else copies.fail)()
    assert copies.scheduler.stats()["demotes_failed"] == (not good)
    check(copies.scheduler)
    tick(copies)
    assert kinds(copies) == ([] if good else [("demote", 4)])


def test_after_a_failure_nothing_is_demoted_until_some_time_has_passed() -> None:
    copies = HeldCopies(two_tiers(8))
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    copies.fail()
    store(copies, EFGH)
    assert kinds(copies) == [("store", 4)]


def test_the_tier_behind_evicts_for_it_and_says_so_first() -> None:
    copies = HeldCopies(two_tiers(4, 4))
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    copies.complete()
    store(copies, EFGH)
    copies.complete()
    said(copies)
    tick(copies)
    assert said(copies) == [("-", "STORAGE", 4)]
    copies.complete()
    assert said(copies) == [("+", "STORAGE", 4)]


def test_what_is_cold_is_demoted_in_slices_as_fast_as_others_let_it() -> None:
    copies = HeldCopies(two_tiers(slice_blocks=3))
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    assert kinds(copies) == [("demote", 3)]
    assert not copies.scheduler.unfinished, "half of what may be under way is"
    copies.complete()
    assert copies.scheduler.unfinished
    copies.perform(copies.scheduler.go_on(0.0))
    assert kinds(copies) == [("demote", 1)]
    assert not copies.scheduler.unfinished


@pytest.mark.parametrize("change", ["none", "lost", "adopted", "touched"])
def test_a_long_chain_is_gone_through_once_unless_it_changes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slices follow each other; what has come or gone behind meanwhile is seen."""
    scheduler, seen = two_tiers(16, 16, slice_blocks=2), []
    missing_in = BlockPool.missing_in

    def counted(pool: BlockPool, other: BlockPool, leaf: int) -> list[int]:
        seen.append(leaf)
        return missing_in(pool, other, leaf)

    monkeypatch.setattr(BlockPool, "missing_in", counted)
    copies, chain = HeldCopies(scheduler), make_chain(range(16), 2)
    store(copies, chain)
    copies.complete()
    tick(copies)
    copies.complete()
    match change:
        case "lost":
            copies.perform(scheduler.back.lose([1]))
        case "adopted":
            offer_of = chain.part(2, 4).offer(range(2))
            run = StoreRun(snapshot(offer_of, ONE[0], "STORAGE", 32), [8, 9])
            copies.perform(scheduler.back.adopt([run]))
        case "touched":
            scheduler.pool.touch(7)
    while scheduler.unfinished:
        copies.perform(scheduler.go_on(0.0))
        while copies.pending:
            copies.complete()
    assert sorted(scheduler.back.pool.ready_names(0)) == sorted(chain.hashes)
    assert seen == [7] if change == "none" else seen == [7, 7]
    scheduler.back.pool.check()


@pytest.mark.parametrize("meanwhile", ["lookup", "step", "reset", "goodbye"])
def test_what_a_large_step_makes_due_is_demoted_behind_it(meanwhile: str) -> None:
    scheduler = two_tiers(8, slice_blocks=4)
    copies = HeldCopies(scheduler)
    store(copies, ABCD.part(0, 3))
    copies.complete()
    store(copies, EFGH)
    assert kinds(copies) == [("store", 4)]
    assert scheduler.unfinished
    match meanwhile:
        case "lookup":
            assert lookup(copies, ABCD.part(0, 3)).blocks == 3  # leased: it stays in front all the same
            scheduler.finish(1, "r")
        case "step":
            store(copies, make_chain([1, 2], 2))
            assert kinds(copies)[1:] == [("store", 1), ("demote", 3)], "a small one does it itself"
        case "reset":
            copies.perform(scheduler.reset(1, Reset(5)))
        case "goodbye":
            scheduler.goodbye(1)
    while scheduler.unfinished:
        copies.perform(scheduler.go_on(0.0))
    demoted = [transfer.blocks for transfer in copies.pending if transfer.kind == "demote"]
    assert demoted == ([] if meanwhile == "reset" else [3])
    while copies.pending:
        copies.complete()
        while scheduler.unfinished:
            copies.perform(scheduler.go_on(0.0))
    check(scheduler)


def test_at_most_the_headroom_is_being_demoted_and_not_more_than_is_allowed() -> None:
    copies = HeldCopies(two_tiers(16, 64, headroom_divisor=2, max_demoting_blocks=3))
    for chain in (ABCD, EFGH, make_chain(range(100, 116), 2)):
        store(copies, chain)
        while copies.pending and copies.pending[0].kind == "store":
            copies.complete()
    tick(copies)
    assert sum(blocks for _, blocks in kinds(copies)) == 3
    tick(copies)
    assert sum(blocks for _, blocks in kinds(copies)) == 3


def test_a_tier_with_room_demotes_nothing() -> None:
    copies = HeldCopies(two_tiers(16, 64, headroom_divisor=4))
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    assert kinds(copies) == []


# hits


def test_a_hit_behind_is_promoted_and_then_loaded() -> None:
    copies = behind(ABCD)
    hit = lookup(copies, ABCD)
    assert hit.blocks == 4
    assert load(copies, hit) == []
    assert kinds(copies) == [("promote", 4)]
    assert said(copies) == [("-", "CPU", 4)]
    copies.complete()
    assert said(copies) == [("+", "CPU", 4)]
    assert kinds(copies) == [("load", 4)]
    assert copies.pending[0].tier == 0
    assert copies.complete() == [Loaded(9, 4)]
    assert copies.scheduler.back.pool.known_prefix(0, list(ABCD.hashes)) == 4  # type: ignore[attr-defined]
    check(copies.scheduler)


def test_only_what_is_not_in_front_is_promoted() -> None:
    copies = behind(ABCD, front=6)
    store(copies, ABCD.part(0, 2))
    copies.complete()
    load(copies, lookup(copies, ABCD))
    assert kinds(copies) == [("promote", 2)]
    copies.complete()
    assert kinds(copies) == [("load", 4)]
    assert copies.complete() == [Loaded(9, 4)]


def test_without_room_in_front_the_disk_serves_the_engine() -> None:
    copies = behind(ABCD)
    front = make_chain(range(200, 208), 2)  # fills the tier, and is leased
    assert lookup(copies, front).blocks == 4
    load(copies, lookup(copies, ABCD))
    assert kinds(copies) == [("load", 4)]
    assert copies.pending[0].tier == 1
    assert copies.complete() == [Loaded(9, 4)]
    assert copies.scheduler.stats()["blocks_loaded_from_disk"] == 4


def test_with_little_room_a_hit_comes_from_both() -> None:
    copies = behind(ABCD, front=6)
    assert lookup(copies, make_chain(range(200, 208), 2)).blocks == 4  # leased: two slots are left
    load(copies, lookup(copies, ABCD))
    assert kinds(copies) == [("promote", 2)]
    copies.complete()
    assert sorted((transfer.tier, transfer.blocks) for transfer in copies.pending) == [(0, 2), (1, 2)]
    assert copies.complete() == []
    assert copies.complete() == [Loaded(9, 4)]
    assert copies.scheduler.stats()["blocks_loaded"] == 4


@pytest.mark.parametrize("first", [0, 1])
def test_one_bad_half_makes_the_load_a_miss(first: int) -> None:
    copies = behind(ABCD, front=6)
    lookup(copies, make_chain(range(200, 208), 2))
    load(copies, lookup(copies, ABCD))
    copies.complete()
    assert copies.fail(first) == []
    assert copies.complete() == [Loaded(9, 0)]


def settle(copies: HeldCopies) -> list[Any]:
    """All that is left to do, and what is answered."""
    replies: list[Any] = []
    while copies.pending or copies.scheduler.unfinished:
        if copies.scheduler.unfinished:
            replies += copies.perform(copies.scheduler.go_on(0.0))
        if copies.pending:
            replies += copies.complete()
    return replies


def sliced() -> HeldCopies:
    """A hit of 4 blocks behind is being loaded, 2 of them are on their way to the front."""
    copies = behind(ABCD, front=8)
    tier = copies.scheduler.tier
    tier.limits = tier.limits._replace(slice_blocks=2)
    assert load(copies, lookup(copies, ABCD)) == []
    assert kinds(copies) == [("promote", 2)]
    assert copies.scheduler.unfinished
    return copies


@pytest.mark.parametrize("landed_first", [True, False])
def test_a_long_hit_is_promoted_in_slices_and_loaded_once(landed_first: bool) -> None:
    copies = sliced()
    if landed_first:
        assert copies.complete() == []
        assert (kinds(copies), copies.scheduler.unfinished) == ([], True)
    copies.perform(copies.scheduler.go_on(0.0))
    assert kinds(copies) == [("promote", 2)] * (1 if landed_first else 2)
    while copies.pending[0].kind == "promote":
        assert copies.complete() == []
    assert [(transfer.kind, transfer.tier, transfer.blocks) for transfer in copies.pending] == [("load", 0, 4)]
    assert copies.complete() == [Loaded(9, 4)]
    assert copies.scheduler.stats()["blocks_promoted"] == 4
    assert settle(copies) == []
    check(copies.scheduler)


def test_a_hit_stays_where_it_is_while_others_store_between_its_slices() -> None:
    copies = sliced()
    for start in (300, 400, 500):
        store(copies, make_chain(range(start, start + 8), 2))
    replies = settle(copies)
    assert Loaded(9, 4) in replies
    check(copies.scheduler)


def test_what_an_engine_stores_between_the_slices_is_not_promoted_over_it() -> None:
    copies = sliced()
    store(copies, ABCD)
    assert kinds(copies) == [("promote", 2), ("store", 2)]
    replies = settle(copies)
    assert Loaded(9, 4) in replies
    assert copies.scheduler.stats()["blocks_promoted"] == 2
    assert copies.scheduler.stats()["blocks_loaded_from_disk"] == 2
    check(copies.scheduler)


def test_what_gets_no_room_in_its_slice_is_read_from_behind() -> None:
    copies = behind(ABCD, front=8)
    tier = copies.scheduler.tier
    tier.limits = tier.limits._replace(slice_blocks=2)
    assert lookup(copies, make_chain(range(200, 210), 2)).blocks == 5  # leased: three slots are left
    load(copies, lookup(copies, ABCD))
    copies.perform(copies.scheduler.go_on(0.0))
    assert kinds(copies) == [("promote", 2), ("promote", 1)]
    while copies.pending[0].kind == "promote":
        copies.complete()
    assert sorted((transfer.tier, transfer.blocks) for transfer in copies.pending) == [(0, 3), (1, 1)]
    assert [copies.complete(), copies.complete()] == [[], [Loaded(9, 4)]]


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("event", ["reset", "goodbye", "rank", "failure"])
def test_a_promotion_that_is_cut_short_between_its_slices_is_a_miss(event: str, landed: bool) -> None:
    copies = sliced()
    scheduler = copies.scheduler
    if landed and event != "failure":
        copies.complete()
    replies: list[Any] = []
    match event:
        case "reset":
            replies += copies.perform(scheduler.reset(1, Reset(5)))
        case "goodbye":
            scheduler.goodbye(1)
        case "rank":
            scheduler.rank_gone(1)
        case "failure":
            replies += copies.fail()
            assert replies == [Loaded(9, 0)], "at once"
    replies += settle(copies)
    assert [reply for reply in replies if isinstance(reply, Loaded)] == [Loaded(9, 0)]
    promoted = {"failure": 0, "reset": 2 * landed}.get(
        event, 2
    )  # what is promoted stays, whether it is loaded or not
    assert scheduler.stats()["blocks_promoted"] == promoted
    check(scheduler)


@pytest.mark.parametrize("landed", [True, False])
def test_a_promotion_of_which_another_load_finds_the_rest_lost_is_a_miss(landed: bool) -> None:
    copies = sliced()
    load(copies, lookup(copies, ABCD))
    assert kinds(copies) == [("promote", 2), ("load", 4)]
    lost = copies.pending[1].slots[2]
    if landed:
        copies.complete()
    assert copies.fail(len(copies.pending) - 1, lost=[lost]) == [Loaded(9, 0)]
    assert settle(copies) == [Loaded(9, 0)]
    assert copies.scheduler.stats()["blocks_promoted"] == 2
    check(copies.scheduler)


def test_two_loads_of_one_hit_do_not_promote_it_twice() -> None:
    copies = behind(ABCD)
    hits = [lookup(copies, ABCD) for _ in range(2)]
    for hit in hits:
        load(copies, hit)
    assert kinds(copies) == [("promote", 4), ("load", 4)]
    assert copies.pending[1].tier == 1
    assert copies.complete(1) == [Loaded(9, 4)]
    copies.complete()
    assert copies.complete() == [Loaded(9, 4)]
    check(copies.scheduler)


def test_what_is_read_in_front_stays_there_while_the_rest_comes_from_behind() -> None:
    copies = behind(ABCD, front=6)
    store(copies, ABCD.part(0, 2))
    copies.complete()
    assert lookup(copies, make_chain(range(200, 208), 2)).blocks == 4  # leased: the other two slots are A's and B's
    load(copies, lookup(copies, ABCD))
    assert sorted((transfer.tier, transfer.blocks) for transfer in copies.pending) == [(0, 2), (1, 2)]
    assert store(copies, EFGH) == [StepDone(1, 0, 0, 4)]
    copies.complete()
    assert copies.complete() == [Loaded(9, 4)]


def test_nothing_is_promoted_behind_a_parent_that_is_being_written() -> None:
    copies = behind(ABCD, front=8)
    store(copies, ABCD.part(0, 2))
    rest = ABCD.part(2)
    hit = copies.scheduler.lookup(1, Lookup(1, "r", rest.packed, 10.0, 4), 0.0)
    assert hit.blocks == 2
    load(copies, hit)
    assert kinds(copies) == [("store", 2), ("load", 2)]
    assert copies.complete(1) == [Loaded(9, 2)]


def test_a_failed_promotion_is_a_miss_and_announces_nothing() -> None:
    copies = behind(ABCD)
    load(copies, lookup(copies, ABCD))
    said(copies)
    assert copies.fail() == [Loaded(9, 0)]
    assert said(copies) == []
    assert copies.scheduler.stats()["promotes_failed"] == 1
    assert lookup(copies, ABCD).blocks == 4  # nothing is lost: it may be tried again


def test_what_a_promotion_finds_lost_leaves_the_disk_with_all_behind_it() -> None:
    copies = behind(ABCD)
    load(copies, lookup(copies, ABCD))
    said(copies)
    assert copies.fail(lost=[copies.pending[0].slots[1]]) == [Loaded(9, 0)]
    assert said(copies) == [("-", "STORAGE", 3)]
    stats = copies.scheduler.stats()
    assert (stats["disk_blocks_lost"], stats["blocks_lost"], stats["loads_failed"]) == (1, 0, 1)
    assert lookup(copies, ABCD).blocks == 1


def test_a_lost_block_that_is_still_in_front_is_loaded_from_there_and_demoted_again() -> None:
    copies = HeldCopies(two_tiers(8))
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    copies.complete()
    scheduler = copies.scheduler
    assert isinstance(scheduler, Cascade)
    scheduler.back.lose([0])
    assert lookup(copies, ABCD).blocks == 4
    scheduler.finish(1, "r")
    tick(copies)
    assert kinds(copies) == [("demote", 4)]


@pytest.mark.parametrize("gone", ["goodbye", "rank_gone"])
def test_an_engine_that_leaves_while_its_hit_is_promoted_gets_no_copy(gone: str) -> None:
    copies = behind(ABCD)
    load(copies, lookup(copies, ABCD))
    getattr(copies.scheduler, gone)(1)
    copies.scheduler.hello(1, 1000)  # other memory than the load was for
    assert copies.complete() == [Loaded(9, 0)]
    assert kinds(copies) == []
    assert ("+", "CPU", 4) in said(copies)
    check(copies.scheduler)


def test_a_reset_clears_both_tiers_and_meets_every_copy() -> None:
    copies = behind(ABCD)
    load(copies, lookup(copies, ABCD))
    said(copies)
    assert copies.perform(copies.scheduler.reset(1, Reset(3))) == [ResetDone(3, 4)]
    assert said(copies) == [("-", "STORAGE", 4)]
    assert copies.complete() == [Loaded(9, 0)]
    assert said(copies) == []
    check(copies.scheduler)


def test_a_reset_meets_a_demotion() -> None:
    copies = HeldCopies(two_tiers())
    store(copies, ABCD)
    copies.complete()
    tick(copies)
    copies.perform(copies.scheduler.reset(1, Reset(3)))
    said(copies)
    copies.complete()
    assert said(copies) == []
    check(copies.scheduler)


def test_a_store_behind_what_is_being_promoted_waits_for_it() -> None:
    copies = behind(ABCD, front=8)
    load(copies, lookup(copies, ABCD))
    longer = make_chain((*range(8), 70, 71), 2)
    store(copies, longer)
    assert kinds(copies) == [("promote", 4), ("store", 1)]
    said(copies)
    assert copies.complete(1) == []
    assert copies.complete() == [StepDone(1, 1, 4, 0)]
    assert said(copies) == [("+", "CPU", 4), ("+", "CPU", 1)]


def test_the_deadline_of_a_load_is_that_of_both_halves() -> None:
    copies = behind(ABCD)
    load(copies, lookup(copies, ABCD))
    deadline = copies.pending[0].deadline
    copies.complete()
    assert copies.pending[0].deadline == deadline == copies.scheduler.tier.limits.transfer_deadline_s


# other kinds


WIDE = groups(("full_attention", 8), ("sliding_window", 8, 8), ("mamba", 8))
PROMPT: Path = (1, 1, 0, 1, 0, 0, 1, 0)


def test_names_tails_windows_and_states_go_and_come_back() -> None:
    copies = InstantCopies(two_tiers(8, 16, WIDE))
    whole = with_inner(offer(PROMPT[:4], [0], 0, WIDE[0]), PROMPT[:4], WIDE[0], 0, (1, 2))
    tail = with_tail(offer(PROMPT[:6], [1], 0, WIDE[0]), PROMPT[:6], WIDE[0], 0, 2)
    offers = [whole, tail, offer(PROMPT, [3, 4], 0, WIDE[1]), offer(PROMPT[:4], [5], 0, WIDE[2])]
    copies.perform(copies.scheduler.step(1, Step(1, offers), 0.0))
    scheduler = copies.scheduler
    assert isinstance(scheduler, Cascade)
    front = [set(scheduler.pool.ready_names(group.index)) for group in WIDE]
    tick(copies)
    assert [set(scheduler.back.pool.ready_names(group.index)) for group in WIDE] == front
    copies.perform([scheduler.tier.removal(scheduler.pool.clear())])
    before = {(item.block_hashes, item.token_ids, item.parent_block_hash) for item in copies.published
              if isinstance(item, BlockStoreMeta) and item.medium == "CPU"}  # fmt: skip
    copies.published.clear()
    hit = scheduler.lookup(1, Lookup(1, "r", hashes(PROMPT[:4]), 10.0), 0.0)
    assert hit.blocks == 4
    ids = pack_int32([50, 51, 52])
    assert copies.perform(scheduler.load(1, Load(9, "r", hit.lease_id or 0, ids, 4), 0.0)) == [Loaded(9, 4)]
    assert scheduler.stats()["blocks_promoted"] == 3
    again = [item for item in copies.published if isinstance(item, BlockStoreMeta)]
    assert {item.medium for item in again} == {"CPU"}
    assert {(item.block_hashes, item.token_ids, item.parent_block_hash) for item in again} <= before
    check(scheduler)


def test_counters_of_both_tiers_are_told_apart() -> None:
    copies = behind(ABCD)
    stats = copies.scheduler.stats()
    assert (stats["blocks_resident"], stats["disk_blocks_resident"], stats["disk_blocks_free"]) == (4, 4, 4)
    assert (stats["blocks_stored"], stats["disk_blocks_stored"], stats["blocks_demoted"]) == (8, 4, 4)
    assert (stats["blocks_removed"], stats["disk_blocks_removed"]) == (4, 0)


def test_a_tier_that_keeps_its_blocks_is_told_of_them_right_behind_their_announcement() -> None:
    spec = TierSpec("STORAGE", 8, 32, ONE, UNIT, keeps=True)
    scheduler = Cascade(spec._replace(medium="CPU", keeps=False), spec, Limits(headroom_divisor=1))
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    store(copies, ABCD)
    (stored,) = copies.pending
    assert {type(command) for command in scheduler.complete(stored)} == {Publish, Reply}
    (demote,) = [command.transfer for command in scheduler.tick(0.0) if isinstance(command, Copy)]
    publish, keep = scheduler.complete(demote)
    assert isinstance(publish, Publish)
    assert keep == Keep(demote.runs)


def test_what_a_tier_that_keeps_its_blocks_did_not_announce_it_is_not_told_of() -> None:
    scheduler = OffloadScheduler(TierSpec("STORAGE", 8, 32, ONE, UNIT, keeps=True))
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    store(copies, ABCD)
    scheduler.reset(1, Reset(1))
    (late,) = copies.pending
    assert {type(command) for command in scheduler.complete(late)} == {Reply}


def test_what_was_on_the_disk_before_the_process_is_announced_and_promoted() -> None:
    copies = HeldCopies(two_tiers())
    scheduler = copies.scheduler
    meta = snapshot(ABCD.offer(range(4)), ONE[0], "STORAGE", 32)
    copies.perform(scheduler.tiers[1].adopt([StoreRun(meta, [7, 3, 2, 5])]))
    assert said(copies) == [("+", "STORAGE", 4)]
    assert scheduler.stats()["disk_blocks_stored"] == 4
    load(copies, lookup(copies, ABCD))
    assert kinds(copies) == [("promote", 4)]
    assert copies.pending[0].slots.tolist() == [7, 3, 2, 5]
