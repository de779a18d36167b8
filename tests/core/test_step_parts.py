"""Long steps, in parts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models import Groups, groups
from core.prompts import Path, named_offers, offer
from core.test_hybrid import open_tier, step
from core.test_inner import PROMPT, events, fine
from kvevents_service.core.step_parts import StepParts, step_blocks
from kvevents_service.errors import ControlError
from kvevents_service.testing import HeldCopies, InstantCopies
from kvevents_service.wire.control import Offer, Step, StepDone
from kvevents_service.wire.events import BlockStored

PLAIN = groups(("full_attention", 2))
WIDE = groups(("full_attention", 8))
MANY = groups(("full_attention", 4), ("sliding_window", 2, 5))
LONG: Path = (0,) * 24


def named(model: Groups, path: Path, ends: set[int]) -> list[Offer]:
    ids = iter(range(1000))
    return [one for group in model for one in named_offers(path, group, 0, ends, ids)]


def taken(copies: HeldCopies, whole: Step, blocks: int) -> tuple[list[Step], list[StepDone]]:
    """The step in parts of so many blocks, and what a session would answer."""
    copies.scheduler.tier.limits = copies.scheduler.tier.limits._replace(step_blocks=blocks)
    long = copies.scheduler.long_step(1, whole)
    assert long is not None
    parts, answers = [], []
    for part in long.parts(blocks):
        parts.append(part)
        for done in copies.perform(copies.scheduler.step(1, part, 0.0, void=long.void)):
            assert isinstance(done, StepDone)
            answers.append(long.ended(done))
    return parts, [done for done in answers if done is not None]


def told(copies: HeldCopies) -> dict[int, tuple]:
    """Everything that was said of each hash."""
    found = {}
    for event in events(copies):
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        for place, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[place * event.block_size : (place + 1) * event.block_size])
            extra = event.extra_keys[place] if event.extra_keys else None
            found[event.group_idx, name] = (parent, tokens, extra, event.lora_name, event.block_size)
            parent = name
    return found


@given(
    model=st.sampled_from([PLAIN, WIDE, MANY]),
    paths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    ends=st.sets(st.integers(0, 23)),
    blocks=st.integers(1, 7),
)
def test_parts_store_what_the_whole_step_would_have(
    model: Groups, paths: list[int], ends: set[int], blocks: int
) -> None:
    offers = [one for units in paths for one in named(model, (PROMPT * 3)[:units], ends)]
    whole = Step(7, offers, ["a"], ["b"])
    if step_blocks(whole) <= blocks:
        return
    at_once, in_parts = InstantCopies(open_tier(model, 200)), InstantCopies(open_tier(model, 200))
    (done,) = at_once.perform(at_once.scheduler.step(1, whole, 0.0))
    parts, answers = taken(in_parts, whole, blocks)
    assert answers == [done]
    assert told(in_parts) == told(at_once)
    assert all(step_blocks(part) <= blocks for part in parts)
    assert len(parts) <= -(-step_blocks(whole) // blocks) + len(offers)
    assert [part.finished for part in parts[:-1]] == [[]] * (len(parts) - 1)
    assert (parts[-1].finished, parts[-1].preempted) == (["a"], ["b"])


def test_a_hit_inside_a_block_of_a_later_part() -> None:
    copies = InstantCopies(open_tier(WIDE))
    _, (done,) = taken(copies, Step(1, named(WIDE, (PROMPT * 3)[:22], {10, 13})), 1)
    assert done == StepDone(1, 6, 0, 0)
    assert fine(copies, 7).blocks == 4
    names = {event.block_size for event in events(copies) if isinstance(event, BlockStored)}
    assert names == {8, 2}


def test_a_short_step_is_not_cut() -> None:
    copies = InstantCopies(open_tier(PLAIN, step_blocks=12))
    assert copies.scheduler.long_step(1, Step(1, [offer(LONG[:12], list(range(12)))])) is None
    assert copies.scheduler.long_step(1, Step(1, [offer(LONG[:13], list(range(13)))])) is not None


def test_a_bad_block_id_anywhere_refuses_all_of_it() -> None:
    copies = InstantCopies(open_tier(PLAIN, step_blocks=2))
    offers = [offer(LONG, list(range(24))), offer(LONG[:1], [1000])]
    with pytest.raises(ControlError, match=r"offers\.block_ids"):
        copies.scheduler.long_step(1, Step(1, offers))


def test_a_faulty_offer_is_declined_as_a_whole() -> None:
    copies = InstantCopies(open_tier(PLAIN))
    bad = msgspec.structs.replace(offer(LONG, list(range(24))), lora_id=-1)
    parts, answers = taken(copies, Step(1, [bad, offer(LONG[:5], list(range(5)))]), 4)
    assert [step_blocks(part) for part in parts] == [24, 4, 1]
    assert answers == [StepDone(1, 5, 0, 24)]
    assert copies.scheduler.stats()["declined_bad_lora"] == 24


def test_a_hash_that_repeats_is_seen_across_parts() -> None:
    copies = InstantCopies(open_tier(PLAIN))
    good = offer(LONG, list(range(24)))
    bad = msgspec.structs.replace(good, block_hashes=good.block_hashes[:-32] + good.block_hashes[:32])
    _, answers = taken(copies, Step(1, [bad]), 4)
    assert answers == [StepDone(1, 0, 0, 24)]
    assert copies.scheduler.stats()["declined_not_a_chain"] == 24


@pytest.mark.parametrize("gone", ["rank", "session"])
def test_what_is_left_is_declined_once_memory_has_gone(gone: str) -> None:
    """A rank that is back has other bytes in its blocks."""
    copies = InstantCopies(open_tier(PLAIN, step_blocks=8))
    scheduler = copies.scheduler
    long = scheduler.long_step(1, Step(1, [offer(LONG, list(range(24)))], ["r"]))
    assert long is not None
    first, second, third = long.parts(8)
    assert copies.perform(scheduler.step(1, first, 0.0, void=long.void)) == [StepDone(long.part_id, 8, 0, 0)]
    scheduler.rank_gone(1) if gone == "rank" else scheduler.goodbye(1)
    scheduler.hello(1, 1000)
    for part in (second, third):
        assert copies.perform(scheduler.step(1, part, 0.0, void=long.void)) == [StepDone(long.part_id, 0, 0, 8)]
    assert scheduler.stats()["declined_ranks_absent"] == 16
    assert step(copies, offer(LONG, list(range(24)))) == [StepDone(1, 16, 8, 0)]


def test_the_end_is_that_of_the_last_copy() -> None:
    copies = HeldCopies(open_tier(PLAIN))
    _, answers = taken(copies, Step(3, [offer(LONG, list(range(24)))]), 10)
    assert (answers, len(copies.pending)) == ([], 3)


def test_a_long_step_is_not_kept_when_it_is_over() -> None:
    copies = InstantCopies(open_tier(PLAIN))
    taken(copies, Step(3, [offer(LONG, list(range(24)))]), 10)
    assert not copies.scheduler._long_steps


def test_ends_are_summed_whatever_their_order() -> None:
    long = StepParts(Step(3, [offer(LONG, list(range(24)))]), open_tier(PLAIN).tier.spec, 1)
    parts = long.parts(10)
    next(parts)
    assert long.ended(StepDone(3, 10, 0, 0)) is None
    assert [step_blocks(part) for part in parts] == [10, 4]
    assert long.ended(StepDone(3, 0, 1, 3)) is None
    assert long.ended(StepDone(3, 1, 2, 7)) == StepDone(3, 11, 3, 10)
