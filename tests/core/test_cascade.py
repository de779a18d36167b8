"""Two tiers: what is demoted before it leaves, what a hit is read from, and what each tier says."""

from __future__ import annotations

from typing import Any

from kvevents_service.core.cascade import Cascade
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun
from kvevents_service.core.slots import READY
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.testing import Chain, HeldCopies, make_chain
from kvevents_service.wire.control import GroupSpec, Hit, Load, Lookup, Step, StepDone
from kvevents_service.wire.packing import pack_int32

ONE = (GroupSpec(0, "full_attention", 2),)
ABCD = make_chain(range(8), 2)
EFGH = make_chain(range(50, 58), 2)
IJ = make_chain(range(90, 94), 2)


def two_tiers(front: int = 4, back: int = 8, model: tuple[GroupSpec, ...] = ONE, **limits: Any) -> Cascade:
    """All of the front tier is headroom, unless said otherwise: a step demotes whatever has been stored before."""
    bounds = Limits(**{"headroom_divisor": 1, **limits})
    unit = min(group.block_size for group in model)
    specs = [TierSpec(medium, size, 32, model, unit) for medium, size in (("CPU", front), ("STORAGE", back))]
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
    """Two tiers that hold this chain behind only, and IJ in front."""
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
