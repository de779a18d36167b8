"""The block pool: slots, prefix closure, pins and who may leave."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL, LATENT
from kvevents_service.core.metadata import BlockStoreMeta, StoreRun, snapshot
from kvevents_service.core.pool import Allocation, BlockPool
from kvevents_service.core.slots import DOOMED, FREE, ORPHANED, PENDING, READY
from kvevents_service.testing import Chain, make_chain

ABCD = make_chain(range(8), 2)
EF = make_chain(range(50, 54), 2)


def meta_of(chain: Chain) -> BlockStoreMeta:
    return snapshot(chain.offer(range(len(chain.hashes))), FULL, "CPU", 32)


def allocate(pool: BlockPool, chain: Chain, parent: int | None = None) -> Allocation:
    return pool.allocate(meta_of(chain), list(chain.hashes), parent)


def ready_pool(*chains: Chain, capacity: int = 4) -> BlockPool:
    pool = BlockPool(capacity, 1)
    for chain in chains:
        pool.commit(allocate(pool, chain).slots)
    return pool


def states(pool: BlockPool, slots: list[int]) -> set[int]:
    return {pool.state_of(slot) for slot in slots}


def test_a_block_is_pending_then_ready_then_free() -> None:
    pool = BlockPool(4, 1)
    slots, evicted = allocate(pool, ABCD)
    assert (states(pool, slots), evicted, pool.free_slots) == ({PENDING}, [], 0)
    pool.commit(slots)
    assert states(pool, slots) == {READY}
    assert pool.clear() == [(0, list(ABCD.hashes[::-1]), False)]
    assert states(pool, slots) == {FREE}


def test_a_prompt_lies_in_consecutive_slots_where_it_can() -> None:
    """One long copy instead of many short ones; also in the slots of a chain that left, leaves first."""
    pool = ready_pool(ABCD)
    assert [pool.slot_of(0, name) for name in ABCD.hashes] == [0, 1, 2, 3]
    assert allocate(pool, EF).slots == [2, 3]


def test_an_abandoned_block_was_never_there() -> None:
    pool = BlockPool(4, 1)
    slots = allocate(pool, ABCD).slots
    pool.abandon(slots)
    pool.check()
    assert (len(pool), pool.free_slots) == (0, 4)


def test_an_orphan_keeps_its_slot_until_its_copy_has_ended() -> None:
    pool = BlockPool(4, 1)
    slots = allocate(pool, ABCD).slots
    assert pool.clear() == []
    assert states(pool, slots) == {ORPHANED}
    assert allocate(pool, EF) == ([], [])
    pool.abandon(slots)
    assert pool.free_slots == 4


def test_a_doomed_block_waits_for_its_pin() -> None:
    pool = ready_pool(ABCD)
    tail = pool.slot_of(0, ABCD.hashes[1])
    assert tail is not None
    pool.pin(tail)
    pool.clear()
    pool.check()
    assert (pool.count(DOOMED), pool.free_slots) == (2, 2)
    pool.unpin(tail)
    assert pool.free_slots == 4


def test_a_parent_whose_store_failed_waits_for_its_pending_child() -> None:
    pool = BlockPool(4, 1)
    first = allocate(pool, ABCD.part(0, 2)).slots
    second = allocate(pool, ABCD.part(2), first[-1]).slots
    pool.abandon(first)
    assert (pool.count(DOOMED), pool.free_slots) == (2, 0)
    pool.abandon(second)
    pool.check()
    assert pool.free_slots == 4


@pytest.mark.parametrize("known", range(5))
def test_the_known_prefix_is_found(known: int) -> None:
    pool = ready_pool(ABCD.part(0, known)) if known else BlockPool(4, 1)
    assert pool.known_prefix(0, ABCD.hashes) == known
    assert pool.ready_prefix(0, ABCD.packed, 32) == known


def test_a_pending_block_is_known_but_not_ready() -> None:
    pool = ready_pool(ABCD.part(0, 2))
    allocate(pool, ABCD.part(2), pool.slot_of(0, ABCD.hashes[1]))
    assert pool.known_prefix(0, ABCD.hashes) == 4
    assert pool.ready_prefix(0, ABCD.packed, 32) == 2


def test_leaves_leave_first() -> None:
    pool = ready_pool(ABCD)
    assert [name for _, name, _ in allocate(pool, EF).evicted] == [ABCD.hashes[3], ABCD.hashes[2]]
    pool.check()


def test_the_leaf_used_longest_ago_leaves_first() -> None:
    pool = ready_pool(ABCD.part(0, 2), EF)
    tail = pool.slot_of(0, ABCD.hashes[1])
    assert tail is not None
    pool.touch(tail)
    evicted = allocate(pool, make_chain([8] * 6, 2)).evicted
    assert [name for _, name, _ in evicted] == [EF.hashes[1], EF.hashes[0], ABCD.hashes[1]]


def test_a_hit_keeps_the_whole_prefix_young() -> None:
    """Only its last block is touched. When that has left, its parent was still used later than others."""
    pool = ready_pool(ABCD.part(0, 2), EF.part(0, 1), capacity=3)
    tail, other = pool.slot_of(0, ABCD.hashes[1]), pool.slot_of(0, EF.hashes[0])
    assert tail is not None
    assert other is not None
    pool.pin(other)
    pool.touch(tail)
    one, two = make_chain([8] * 2, 2), make_chain([9] * 2, 2)
    assert [name for _, name, _ in allocate(pool, one).evicted] == [ABCD.hashes[1]]
    pool.unpin(other)
    assert [name for _, name, _ in allocate(pool, two).evicted] == [EF.hashes[0]]


def test_a_parent_used_later_than_its_child_does_not_leave_with_it() -> None:
    pool = ready_pool(ABCD.part(0, 2), EF)
    root = pool.slot_of(0, ABCD.hashes[0])
    assert root is not None
    pool.touch(root)
    evicted = allocate(pool, make_chain([8] * 4, 2)).evicted
    assert [name for _, name, _ in evicted] == [ABCD.hashes[1], EF.hashes[1]]


def test_a_new_block_is_younger_than_any_other() -> None:
    first, second, third, fourth = (make_chain([token] * 2, 2) for token in range(4))
    pool = ready_pool(first, second, third, capacity=2)
    assert pool.slot_of(0, third.hashes[0]) == 0
    assert [name for _, name, _ in allocate(pool, fourth).evicted] == list(second.hashes)


def test_a_parent_was_used_when_its_failed_child_was() -> None:
    pool = ready_pool(ABCD.part(0, 1), capacity=3)
    child = allocate(pool, ABCD.part(1, 2), pool.slot_of(0, ABCD.hashes[0])).slots
    pool.commit(allocate(pool, EF.part(0, 1)).slots)
    pool.touch(child[0])
    pool.abandon(child)
    assert [name for _, name, _ in allocate(pool, make_chain([8] * 4, 2)).evicted] == [EF.hashes[0]]


def test_a_pinned_chain_stays() -> None:
    pool = ready_pool(ABCD)
    tail = pool.slot_of(0, ABCD.hashes[2])
    assert tail is not None
    pool.pin(tail)
    slots, evicted = allocate(pool, EF)
    assert (len(slots), [name for _, name, _ in evicted]) == (1, [ABCD.hashes[3]])


def test_a_block_twice_pinned_stays_until_the_second_unpin() -> None:
    pool = ready_pool(ABCD.part(0, 1), capacity=1)
    pool.pin(0)
    pool.pin(0)
    pool.unpin(0)
    assert allocate(pool, EF) == ([], [])
    pool.unpin(0)
    assert allocate(pool, EF.part(0, 1)).slots == [0]


def test_the_parent_is_safe_from_its_own_childs_eviction() -> None:
    pool = ready_pool(ABCD.part(0, 1), capacity=1)
    assert allocate(pool, ABCD.part(1), 0) == ([], [])
    assert pool.slot_of(0, ABCD.hashes[0]) == 0
    assert allocate(pool, EF.part(0, 1)).slots == [0]


def test_a_parent_can_leave_once_its_only_child_was_abandoned() -> None:
    pool = ready_pool(ABCD.part(0, 1), capacity=2)
    child = allocate(pool, ABCD.part(1, 2), pool.slot_of(0, ABCD.hashes[0])).slots
    pool.abandon(child)
    assert len(allocate(pool, EF).slots) == 2


def test_a_pending_block_is_not_evicted() -> None:
    pool = BlockPool(4, 1)
    allocate(pool, ABCD)
    assert allocate(pool, EF) == ([], [])


def test_groups_share_the_slots_and_nothing_else() -> None:
    pool = BlockPool(4, 2)
    chain = ABCD.part(0, 2)
    pool.commit(allocate(pool, chain).slots)
    latent = snapshot(chain.offer([0, 1], group=1), LATENT, "CPU", 32)
    pool.commit(pool.allocate(latent, list(chain.hashes), None).slots)
    assert set(map(pool.slot_of, (0, 0, 1, 1), chain.hashes * 2)) == {0, 1, 2, 3}
    assert pool.clear() == [(group, list(chain.hashes[::-1]), False) for group in (0, 1)]


def test_a_fresh_chain_is_new_and_has_no_repeats() -> None:
    pool = ready_pool(ABCD)
    assert pool.is_fresh_chain(0, list(EF.hashes))
    assert not pool.is_fresh_chain(0, [EF.hashes[0], ABCD.hashes[0]])
    assert not pool.is_fresh_chain(0, [EF.hashes[0]] * 2)


def test_the_chain_that_ends_in_a_slot() -> None:
    pool = ready_pool(ABCD)
    tail = pool.slot_of(0, ABCD.hashes[2])
    assert tail is not None
    chain = pool.chain(tail, 3)
    assert chain is not None
    assert [pool.hash_of(slot) for slot in chain] == list(ABCD.hashes[:3])
    assert pool.chain(tail, 4) is None


def test_each_block_knows_its_own_snapshot() -> None:
    pool = ready_pool(ABCD)
    slot = pool.slot_of(0, ABCD.hashes[2])
    assert slot is not None
    assert pool.meta_of(slot) == meta_of(ABCD.part(2, 3))
    pool.clear()
    assert pool.meta_of(slot) is None


def test_repr_tells_the_live_state() -> None:
    assert repr(ready_pool(EF)) == "<BlockPool 2/4 indexed, 2 free>"


# lost blocks


def test_what_is_forgotten_takes_all_that_is_behind_it_children_first() -> None:
    pool = ready_pool(ABCD, EF, capacity=8)
    b = pool.slot_of(0, ABCD.hashes[1])
    assert b is not None
    assert pool.forget([b]) == [(0, [ABCD.hashes[3], ABCD.hashes[2], ABCD.hashes[1]], False)]
    assert set(pool.ready_hashes(0)) == {ABCD.hashes[0], *EF.hashes}
    assert pool.free_slots == 5
    pool.check()


def test_a_chain_of_several_that_are_forgotten_leaves_once() -> None:
    pool = ready_pool(ABCD)
    slots = [pool.slot_of(0, name) for name in ABCD.hashes]
    assert pool.forget([slots[2], slots[0], slots[1]]) == [(0, list(ABCD.hashes[::-1]), False)]  # type: ignore[list-item]
    assert pool.free_slots == 4
    pool.check()


def test_a_forgotten_block_that_is_pinned_keeps_its_bytes_and_is_not_found() -> None:
    pool = ready_pool(ABCD)
    a, d = (pool.slot_of(0, name) for name in (ABCD.hashes[0], ABCD.hashes[3]))
    assert a is not None
    assert d is not None
    pool.pin(d)
    pool.forget([a])
    assert (pool.state_of(d), pool.free_slots, pool.ready_hashes(0)) == (DOOMED, 0, [])
    assert pool.forget([a, d]) == []
    pool.check()
    pool.unpin(d)
    assert pool.free_slots == 4


def test_what_is_being_written_behind_a_forgotten_block_is_orphaned() -> None:
    pool = ready_pool(ABCD.part(0, 2))
    b = pool.slot_of(0, ABCD.hashes[1])
    assert b is not None
    slots = allocate(pool, ABCD.part(2), b).slots
    assert pool.forget([b]) == [(0, [ABCD.hashes[1]], False)]
    assert states(pool, slots) == {ORPHANED}
    pool.abandon(slots)
    assert pool.free_slots == 3
    pool.check()


# what is behind a block


def test_what_branches_off_is_found_behind_a_block_and_siblings_that_left_are_not() -> None:
    pool = BlockPool(12, 1)
    trunk = ABCD.part(0, 2)
    pool.commit(allocate(pool, trunk).slots)
    tail = pool.slot_of(0, trunk.hashes[1])
    assert tail is not None
    twigs = [make_chain((*range(4), *range(100 * n, 100 * n + 4)), 2).part(2) for n in (1, 2, 3)]
    for twig in twigs:
        pool.commit(allocate(pool, twig, tail).slots)
    pool.check()
    middle = pool.slot_of(0, twigs[1].hashes[0])
    assert middle is not None
    assert pool.forget([middle]) == [(0, list(twigs[1].hashes[::-1]), False)]
    pool.check()
    newest = allocate(pool, twigs[1], tail).slots
    pool.check()
    pool.abandon(newest)
    pool.check()
    (gone,) = pool.forget([tail])
    assert sorted(gone.hashes) == sorted([trunk.hashes[1], *twigs[0].hashes, *twigs[2].hashes])
    for twig in (twigs[0], twigs[2]):
        assert gone.hashes.index(twig.hashes[1]) < gone.hashes.index(twig.hashes[0])
    assert gone.hashes[-1] == trunk.hashes[1]
    assert pool.ready_names(0) == [trunk.hashes[0]]
    pool.check()


def test_leaves_are_forgotten_first_and_tails_are_leaves() -> None:
    pool = BlockPool(8, 1)
    slots = allocate(pool, ABCD).slots
    tail = inside(b"t", ABCD.hashes[3])
    pool.commit([*slots, *pool.allocate(tail, [b"t"], slots[3]).slots])
    pool.commit(pool.allocate(inside(b"u", None), [b"u"], None).slots)
    assert pool.forget_leaves(1) == (1, [(0, [b"t"], True)])
    assert pool.forget_leaves(1) == (1, [(0, [ABCD.hashes[3]], False)])
    assert pool.forget_leaves(9) == (4, [(0, [b"u"], True), (0, list(ABCD.hashes[2::-1]), False)])
    assert pool.empty
    assert pool.free_slots == 8
    assert pool.forget_leaves(9) == (0, [])
    pool.check()


def test_a_long_chain_is_gone_through_once_however_small_the_slices() -> None:
    class Counting(BlockPool):
        looks = 0

        def _children_of(self, slot: int) -> Iterator[int]:
            self.looks += 1
            return super()._children_of(slot)

    long = make_chain(range(400), 2)
    pool = Counting(200, 1)
    pool.commit(allocate(pool, long).slots)
    while not pool.empty:
        pool.forget_leaves(5)
    assert pool.looks <= 2 * 200


def named(names: list[bytes], parent: bytes | None) -> BlockStoreMeta:
    packed, tokens = b"".join(names), bytes(8 * len(names))
    return msgspec.structs.replace(meta_of(EF), block_hashes=packed, token_ids=tokens, parent_block_hash=parent)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=12), st.integers(1, 9), st.data())
def test_a_forest_is_forgotten_in_slices_each_block_behind_those_behind_it(
    branches: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    pool, parents = BlockPool(64, 1), dict[bytes, bytes | None]()
    for number, (above, blocks) in enumerate(branches):
        parent = None if not parents else list(parents)[above % len(parents)]
        above_slot = None if parent is None else pool.slot_of(0, parent)
        names = [bytes((number, block)) * 16 for block in range(blocks)]
        slots = pool.allocate(named(names, parent), names, above_slot).slots
        parents |= dict(zip(names, [parent, *names], strict=False))
        if data.draw(st.booleans()) and (above_slot is None or pool.state_of(above_slot) == READY):
            pool.commit(slots)
    while not pool.empty:
        before, left = len(pool), {name for name in parents if pool.slot_of(0, name) is not None}
        forgotten, _ = pool.forget_leaves(most)
        now = {name for name in left if pool.slot_of(0, name) is not None}
        assert forgotten == before - len(pool) == min(most, before)
        assert all(parents[name] in now for name in now if parents[name] is not None)
        pool.check()


# blocks of an earlier process


def adopt(pool: BlockPool, *runs: StoreRun) -> list[BlockStoreMeta]:
    pool.reserve(runs)
    return [meta for run in runs for meta in pool.adopt(run)]


def test_what_is_adopted_can_be_found_evicted_and_built_upon() -> None:
    pool = BlockPool(6, 1)
    ab, cd = meta_of(ABCD.part(0, 2)), meta_of(ABCD.part(2))
    assert adopt(pool, StoreRun(ab, [5, 1]), StoreRun(cd, [0, 3])) == [ab, cd]
    pool.check()
    assert [pool.slot_of(0, name) for name in ABCD.hashes] == [5, 1, 0, 3]
    assert pool.ready_prefix(0, ABCD.packed, 32) == 4
    assert allocate(pool, EF).evicted == []
    assert [name for _, name, _ in allocate(pool, make_chain(range(90, 98), 2)).evicted] == list(ABCD.hashes[::-1])
    pool.check()


def test_inner_names_of_what_is_adopted_come_with_the_block_that_has_them() -> None:
    pool, meta = BlockPool(6, 1), meta_of(ABCD)
    ending = inside(b"i", ABCD.hashes[1]), inside(b"j", b"i")
    foreign, taken = inside(b"k", b"nowhere"), inside(ABCD.hashes[0], None)
    assert adopt(pool, StoreRun(meta, [5, 1, 0, 3], (*ending, foreign, taken))) == [meta, *ending]
    pool.check()
    assert [pool.inner_slot(0, name) for name in (b"i", b"j", b"k")] == [0, 0, None]
    assert pool.more_names(0) == list(ending)
    assert adopt(pool, StoreRun(meta_of(EF), [2, 4], (inside(b"i", None),))) == [meta_of(EF)]
    assert pool.inner_slot(0, b"i") == 0


def inside(name: bytes, parent: bytes | None) -> BlockStoreMeta:
    return msgspec.structs.replace(
        meta_of(EF.part(0, 1)), block_hashes=name, hash_bytes=len(name), parent_block_hash=parent, inner=True
    )


@pytest.mark.parametrize(
    "run",
    [
        StoreRun(meta_of(EF), [2, 2]),
        StoreRun(meta_of(EF), [2]),
        StoreRun(meta_of(EF), [2, 6]),
        StoreRun(meta_of(EF), [0, 2]),
        StoreRun(meta_of(ABCD.part(0, 1)), [2]),
        StoreRun(meta_of(ABCD.part(3)), [2]),
    ],
    ids=["one slot twice", "too few slots", "no slot of ours", "a slot in use", "a name in use", "no parent"],
)
def test_what_cannot_stand_here_is_not_adopted(run: StoreRun) -> None:
    pool = BlockPool(6, 1)
    adopt(pool, StoreRun(meta_of(ABCD.part(0, 2)), [0, 1]))
    assert adopt(pool, run) == []
    assert pool.free_slots == 4
    pool.check()


def test_the_coldest_are_told_by_their_leaves_as_far_as_is_asked_and_may_leave_still() -> None:
    pool = ready_pool(ABCD, EF, capacity=8)
    for blocks, leaves in (0, []), (1, [3]), (4, [3]), (5, [3, 5]), (9, [3, 5]):
        assert list(pool.coldest(blocks)) == leaves
    next(pool.coldest(4))
    assert list(pool.coldest(5)) == [3, 5]
    pool.check()
    assert len(allocate(pool, make_chain(range(100, 116), 2)).slots) == 8


def test_what_leaves_with_a_leaf_is_looked_at_again_when_it_was_used_or_all_is_to_be() -> None:
    pool = ready_pool(ABCD, EF, capacity=8)
    assert list(pool.coldest(5)) == [3, 5]
    pool.pin(0)
    assert list(pool.coldest(4)) == [3], "as seen before"
    pool.look_anew()
    assert list(pool.coldest(4)) == [3, 5]
    pool.unpin(0)
    pool.touch(3)
    assert list(pool.coldest(6)) == [5, 3]
    assert list(pool.coldest(7)) == [5, 3]
    pool.touch(5)
    assert list(pool.coldest(4)) == [3]


def test_slots_that_can_be_loaded_are_found_by_name() -> None:
    pool = ready_pool(ABCD, capacity=8)
    allocate(pool, EF)
    assert pool.ready_slots(0, [ABCD.hashes[2], EF.hashes[0], b"?" * 32, ABCD.hashes[0]]) == [2, None, None, 0]


def test_neighbours_of_one_snapshot_are_one_piece() -> None:
    pool = ready_pool(ABCD, EF, capacity=8)
    assert list(pool.pieces([])) == []
    assert list(pool.pieces([0, 1, 2, 3, 4, 5])) == [[0, 1, 2, 3], [4, 5]]
    assert list(pool.pieces([2, 3, 0, 5, 4])) == [[2, 3], [0], [5], [4]]
