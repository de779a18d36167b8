"""Columns: zeros that are there at once, and what was in them at one moment."""

from array import array

import pytest

from kvevents_service.core import column as module
from kvevents_service.core.column import column, extend_ramp, frozen


def test_a_column_is_zeros_that_take_a_slice() -> None:
    numbers = column("i", 5)
    numbers[1:3] = array("i", (-1, 7))
    assert numbers.tolist() == [0, -1, 7, 0, 0]
    assert column("Q", 0).tolist() == []


def test_what_is_frozen_does_not_change() -> None:
    numbers = column("i", 5)
    before = frozen(numbers, 3)
    numbers[0] = 9
    assert (before.tolist(), frozen(numbers, 2).tolist()) == ([0, 0, 0], [9, 0])


@pytest.mark.parametrize("without_numpy", [False, True])
def test_a_ramp_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch, without_numpy: bool) -> None:
    if without_numpy:
        monkeypatch.setattr(module, "numpy", None)
    ramp = array("i")
    for stop in (0, 3, 3, 10):
        extend_ramp(ramp, stop)
        assert ramp.tolist() == list(range(stop))
