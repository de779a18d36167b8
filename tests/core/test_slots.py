"""The slot table: a run filled in bulk is the run filled slot by slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.metadata import snapshot
from kvevents_service.core.slots import FREE, NO_SLOT, PENDING, SlotTable
from kvevents_service.testing import make_chain

CAPACITY = 10
CHAIN = make_chain(range(2 * CAPACITY), 2)
META = snapshot(CHAIN.offer(range(CAPACITY)), FULL, "CPU", 32)


def filled(slots: list[int], parent: int | None) -> SlotTable:
    table = SlotTable(CAPACITY)
    table._fill(META, list(CHAIN.hashes), slots, parent)
    return table


@given(st.permutations(range(CAPACITY)), st.integers(1, CAPACITY - 1), st.booleans(), st.booleans())
def test_a_run_reads_as_it_was_filled(order: list[int], count: int, root: bool, ordered: bool) -> None:
    slots, parent = order[:count], None if root else order[-1]
    slots = sorted(slots) if ordered else slots
    table = filled(slots, parent)
    before = [parent, *slots[:-1]]
    for position, slot in enumerate(slots):
        assert (table.state_of(slot), table.hash_of(slot)) == (PENDING, CHAIN.hashes[position])
        assert table.parent_of(slot) == before[position]
        assert table.meta_of(slot) == META.part(position, position + 1)
        assert table._children[slot] == (slot != slots[-1])
    assert parent is None or table._children[parent] == 1
    assert table.count(PENDING) == count
    assert table.chain(slots[-1], count) == slots


@pytest.mark.parametrize("first", range(CAPACITY - 3))
@pytest.mark.parametrize("parent", [None, CAPACITY - 1])
def test_consecutive_slots_are_filled_the_same_without_a_loop(first: int, parent: int | None) -> None:
    bulk, one_by_one = filled([first, first + 1, first + 2], parent), SlotTable(CAPACITY)
    above = NO_SLOT if parent is None else parent
    one_by_one._reach(first + 2)
    one_by_one._fill_scattered(META, list(CHAIN.hashes), [first, first + 1, first + 2], above)
    for column in ("_state", "_group", "_parent", "_position", "_hash", "_meta"):
        assert getattr(bulk, column) == getattr(one_by_one, column)


@pytest.mark.parametrize("slots", [[0, 2, 1, 3], [3, 2, 1, 0], [1, 1 + 2, 2, 4]])
def test_slots_that_only_look_consecutive_are_told_apart(slots: list[int]) -> None:
    table = filled(slots, None)
    assert [table.hash_of(slot) for slot in slots] == list(CHAIN.hashes[:4])
    assert table.chain(slots[-1], 4) == slots


def test_a_chain_longer_than_there_is_has_no_slots() -> None:
    assert filled([0, 1], None).chain(1, 3) is None


def test_an_empty_slot_says_nothing() -> None:
    table = SlotTable(1)
    assert (table.state_of(0), table.pinned(), table.used) == (FREE, 0, 0)
