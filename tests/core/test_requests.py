"""The request mirror: leases end once, by whoever comes first."""

from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.requests import Lease, RequestMirror


def lease(lease_id: int, session_id: int = 1, request_id: str = "r", deadline: float = 10.0) -> Lease:
    return Lease(lease_id, session_id, request_id, 1, (0,), b"h", deadline)


def mirror_of(*leases: Lease, max_leases: int = 16) -> RequestMirror:
    mirror = RequestMirror(max_leases)
    for granted in leases:
        mirror.grant(granted)
    return mirror


def test_a_lease_is_taken_once() -> None:
    mirror = mirror_of(lease(1))
    assert mirror.take(1, 1) == lease(1)
    assert mirror.take(1, 1) is None


def test_another_session_cannot_take_it() -> None:
    mirror = mirror_of(lease(1))
    assert mirror.take(2, 1) is None
    assert len(mirror) == 1


def test_a_request_takes_all_of_its_own() -> None:
    mirror = mirror_of(lease(1), lease(2), lease(3, request_id="other"), lease(4, session_id=2))
    assert {taken.lease_id for taken in mirror.take_request(1, "r")} == {1, 2}
    assert mirror.take_request(1, "r") == []
    assert len(mirror) == 2


def test_a_session_takes_all_of_its_own() -> None:
    mirror = mirror_of(lease(1), lease(2, session_id=2), lease(3, request_id="other"))
    assert [taken.lease_id for taken in mirror.take_session(1)] == [1, 3]
    assert repr(mirror) == "<RequestMirror 1 leases of 1 requests>"


def test_deadlines_pass_in_order() -> None:
    mirror = mirror_of(lease(1, deadline=5.0), lease(2, deadline=3.0), lease(3, deadline=9.0))
    assert mirror.take_expired(2.9) == []
    assert [taken.lease_id for taken in mirror.take_expired(5.0)] == [2, 1]
    assert len(mirror) == 1


def test_a_lease_that_has_ended_does_not_expire() -> None:
    mirror = mirror_of(lease(1))
    mirror.take(1, 1)
    assert mirror.take_expired(100.0) == []


def test_it_is_full_at_its_bound() -> None:
    mirror = mirror_of(lease(1), max_leases=2)
    assert not mirror.full
    mirror.grant(lease(2))
    assert mirror.full


def test_what_ended_early_leaves_nothing_behind() -> None:
    mirror = RequestMirror(16)
    for lease_id in range(10_000):
        mirror.grant(lease(lease_id, request_id=str(lease_id)))
        mirror.take(1, lease_id)
    assert len(mirror._deadlines) < 100
    assert not mirror._of_request


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(0, 100)), max_size=400))
def test_every_lease_ends_exactly_once(history: list[tuple[int, int, int]]) -> None:
    mirror, ended, granted = RequestMirror(1000), [], 0
    for verb, which, deadline in history:
        if verb:
            granted += 1
            mirror.grant(lease(granted, which % 2, str(which % 5), float(deadline)))
        else:
            ended += [taken] if (taken := mirror.take(which % 2, which)) else []
            ended += mirror.take_expired(float(deadline) / 4)
    ended += mirror.take_expired(100.0)
    assert sorted(taken.lease_id for taken in ended) == list(range(1, granted + 1))
    assert repr(mirror) == "<RequestMirror 0 leases of 0 requests>"
