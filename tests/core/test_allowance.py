"""What one host may ask: its own buckets, that fill with time, whatever the others do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.allowance import MAX_PEERS, Allowance, AllowanceLimits

SLOW = AllowanceLimits(requests_per_s=2.0, bytes_per_s=100.0, burst_s=2.0)


def admitted(allowance: Allowance, peer: str, now: float, times: int = 100) -> int:
    return sum(allowance.admits(peer, now) for _ in range(times))


def test_a_burst_is_admitted_then_as_many_as_come_back() -> None:
    allowance = Allowance(SLOW)
    assert admitted(allowance, "a", 0.0) == 4
    assert allowance.refused == 96
    assert admitted(allowance, "a", 0.5) == 1
    assert admitted(allowance, "a", 1000.0) == 4


def test_one_host_takes_nothing_from_another() -> None:
    allowance = Allowance(SLOW)
    admitted(allowance, "a", 0.0)
    assert admitted(allowance, "b", 0.0) == 4


def test_who_is_in_debt_of_bytes_waits_until_it_is_paid() -> None:
    allowance = Allowance(SLOW)
    allowance.spend("a", 500, 0.0)  # of 200
    assert not allowance.admits("a", 3.0)
    assert allowance.admits("a", 3.1)
    assert allowance.admits("b", 0.0)


def test_who_is_new_has_a_burst_of_bytes_and_so_has_who_was_silent_for_long() -> None:
    allowance = Allowance(SLOW)
    for now in (0.0, 1000.0):
        allowance.spend("a", 199, now)  # of 200
        assert allowance.admits("a", now)
        allowance.spend("a", 2, now)
        assert not allowance.admits("a", now)


@pytest.mark.parametrize("limits", [SLOW._replace(requests_per_s=0.0), AllowanceLimits(0.0, 0.0)])
def test_a_rate_of_zero_is_no_limit(limits: AllowanceLimits) -> None:
    assert admitted(Allowance(limits), "a", 0.0, 1000) == 1000


def test_no_bytes_limit_forgives_any_debt() -> None:
    allowance = Allowance(AllowanceLimits(1000.0, 0.0))
    allowance.spend("a", 1 << 40, 0.0)
    assert allowance.admits("a", 0.0)


def test_the_books_are_bounded_and_the_longest_silent_is_forgotten() -> None:
    allowance = Allowance(SLOW)
    admitted(allowance, "first", 0.0)
    admitted(allowance, "busy", 0.0)
    for number in range(MAX_PEERS + 1):
        allowance.admits("busy", 0.0)
        allowance.admits(f"peer-{number}", 0.0)
    assert repr(allowance) == f"<Allowance peers={MAX_PEERS} refused={allowance.refused}>"
    assert not allowance.admits("busy", 0.0)
    assert allowance.admits("first", 0.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 300)), max_size=50))
def test_no_more_than_the_burst_and_the_rate_is_ever_admitted(steps: list[tuple[float, int]]) -> None:
    allowance, now, requests, sent = Allowance(SLOW), 0.0, 0, 0
    for waited, size in steps:
        now += waited
        if allowance.admits("a", now):
            requests += 1
            sent += size
            allowance.spend("a", size, now)
    assert requests <= SLOW.requests_per_s * (SLOW.burst_s + now) + 1e-6
    assert sent <= SLOW.bytes_per_s * (SLOW.burst_s + now) + 300  # the last answer may run into debt
