"""A cut is what could be loaded when it was taken, whatever happens to the pool afterwards."""

from array import array

from hypothesis import example, given
from hypothesis import strategies as st

from core.prompts import FULL, LATENT
from kvevents_service.core.cut import PoolCut
from kvevents_service.core.metadata import BlockStoreMeta, snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.slots import PENDING, READY
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
    (left, new) = pool.cut().runs()
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
    assert list(pool.cut().runs())[:2] == [meta.part(0, 1), meta.part(2, 3)]


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
    assert list(cut.runs()) == [block, inside, tail]


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
    assert names(runs) == pool.ready_hashes(0)
    seen: set[bytes | None] = {None}
    for run in runs:
        assert run.parent_block_hash in seen
        seen.update(names([run]))


METAS = [meta_of(make_chain(range(start, start + 8), 2)) for start in (0, 50)]


def orders(slots: int) -> st.SearchStrategy[list[int]]:
    """Some of the slots, nearly in order or not at all."""
    return st.permutations(range(slots)) | st.sets(st.sampled_from(range(max(slots, 1))), max_size=slots).map(
        sorted
    )


places = st.tuples(st.sampled_from([0, 0, 0, 1]), st.integers(0, 3), st.sampled_from([READY] * 5 + [PENDING]))


WHOLE = [(0, 0, READY), (0, 1, READY), (0, 2, READY), (0, 3, READY)]


@given(st.lists(places, max_size=12).flatmap(lambda columns: st.tuples(st.just(columns), orders(len(columns)))))
@example(([(0, 0, READY), (0, 1, PENDING), (0, 2, READY), (0, 3, READY)], [0, 1, 2, 3]))
@example(([(0, 0, READY), (1, 1, READY), (0, 2, READY), (0, 3, READY)], [0, 1, 2, 3]))
@example((WHOLE, [0, 1, 2, 3]))
@example((WHOLE, [0, 2, 1, 3]))
@example((WHOLE, [1, 2, 3]))
@example((WHOLE, [0, 1]))
def test_every_slot_is_read_for_itself_whatever_lies_beside_it(
    drawn: tuple[list[tuple[int, int, int]], list[int]],
) -> None:
    columns, slots = drawn
    metas = [METAS[which] for which, _, _ in columns]
    positions = array("i", [position for _, position, _ in columns])
    cut = PoolCut([slots], [[]], {}, bytes(state for _, _, state in columns), [*metas], positions)
    indexed = [columns[slot] for slot in slots]
    wanted = [METAS[which].hash_at(position) for which, position, state in indexed if state == READY]
    assert names(list(cut.runs())) == wanted
