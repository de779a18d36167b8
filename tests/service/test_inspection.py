"""An inspection of more than one piece: what it says is of its beginning, whatever happens meanwhile."""

import pytest
from core.models import UNIT

from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.service.inspection import PIECE_BLOCKS, Inspection
from kvevents_service.testing import HeldCopies, InstantCopies, make_chain
from kvevents_service.wire.control import GroupSpec, Inspected, Lookup, Reset, Step

TWO = (GroupSpec(0, "full_attention", 2, main=True), GroupSpec(1, "sliding_window", 2, 8))
PART = 1000
CHAIN = make_chain(range(2 * (2 * PIECE_BLOCKS + PART)), 2)
BLOCKS = len(CHAIN.hashes)
OTHER = make_chain(range(1, 2 * PART + 1), 2)


def filled() -> InstantCopies:
    copies = InstantCopies(OffloadScheduler(TierSpec("CPU", 2 * BLOCKS, 32, TWO, UNIT)))
    copies.scheduler.hello(1, BLOCKS)
    for start in range(0, BLOCKS, PART):
        part = CHAIN.part(start, min(start + PART, BLOCKS))
        copies.perform(copies.scheduler.step(1, Step(1, [part.offer(range(len(part.hashes)))]), 0.0))
    copies.perform(copies.scheduler.step(1, Step(2, [OTHER.offer(range(PART), group=1)]), 0.0))
    return copies


def shelves(inspected: Inspected) -> dict[tuple[str, int], set[bytes]]:
    return {
        (shelf.medium, shelf.group): {
            shelf.block_hashes[at : at + 8] for at in range(0, len(shelf.block_hashes), 8)
        }
        for shelf in inspected.residents
    }


@pytest.mark.parametrize("meanwhile", ["nothing", "reset", "more"])
def test_what_it_says_is_as_of_its_number_whatever_comes_in_between(meanwhile: str) -> None:
    copies = filled()
    scheduler = copies.scheduler
    pending = HeldCopies(scheduler)  # what is not there yet is not told
    pending.perform(scheduler.step(1, Step(3, [make_chain([7] * 8, 2).offer(range(4))]), 0.0))
    inspection = Inspection(5, 9, {"blocks_resident": 1}, scheduler.tiers)
    copies.perform(scheduler.step(1, Step(4, [make_chain([9] * 8, 2).offer(range(4))]), 0.0))
    pieces = 1
    while inspection.go_on():
        pieces += 1
        assert scheduler.lookup(1, Lookup(pieces, "r", CHAIN.packed, 0.0), 0.0).call_id == pieces
        if meanwhile == "reset":
            copies.perform(scheduler.reset(1, Reset(1)))
        elif meanwhile == "more":
            copies.perform(scheduler.step(1, Step(4, [make_chain([pieces] * 800, 2).offer(range(400))]), 0.0))
    assert pieces >= 3
    inspected = inspection.inspected()
    assert (inspected.call_id, inspected.next_seq, inspected.hash_bytes) == (5, 9, 8)
    assert inspected.stats == {"blocks_resident": 1}
    ours = {name[-8:] for name in CHAIN.hashes}, {name[-8:] for name in OTHER.hashes}
    assert shelves(inspected) == {("CPU", 0): ours[0], ("CPU", 1): ours[1]}
    assert sum(len(shelf.block_hashes) for shelf in inspected.residents) == 8 * (BLOCKS + PART)


def test_the_rest_can_be_had_at_once_and_of_no_tier_there_is_nothing() -> None:
    inspection = Inspection(5, 9, {}, filled().scheduler.tiers)
    assert inspection.go_on()
    assert len(shelves(inspection.inspected())["CPU", 0]) == BLOCKS
    assert Inspection(5, 9, {}, ()).inspected() == Inspected(5, 9, 8, {}, [])
