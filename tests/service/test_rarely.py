"""A fault that repeats is logged less and less."""

import logging

import pytest

from kvevents_service.service.rarely import BURST, INTERVAL_S, RateLimit, is_told, is_told_since
from kvevents_service.testing import ManualClock


def test_each_power_of_ten_is_told() -> None:
    assert [count for count in range(1, 2001) if is_told(count)] == [1, 10, 100, 1000]


@pytest.mark.parametrize(("before", "count"), [(0, 1), (0, 7), (3, 10), (9, 1234), (99, 100)])
def test_a_counter_that_jumped_over_a_power_of_ten_is_told(before: int, count: int) -> None:
    assert is_told_since(before, count)
    assert not is_told_since(count, count)


@pytest.mark.parametrize(("before", "count"), [(0, 0), (1, 2), (10, 99), (100, 999)])
def test_a_counter_between_two_powers_of_ten_is_not(before: int, count: int) -> None:
    assert not is_told_since(before, count)


def record(line: int, message: str = "m") -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "file.py", line, message, None, None)


def test_a_line_of_code_that_says_too_much_is_held_back_and_counted() -> None:
    clock = ManualClock()
    limit = RateLimit(clock)
    said = [limit.filter(record(1, f"fault {i}")) for i in range(BURST + 5)]
    assert said == [True] * BURST + [False] * 5
    assert limit.filter(record(2)), "another line of code has a bound of its own"
    clock.advance(INTERVAL_S)
    late = record(1, "fault again")
    assert limit.filter(late)
    assert late.getMessage() == "fault again (5 more since were not logged)"
    assert limit.held_back == 5


def test_after_a_quiet_time_nothing_is_added() -> None:
    clock = ManualClock()
    limit = RateLimit(clock)
    limit.filter(record(1))
    clock.advance(INTERVAL_S)
    again = record(1)
    assert limit.filter(again)
    assert again.getMessage() == "m"
