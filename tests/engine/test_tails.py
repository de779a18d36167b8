"""Prefixes that end inside a block: what the planner offers of them, and what the tier then serves."""

from array import array

import pytest

from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.engine.identity import Identity, MediaItem
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.spans import RequestView
from kvevents_service.engine.trace import chain_hashes
from kvevents_service.testing import InstantCopies
from kvevents_service.wire.control import GroupSpec, InnerHash, Lookup, Offer, Step
from kvevents_service.wire.packing import unpack_int32

UNIT = 4
GROUPS = (GroupSpec(0, "full_attention", 16), GroupSpec(1, "mamba", 16))
WHO = Identity(1, "ada", "tenant", (MediaItem("cat", 22, 4),))


def view_of(tokens: int, fine_tokens: int) -> RequestView:
    ids = array("i", range(tokens))
    return RequestView("r", chain_hashes(ids, UNIT, [], WHO), ids, WHO, fine_tokens)


def make_planner() -> EagerPlanner:
    book = OfferBook(lambda blocks: None, lambda blocks: None, 64)
    return EagerPlanner(GROUPS, UNIT, book)


def offers_of(planner: EagerPlanner) -> list[Offer]:
    return planner.plan().offers()


def test_the_block_a_prompt_ends_in_is_offered_when_it_finishes() -> None:
    planner, view = make_planner(), view_of(31, 28)
    planner.admit(view, [[5, 6], [None, None]])
    planner.finish("r", 30)
    whole, tail = offers_of(planner)
    assert (list(unpack_int32(whole.block_ids)), whole.inner) == ([5], None)
    assert (tail.block_hashes, list(unpack_int32(tail.block_ids))) == (b"", [6])
    assert list(unpack_int32(tail.token_ids)) == list(range(16, 28))
    assert tail.parent == view.unit_hashes[3]
    assert tail.inner == [InnerHash(0, 3, view.unit_hashes[6], view.unit_hashes[5], ("ada", ("cat", -2)))]
    assert (tail.lora_id, tail.lora_name) == (1, "ada")


def test_a_prompt_that_ended_in_a_block_that_is_full_by_now_names_it() -> None:
    planner, view = make_planner(), view_of(40, 20)
    planner.admit(view, [[5, 6, 7], [None, None, None]])
    planner.confirm("r", 33)
    (whole,) = offers_of(planner)
    assert whole.inner == [InnerHash(1, 1, view.unit_hashes[4], view.unit_hashes[3], ("ada",))]
    planner.finish("r", 33)
    assert offers_of(planner) == []


@pytest.mark.parametrize(("fine_tokens", "confirmed"), [(0, 30), (28, 27), (16, 30), (32, 33)])
def test_there_is_no_tail(fine_tokens: int, confirmed: int) -> None:
    """None is wanted; it is not computed; or the prompt ends where a block does."""
    planner = make_planner()
    planner.admit(view_of(40, fine_tokens), [[5, 6, 7], [None, None, None]])
    planner.finish("r", confirmed)
    offers = offers_of(planner)
    assert offers
    assert all(offer.block_hashes and offer.inner is None for offer in offers)


def test_what_is_planned_is_served() -> None:
    planner, view = make_planner(), view_of(31, 28)
    copies = InstantCopies(OffloadScheduler(TierSpec("CPU", 8, 32, GROUPS, UNIT)))
    copies.scheduler.hello(1, 64)
    planner.admit(view, [[5, 6], [None, 9]])
    planner.confirm("r", 30)
    planner.hand_off("r", 1, 28, 9)
    planner.finish("r", 30)
    (done,) = copies.perform(copies.scheduler.step(1, Step(1, offers_of(planner)), 0.0))
    assert (done.stored, done.declined) == (3, 0)  # type: ignore[union-attr]
    lookup = Lookup(1, "s", b"".join(view.unit_hashes), fine=True)
    assert copies.scheduler.lookup(1, lookup, 0.0).blocks == 7
