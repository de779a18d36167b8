"""Prefixes that end inside a block: inner names of whole blocks, tails, and hits on both."""

from __future__ import annotations

import msgspec
import pytest

from core.models import UNIT, Groups, groups
from core.prompts import Path, block, hashes, inner_hash, offer, tail_offer, unit_hash, with_inner, with_tail
from core.test_hybrid import load, lookup, open_tier, step
from kvevents_service.core.announce import to_event
from kvevents_service.testing import HeldCopies, InstantCopies
from kvevents_service.wire.control import Hit, Loaded, Lookup, Offer, Reset, StepDone
from kvevents_service.wire.events import BlockRemoved, BlockStored

PROMPT: Path = (1, 1, 0, 1, 0, 0, 1, 0)  # with an adapter, and images in some units
WIDE = groups(("full_attention", 8))  # four units a block
STATE = groups(("full_attention", 8), ("mamba", 8))


def named(group_model: Groups, units: int, *ends: int, tail: bool = True) -> Offer:
    """The whole blocks of a prompt of so many units, with inner names, and its tail."""
    group, path = group_model[0], PROMPT[:units]
    whole = offer(path, list(range(units // 4)), 0, group) if units // 4 else None
    if whole is None:
        return tail_offer(path, 90, group)
    whole = with_inner(whole, path, group, 0, ends)
    return with_tail(whole, path, group, 0, 90) if tail and units % 4 else whole


def fine(copies: HeldCopies, units: int, start: int = 0) -> Hit:
    return copies.scheduler.lookup(
        1, Lookup(1, "r", hashes(PROMPT[:units], start), 10.0, start * UNIT, fine=True), 0.0
    )


def events(copies: HeldCopies) -> list:
    said = [to_event(item) for item in copies.published]
    copies.published.clear()
    return said


def test_every_name_is_announced_with_its_own_range_and_parent() -> None:
    copies = InstantCopies(open_tier(WIDE))
    assert step(copies, named(WIDE, 6, 2)) == [StepDone(1, 2, 0, 0)]
    whole, inner, tail = events(copies)
    assert (whole.block_size, inner.block_size, tail.block_size) == (8, UNIT, UNIT)
    for event, end in ((inner, 2), (tail, 6)):
        truth = block(PROMPT[:end])
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [int.from_bytes(truth.block_hash[-8:], "big")]
        assert event.parent_block_hash == int.from_bytes(unit_hash(PROMPT[: end - 1])[-8:], "big")
        assert tuple(event.token_ids) == truth.token_ids
        assert event.extra_keys == [truth.extra_key]
        assert (event.lora_id, event.lora_name) == (truth.lora_id, truth.lora_name)


def test_names_leave_with_their_block() -> None:
    copies = InstantCopies(open_tier(WIDE))
    step(copies, named(WIDE, 6, 1, 2))
    stored = {name for event in events(copies) for name in event.block_hashes}
    assert len(stored) == 4
    copies.perform(copies.scheduler.reset(1, Reset(1)))
    gone = events(copies)
    assert all(isinstance(event, BlockRemoved) for event in gone)
    assert {name for event in gone for name in event.block_hashes} == stored
    assert copies.scheduler.stats()["blocks_removed"] == 4
    copies.scheduler.pool.check()


def test_a_fine_lookup_ends_at_a_tail_or_an_inner_name_or_in_a_whole_block() -> None:
    copies = InstantCopies(open_tier(WIDE))
    step(copies, named(WIDE, 6))
    assert fine(copies, 8).blocks == 6  # the tail
    assert fine(copies, 5).blocks == 4  # nobody named the prefix of 5
    assert lookup(copies, 8, path=PROMPT).blocks == 4  # asked for whole blocks
    step(copies, named(WIDE, 8, 5), step_id=2)
    assert fine(copies, 5).blocks == 5  # an inner name of the second block
    assert fine(copies, 8).blocks == 8


def test_a_tail_serves_while_its_whole_block_is_still_copied() -> None:
    copies = HeldCopies(open_tier(WIDE))
    step(copies, named(WIDE, 6))
    copies.complete()
    step(copies, named(WIDE, 8), step_id=2)
    assert fine(copies, 8).blocks == 6
    copies.complete()
    assert fine(copies, 8).blocks == 8


def test_part_of_a_whole_block_is_loaded_where_another_group_has_less() -> None:
    copies = InstantCopies(open_tier(STATE))
    step(copies, named(STATE, 8, tail=False), tail_offer(PROMPT[:6], 91, STATE[1]))
    hit = fine(copies, 8)
    assert hit.blocks == 6  # the state after 6 units, and the first two units of the second block
    assert load(copies, hit, 6, 3) == [Loaded(9, 6)]


def test_a_state_is_loaded_only_where_it_ends() -> None:
    copies = InstantCopies(open_tier(STATE))
    step(copies, named(STATE, 8, tail=False), tail_offer(PROMPT[:6], 91, STATE[1]))
    assert load(copies, fine(copies, 8), 5, 3) == [Loaded(9, 0)]
    assert fine(copies, 5).blocks == 0


def test_a_tail_needs_the_block_before_it() -> None:
    copies = InstantCopies(open_tier(WIDE))
    assert step(copies, tail_offer(PROMPT[:6], 90, WIDE[0])) == [StepDone(1, 0, 0, 1)]
    assert copies.scheduler.stats()["declined_parent_absent"] == 1
    step(copies, named(WIDE, 4), step_id=2)
    assert step(copies, tail_offer(PROMPT[:6], 90, WIDE[0]), step_id=3) == [StepDone(3, 1, 0, 0)]
    assert step(copies, tail_offer(PROMPT[:6], 90, WIDE[0]), step_id=4) == [StepDone(4, 0, 1, 0)]


def test_a_tail_outlives_no_parent_and_leaves_first() -> None:
    copies = InstantCopies(open_tier(WIDE, capacity=2))
    step(copies, named(WIDE, 6))
    events(copies)
    step(copies, offer((4,) * 4, [7], 0, WIDE[0]), step_id=2)
    removed = events(copies)[0]
    assert removed.block_hashes == [int.from_bytes(unit_hash(PROMPT[:6])[-8:], "big")]


def test_a_name_is_given_to_one_block() -> None:
    copies = InstantCopies(open_tier(WIDE))
    step(copies, named(WIDE, 6))
    events(copies)
    step(copies, named(WIDE, 8, 6), step_id=2)  # 6 is the tail's already
    assert [event.block_size for event in events(copies)] == [8]
    copies.scheduler.pool.check()


def test_an_inner_name_that_is_a_blocks_own_hash_is_not_announced_twice() -> None:
    copies = InstantCopies(open_tier(WIDE))
    step(copies, named(WIDE, 4))
    for path in (PROMPT[:4], (5,) * 4):
        twice = msgspec.structs.replace(inner_hash(path[:2], WIDE[0]), block_hash=unit_hash(PROMPT[:4]))
        whole = msgspec.structs.replace(offer(path, [1], 0, WIDE[0]), inner=[twice])
        step(copies, whole, msgspec.structs.replace(tail_offer(path[:2], 2, WIDE[0]), inner=[twice]))
    stored = [name for event in events(copies) for name in event.block_hashes]
    assert len(stored) == len(set(stored)) == 2
    copies.perform(copies.scheduler.reset(1, Reset(1)))
    assert sorted(name for event in events(copies) for name in event.block_hashes) == sorted(stored)
    copies.scheduler.pool.check()


def test_a_whole_block_with_the_hash_of_an_inner_name_is_declined() -> None:
    copies = InstantCopies(open_tier(WIDE))
    step(copies, named(WIDE, 4, 2))
    taken = msgspec.structs.replace(offer((5,) * 4, [1], 0, WIDE[0]), block_hashes=unit_hash(PROMPT[:2]))
    assert step(copies, taken, step_id=2) == [StepDone(2, 0, 0, 1)]
    assert copies.scheduler.stats()["declined_not_a_chain"] == 1


def test_a_place_in_a_block_has_one_inner_name() -> None:
    copies = InstantCopies(open_tier(WIDE))
    names = [msgspec.structs.replace(inner_hash(PROMPT[:2], WIDE[0]), block_hash=bytes([n]) * 32) for n in (1, 2)]
    assert step(copies, msgspec.structs.replace(named(WIDE, 4), inner=names)) == [StepDone(1, 0, 0, 1)]
    assert copies.scheduler.stats()["declined_bad_inner"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"units": 0},
        {"units": 4},
        {"block": 1},
        {"block": -1},
        {"block_hash": b"short"},
        {"parent": None},
        {"parent": b"short"},
    ],
)
def test_an_inner_name_that_lies_nowhere_declines_the_offer(change: dict[str, object]) -> None:
    copies = InstantCopies(open_tier(WIDE))
    good = msgspec.structs.replace(inner_hash(PROMPT[:2], WIDE[0]), **change)
    offered = msgspec.structs.replace(named(WIDE, 4), inner=[good])
    assert step(copies, offered) == [StepDone(1, 0, 0, 1)]
    assert copies.scheduler.stats()["declined_bad_inner"] == 1


def test_a_window_has_no_inner_names() -> None:
    model = groups(("full_attention", 8), ("sliding_window", 8, 16))
    copies = InstantCopies(open_tier(model))
    offered = with_inner(offer(PROMPT, [0, 1], 0, model[1]), PROMPT, model[1], 0, [2])
    assert step(copies, offered, tail_offer(PROMPT[:6], 9, model[1])) == [StepDone(1, 0, 0, 3)]
    assert copies.scheduler.stats()["declined_bad_inner"] == 3
    step(copies, offer(PROMPT, [0, 1], 0, model[0]), offer(PROMPT, [2, 3], 0, model[1]), step_id=2)
    assert fine(copies, 7).blocks == 4


def test_names_and_tail_leave_with_a_lost_block() -> None:
    copies = HeldCopies(open_tier(WIDE))
    step(copies, named(WIDE, 6, 1, 2))
    copies.complete()
    said = {key for event in events(copies) for key in event.block_hashes}
    load(copies, fine(copies, 6), 6, 2)
    copies.fail(lost=[copies.pending[0].slots[0]])
    gone = events(copies)
    assert {key for event in gone for key in event.block_hashes} == said
    assert len(said) == 4
    assert copies.scheduler.stats()["blocks_resident"] == 0
    copies.scheduler.pool.check()
