"""A cut is what could be loaded when it was taken, whatever happens to the pool afterwards."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.prompts import FULL, LATENT
from kvevents_service.core import stretches
from kvevents_service.core.cut import PoolCut
from kvevents_service.core.frozen_metas import FrozenMetas
from kvevents_service.core.metadata import BlockStoreMeta, snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.rows import joined
from kvevents_service.core.slots import NO_SLOT, PENDING, READY
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.packing import pack_int32

CHAIN = make_chain(range(20), 2)


def meta_of(chain: Chain, group: int = 0) -> BlockStoreMeta:
    offer = chain.offer(range(len(chain.hashes)), group=group)
    return snapshot(offer, (FULL, LATENT)[group], "CPU", 32)


def store(pool: BlockPool, chain: Chain, group: int = 0) -> list[int]:
    parent = None if chain.parent is None else pool.slot_of(group, chain.parent)
    slots = pool.allocate(meta_of(chain, group), list(chain.hashes), parent).slots
    pool.commit(slots)
    return slots


def names(runs: list[BlockStoreMeta]) -> list[bytes]:
    return [run.hash_at(place) for run in runs for place in range(run.blocks)]


def test_a_cut_that_is_read_late_keeps_what_left_twice_since_and_one_that_is_gone_keeps_nothing() -> None:
    pool = BlockPool(10, 1)
    store(pool, CHAIN)
    first = pool.cut()
    others = [make_chain(range(start, start + 12), 2) for start in (100, 200)]
    store(pool, others[0])
    second = pool.cut()
    store(pool, others[1])
    assert list(first.runs()) == [meta_of(CHAIN)]
    assert set(names(list(second.runs()))) == {*CHAIN.hashes[:4], *others[0].hashes}
    assert set(names(list(pool.cut().runs()))) == set(pool.ready_hashes(0))
    del first, second
    pool.clear()
    assert pool._frozen == []


def test_neighbours_of_one_snapshot_are_one_run() -> None:
    pool = BlockPool(16, 1)
    store(pool, CHAIN)
    assert list(pool.cut().runs()) == [meta_of(CHAIN)]


def test_what_is_pending_is_left_out() -> None:
    pool = BlockPool(16, 1)
    store(pool, CHAIN.part(0, 2))
    pool.allocate(meta_of(CHAIN.part(2)), list(CHAIN.hashes[2:]), pool.slot_of(0, CHAIN.hashes[1]))
    assert names(list(pool.cut().runs())) == list(CHAIN.hashes[:2])


def test_a_run_that_lost_its_end_is_shorter() -> None:
    pool = BlockPool(10, 1)
    store(pool, CHAIN)
    other = make_chain(range(90, 96), 2)
    store(pool, other)  # evicts three leaves
    (new, left) = pool.cut().runs()
    assert (left, new) == (meta_of(CHAIN).part(0, 7), meta_of(other))


def test_a_window_that_lost_its_middle_is_two_runs() -> None:
    group = GroupSpec(0, "sliding_window", 2, 8)
    pool = BlockPool(3, 1)
    meta = snapshot(CHAIN.part(0, 3).offer(range(3)), group, "CPU", 32)
    slots = pool.allocate(meta, list(CHAIN.hashes[:3]), None).slots
    pool.commit(slots)
    pool.touch_all([slots[0], slots[2]])
    other = make_chain(range(90, 92), 2)
    pool.commit(pool.allocate(snapshot(other.offer([0]), group, "CPU", 32), list(other.hashes), None).slots)
    assert [run for run in pool.cut().runs() if run.hash_at(0) in CHAIN.hashes] == [
        meta.part(2, 3),
        meta.part(0, 1),
    ]


def test_names_inside_a_block_come_behind_it_and_leave_with_it() -> None:
    group = GroupSpec(0, "full_attention", 4)
    chain, units = make_chain(range(12), 4), make_chain(range(12), 2)
    offer = chain.part(0, 2).offer(range(2))
    block = snapshot(offer, group, "CPU", 32)
    inside = inner_meta(group, units, 0)
    tail = inner_meta(group, units, 4, chain.hashes[1])
    pool = BlockPool(4, 1)
    slots = pool.allocate(block, list(chain.hashes[:2]), None).slots
    assert pool.add_name(slots[0], inside)
    pending = pool.cut()
    pool.commit(slots)
    tail_slots = pool.allocate(tail, [tail.block_hashes], slots[1]).slots
    pool.commit(tail_slots)
    cut = pool.cut()
    assert sum(blocks for blocks, _ in cut.sizes()) >= 4
    pool.clear()
    assert (list(pending.runs()), list(pool.cut().runs())) == ([], [])
    assert list(cut.runs()) == [block, tail, inside]


def inner_meta(group: GroupSpec, units: Chain, place: int, parent: bytes | None = None) -> BlockStoreMeta:
    tokens = pack_int32(units.token_ids[2 * place : 2 * place + 2])
    return BlockStoreMeta(group, "CPU", 32, units.hashes[place], tokens, parent, None, None, None, inner=True)


def test_later_changes_do_not_reach_a_cut() -> None:
    pool = BlockPool(20, 2)
    store(pool, CHAIN)
    store(pool, CHAIN, group=1)
    cut = pool.cut()
    pool.clear()
    store(pool, make_chain(range(50, 70), 2))
    assert names(list(cut.runs())) == [*CHAIN.hashes, *CHAIN.hashes]
    assert cut.sizes() == [(10, 2), (10, 2)]


def test_an_empty_pool_has_no_runs() -> None:
    cut = BlockPool(4, 2).cut()
    assert (list(cut.runs()), cut.sizes()) == ([], [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=12), st.integers(3, 12))
def test_any_pool_comes_back_whole_and_parents_first(stores: list[tuple[int, int]], capacity: int) -> None:
    pool = BlockPool(capacity, 1)
    for family, length in stores:
        chain = make_chain(range(100 * family, 100 * family + 2 * length), 2)
        known = pool.known_prefix(0, chain.hashes)
        if known < length:
            store(pool, chain.part(known))
    runs = list(pool.cut().runs())
    assert sorted(names(runs)) == sorted(pool.ready_hashes(0))
    seen: set[bytes | None] = {None}
    for run in runs:
        assert run.parent_block_hash in seen
        seen.update(names([run]))


METAS = [meta_of(make_chain(range(start, start + 8), 2)) for start in (0, 50)]


places = st.tuples(
    st.sampled_from([0, 0, 0, 1]), st.integers(0, 3), st.sampled_from([READY] * 5 + [PENDING]), st.booleans()
)
LINKED = [(0, place, READY, True) for place in range(4)]
LOOSE = [(0, place, READY, False) for place in range(4)]


def columns_of(drawn: list[tuple[int, int, int, bool]]) -> PoolCut:
    """A cut of these slots. The last of each says whether the block before is its parent, where it can be."""
    parents = array("i", [NO_SLOT] * len(drawn))
    for slot in range(1, len(drawn)):
        (before, place, state, _), (which, own, own_state, link) = drawn[slot - 1 : slot + 1]
        if link and state == own_state == READY and (own == 0 or (which, own) == (before, place + 1)):
            parents[slot] = slot - 1
    metas = [METAS[which] for which, *_ in drawn]
    positions = array("i", [place for _, place, *_ in drawn])
    return PoolCut([], {}, bytes(state for *_, state, _ in drawn), FrozenMetas([*metas]), positions, parents)


@pytest.mark.parametrize("quick", [True, False])
@given(st.lists(places, max_size=12))
@example(LINKED)
@example(LOOSE)
@example([*LINKED[:2], (1, 2, READY, False), LINKED[3]])
@example([*LOOSE[:2], (1, 2, READY, False), LOOSE[3]])
@example([*LINKED[:3], *LINKED])
@example([*LINKED, (1, 0, PENDING, True), *LINKED])
def test_every_slot_is_read_for_itself_whatever_lies_beside_it(
    quick: bool, drawn: list[tuple[int, int, int, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not quick:
            patch.setattr(stretches, "numpy", None)
        told = names(list(columns_of(drawn).runs()))
    wanted = [METAS[which].hash_at(place) for which, place, state, _ in drawn if state == READY]
    assert sorted(told) == sorted(wanted)


def test_runs_that_continue_each_other_in_slots_are_one_row() -> None:
    pool = BlockPool(32, 1)
    other = make_chain(range(90, 96), 2)
    store(pool, CHAIN.part(0, 4))
    store(pool, CHAIN.part(4, 7))
    store(pool, other)
    store(pool, CHAIN.part(7))
    rows = list(pool.cut().rows())
    assert [(len(row.runs), row.blocks) for row in rows] == [(2, 7), (1, 3), (1, 3)]
    assert [(len(row.runs), row.blocks) for row in joined(rows)] == [(3, 10), (1, 3)]


def test_a_run_that_is_cut_short_by_the_next_is_told_short() -> None:
    whole, rest = meta_of(CHAIN), meta_of(CHAIN.part(4))
    parents, positions = array("i", range(-1, 9)), array("i", [*range(4), *range(6)])
    cut = PoolCut([], {}, bytes((READY,)) * 10, FrozenMetas([*[whole] * 4, *[rest] * 6]), positions, parents)
    assert [*cut.runs()] == [whole.part(0, 4), rest]


@pytest.mark.parametrize("quick", [True, False])
def test_many_slots_are_looked_at_in_steps(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "_STEP", 3)
    if not quick:
        monkeypatch.setattr(stretches, "numpy", None)
    pool = BlockPool(32, 1)
    for start in (0, 4, 5):
        store(pool, CHAIN.part(start, {0: 4, 4: 5, 5: 10}[start]))
    assert [(len(row.runs), row.blocks) for row in pool.cut().rows()] == [(3, 10)]


def test_chains_that_grew_together_are_told_one_by_one() -> None:
    pool = BlockPool(64, 1)
    chains = [make_chain(range(100 * start, 100 * start + 12), 2) for start in (1, 2, 3)]
    for step in range(3):
        for chain in chains:
            store(pool, chain.part(2 * step, 2 * step + 2))
    told = [*joined(pool.cut().rows())]
    assert sorted(row.blocks for row in told) == [6, 6, 6]
    assert [b"".join(run.block_hashes for run in row.runs) for row in told] == [
        chain.packed for chain in reversed(chains)
    ]
