"""Pieces name exactly the bytes of the blocks, in as few pieces as adjacency allows."""

import random
from array import array

import pytest

from kvevents_service.transfer.copy import Moves
from kvevents_service.transfer.pieces import Rows, merged, pieces_of, slot_rows


def moves(targets: list[int], sources: list[int]) -> Moves:
    return Moves.of(array("i", targets), array("i", sources))


def told(rows: list[Rows], slots: list[Rows], pairs: Moves) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in pieces_of(slots, rows, pairs)), strict=True))


def test_rows_without_a_gap_become_one() -> None:
    rows = [Rows(0, 24, 8), Rows(8, 24, 8), Rows(16, 24, 8), Rows(100, 24, 8), Rows(108, 8, 8)]
    assert merged(rows) == [Rows(0, 24, 24), Rows(100, 24, 8), Rows(108, 8, 8)]


def test_a_slot_holds_the_rows_one_after_another() -> None:
    assert slot_rows([Rows(7, 64, 8), Rows(9, 64, 24)], 1000, 32) == [Rows(1000, 32, 8), Rows(1008, 32, 24)]


def test_what_is_dense_on_both_sides_goes_over_in_runs() -> None:
    rows = [Rows(1 << 40, 16, 16)]
    pieces = told(rows, slot_rows(rows, 1 << 20, 16), moves([4, 5, 6, 9], [1, 2, 3, 0]))
    start, device = 1 << 20, 1 << 40
    assert pieces == [(start + 64, device + 16, 48), (start + 144, device, 16)]


def test_what_is_not_goes_over_a_row_a_piece() -> None:
    rows = [Rows(0, 16, 16), Rows(512, 16, 16)]
    pieces = told(rows, slot_rows(rows, 4096, 32), moves([0, 1], [3, 4]))
    assert pieces == [(4096, 48, 16), (4128, 64, 16), (4112, 560, 16), (4144, 576, 16)]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_parts_are_all_of_it(most: int) -> None:
    rows, rng = [Rows(0, 16, 8)], random.Random(1)
    whole = pieces_of(slot_rows(rows, 4096, 8), rows, moves(rng.sample(range(20), 10), rng.sample(range(20), 10)))
    parts = whole.parts(most)
    assert max(len(part.sizes) for part in parts) <= most
    assert sum(part.bytes for part in parts) == whole.bytes == 80
    assert [target for part in parts for target in part.targets.tolist()] == whole.targets.tolist()
