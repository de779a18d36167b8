"""A reset of more blocks than one call may remove: what is said meanwhile, and what engines are told."""

from __future__ import annotations

from typing import Any

from core.models import UNIT
from kvevents_service.core.cascade import Cascade
from kvevents_service.core.commands import Publish, Reply
from kvevents_service.core.metadata import NO_SESSION, RemovedRun, StoreRun, snapshot
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.testing import HeldCopies, make_chain
from kvevents_service.wire.control import GroupSpec, Hit, Load, Loaded, Lookup, Reset, ResetDone, Step, StepDone
from kvevents_service.wire.packing import pack_int32

ONE = (GroupSpec(0, "full_attention", 2),)
LONG = make_chain(range(14), 2)
OTHER = make_chain(range(50, 56), 2)
LIMITS = Limits(slice_blocks=3, headroom_divisor=1)


def tier(medium: str, capacity: int) -> TierSpec:
    return TierSpec(medium, capacity, 32, ONE, UNIT)


def full(scheduler: OffloadScheduler | None = None) -> HeldCopies:
    """A tier that holds the long chain, of 7 blocks."""
    scheduler = scheduler or OffloadScheduler(tier("CPU", 10), LIMITS)
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    copies.perform(scheduler.step(1, Step(1, [LONG.offer(range(7))]), 0.0))
    copies.complete()
    copies.published.clear()
    return copies


def removed(commands: list[Any]) -> list[bytes]:
    runs = [item for command in commands if isinstance(command, Publish) for item in command.announcements]
    assert all(isinstance(run, RemovedRun) for run in runs)
    return [name for run in runs for name in run.block_hashes]


def test_leaves_go_first_and_the_answer_comes_with_the_end() -> None:
    scheduler = full().scheduler
    told = [scheduler.reset(1, Reset(5))]
    while scheduler.unfinished:
        scheduler.pool.check()
        assert set(scheduler.pool.ready_names(0)) == set(LONG.hashes[: len(scheduler.pool)])
        told.append(scheduler.go_on(0.0))
    assert [len(removed(commands)) for commands in told] == [3, 3, 1]
    assert [name for commands in told for name in removed(commands)] == list(LONG.hashes[::-1])
    assert [command for commands in told for command in commands if isinstance(command, Reply)] == [
        Reply(1, ResetDone(5, 7))
    ]
    assert told[-1][-1] == Reply(1, ResetDone(5, 7))
    assert scheduler.stats()["blocks_removed"] == 7
    assert scheduler.go_on(0.0) == []


def test_meanwhile_nothing_is_found_stored_or_loaded() -> None:
    copies = full()
    scheduler = copies.scheduler
    lease = scheduler.lookup(1, Lookup(2, "r", LONG.packed, 10.0), 0.0).lease_id
    scheduler.reset(1, Reset(5))
    assert scheduler.lookup(1, Lookup(3, "r", LONG.packed, 10.0), 0.0) == Hit(3, 0)
    load = Load(4, "r", lease or 0, pack_int32(range(500, 507)))
    assert scheduler.load(1, load, 0.0) == [Reply(1, Loaded(4, 0))]
    offers = [OTHER.offer(range(3))]
    assert scheduler.step(1, Step(6, offers, ["r"]), 0.0) == [Reply(1, StepDone(6, 0, 0, 3))]
    assert scheduler.stats()["declined_store_dropped"] == 3
    while scheduler.unfinished:
        scheduler.go_on(0.0)
    assert not scheduler.pool.pinned()
    copies.perform(scheduler.step(1, Step(7, offers), 0.0))
    assert copies.complete() == [StepDone(7, 3, 0, 0)]


def test_a_copy_that_ends_meanwhile_announces_nothing_and_a_load_is_a_miss() -> None:
    scheduler = OffloadScheduler(tier("CPU", 10), LIMITS)
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    copies.perform(scheduler.step(1, Step(6, [OTHER.offer(range(3))]), 0.0))
    copies.perform(scheduler.step(1, Step(1, [LONG.offer(range(7))]), 0.0))
    copies.complete(1)
    hit = scheduler.lookup(1, Lookup(2, "r", LONG.part(0, 2).packed, 10.0), 0.0)
    copies.perform(scheduler.load(1, Load(4, "r", hit.lease_id or 0, pack_int32(range(500, 502))), 0.0))
    copies.perform(scheduler.reset(1, Reset(5)))
    copies.published.clear()
    assert set(scheduler.pool.ready_names(0)) == set(LONG.hashes[:4])
    assert copies.complete(1) == [Loaded(4, 0)]
    assert copies.complete() == [StepDone(6, 0, 0, 3)]
    assert copies.published == []
    while scheduler.unfinished:
        copies.perform(scheduler.go_on(0.0))
    scheduler.pool.check()
    assert scheduler.pool.free_slots == 10


def test_resets_that_come_meanwhile_are_answered_together() -> None:
    scheduler = full().scheduler
    scheduler.hello(2, 1000)
    scheduler.reset(1, Reset(5))
    scheduler.reset(2, Reset(9))
    assert scheduler.go_on(0.0)[-2:] == [Reply(1, ResetDone(5, 7)), Reply(2, ResetDone(9, 7))]
    assert scheduler.reset(NO_SESSION, Reset(6)) == [Reply(NO_SESSION, ResetDone(6, 0))]


def test_nothing_is_demoted_meanwhile() -> None:
    cascade = Cascade(tier("CPU", 7), tier("STORAGE", 9), LIMITS)
    copies = full(cascade)
    copies.perform(cascade.reset(1, Reset(5)))
    copies.perform(cascade.tick(0.0))
    assert (len(cascade.pool), copies.pending) == (4, [])


def test_both_tiers_are_emptied() -> None:
    cascade = Cascade(tier("CPU", 7), tier("STORAGE", 9), LIMITS)
    copies = full(cascade)
    copies.perform(cascade.tick(0.0))
    assert [copy.blocks for copy in copies.pending] == [3]
    while cascade.unfinished or copies.pending:
        copies.perform(cascade.go_on(0.0))
        while copies.pending:
            copies.complete()
    assert [len(tier.pool) for tier in cascade.tiers] == [7, 7]
    copies.published.clear()
    copies.perform(cascade.reset(1, Reset(5)))
    while cascade.clearing.under_way:
        copies.perform(cascade.go_on(0.0))
    assert [(run.medium, len(run.block_hashes)) for run in copies.published if isinstance(run, RemovedRun)] == [
        *[("CPU", blocks) for blocks in (3, 3, 1)],
        *[("STORAGE", blocks) for blocks in (2, 3, 2)],
    ]


# what an earlier process kept


def kept(slots: list[int]) -> list[StoreRun]:
    """The long chain, cut in runs of two blocks and one."""
    runs = []
    for start in range(0, 7, 2):
        part = LONG.part(start, min(7, start + 2))
        meta = snapshot(part.offer(range(len(part.hashes))), ONE[0], "CPU", 32)
        runs.append(StoreRun(meta, slots[start : start + 2]))
    return runs


def test_what_was_kept_is_announced_in_slices_and_its_slots_are_nobodys_until_then() -> None:
    scheduler = OffloadScheduler(tier("CPU", 10), LIMITS)
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    copies.perform(scheduler.tier.adopt(kept([9, 8, 7, 6, 5, 4, 3])))
    assert [item.blocks for item in copies.published] == [2, 2]  # type: ignore[union-attr]
    assert scheduler.unfinished
    copies.perform(scheduler.step(1, Step(1, [OTHER.offer(range(3))]), 0.0))
    assert copies.pending[0].slots.tolist() == [0, 1, 2]
    scheduler.pool.check()
    copies.perform(scheduler.go_on(0.0))
    assert not scheduler.unfinished
    assert set(scheduler.pool.ready_names(0)) == set(LONG.hashes)
    assert scheduler.pool.free_slots == 0
    scheduler.pool.check()


def test_what_an_engine_stores_anew_meanwhile_is_not_adopted_and_what_is_behind_it_has_to_wait_for_nobody() -> None:
    """Its parent is being written: it cannot be loaded yet."""
    scheduler = OffloadScheduler(tier("CPU", 12), LIMITS)
    scheduler.hello(1, 1000)
    copies = HeldCopies(scheduler)
    copies.perform(scheduler.tier.adopt(kept([9, 8, 7, 6, 5, 4, 3])))
    part = LONG.part(4, 6)
    copies.perform(scheduler.step(1, Step(1, [part.offer(range(2))]), 0.0))
    copies.perform(scheduler.go_on(0.0))
    scheduler.pool.check()
    copies.complete()
    assert set(scheduler.pool.ready_names(0)) == set(LONG.hashes[:6])
    assert scheduler.pool.free_slots == 6


def test_a_reset_forgets_what_was_kept_and_not_announced_yet() -> None:
    scheduler = OffloadScheduler(tier("CPU", 10), LIMITS)
    scheduler.hello(1, 1000)
    root = StoreRun(snapshot(OTHER.offer(range(3)), ONE[0], "CPU", 32), [0, 1, 2])
    scheduler.tier.adopt([*kept([9, 8, 7, 6, 5, 4, 3]), root])
    commands = scheduler.reset(1, Reset(5))
    while scheduler.unfinished:
        commands += scheduler.go_on(0.0)
    assert removed(commands) == list(LONG.hashes[3::-1])
    assert scheduler.pool.free_slots == 10
    scheduler.pool.check()
