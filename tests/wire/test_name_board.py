"""What a name board says of names that came and went."""

import hashlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.name_board import STUCK, NameBoard

NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(200)]


def board(cells: int = 1 << 12) -> tuple[NameBoard, memoryview]:
    memory = memoryview(bytearray(cells))
    return NameBoard(memory), memory


def test_it_has_what_was_added_and_not_what_was_taken_again() -> None:
    made, cells = board(1 << 20)
    made.add(NAMES)
    assert all(map(made.may_have, NAMES))
    made.take(NAMES[:100])
    assert not any(map(made.may_have, NAMES[:100]))
    assert all(map(made.may_have, NAMES[100:]))
    made.clear()
    assert not any(cells)


def test_the_cell_is_that_of_the_page() -> None:
    made, cells = board(1 << 12)
    name = bytes(28) + (0x12345678).to_bytes(4, sys.byteorder)
    made.add([name])
    assert [place for place, count in enumerate(cells) if count] == [0x678]


some_names = st.integers(4, 64).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size)))


@given(names=some_names, cells=st.sampled_from([1, 8, 1 << 12]))
def test_names_of_any_length_in_bulk_are_as_one_by_one(names: list[bytes], cells: int) -> None:
    (bulk, one), (single, other) = board(cells), board(cells)
    bulk.add(names)
    for name in names:
        single.add([name])
    assert one == other
    assert all(map(bulk.may_have, names))
    bulk.take(names)
    if len(names) < STUCK:
        assert not any(one)


def test_a_cell_that_is_full_stays_so() -> None:
    made, cells = board(1)
    made.add(NAMES)
    made.add(NAMES)
    assert cells[0] == STUCK
    made.take(NAMES)
    assert cells[0] == STUCK, "how many it has was lost"


def test_a_cell_never_counts_below_nothing() -> None:
    made, cells = board(1)
    made.take(NAMES)
    assert cells[0] == 0


@pytest.mark.parametrize("cells", [0, 3, 12])
def test_a_board_of_odd_size_is_refused(cells: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        NameBoard(memoryview(bytearray(cells)))
