"""Steps in flight: they land in order, and what they write is known until then."""

from types import SimpleNamespace
from typing import Any

from engine.vllm_toy import FULL, UNIT, WINDOW

from kvevents_service.engine.spans import Spans
from kvevents_service.engine.vllm_flights import Flights, Life, Share

SPANS = [Spans(FULL, UNIT), Spans(WINDOW, UNIT)]


def life(*tables: list[int]) -> Life:
    request: Any = SimpleNamespace(request_id="r")
    made = Life(request, [[] for _ in tables], 1)
    made.grow(tables)
    return made


def test_a_table_has_none_for_the_null_block() -> None:
    made = life([1, 2], [0, 3])
    made.grow([[4], None])
    assert made.tables == [[1, 2, 4], [None, 3]]


def test_steps_land_in_order_and_all_at_once() -> None:
    flights, one = Flights(SPANS, watch=False), life([1, 2], [3, 4])
    shares = [Share(one, start, start + 4) for start in (0, 4)]
    for number, share in enumerate(shares, 7):
        flights.begin(number, [share])
    assert one.flights == len(flights) == 2
    assert flights.land(6) == []
    assert flights.starts() == {one: 0}
    assert flights.land(8) == [one, one]
    assert one.flights == len(flights) == len(flights.starts()) == 0


def test_what_a_running_step_computes_again_does_not_stand() -> None:
    """Of five tokens four were drafts, and rejected."""
    flights, one = Flights(SPANS, watch=False), life([1, 2], [3, 4])
    flights.begin(1, [Share(one, 0, 5)])
    flights.begin(2, [Share(one, 1, 6)])
    flights.land(1)
    assert flights.starts() == {one: 1}


def test_blocks_are_written_until_every_step_that_writes_them_has_landed() -> None:
    flights, one = Flights(SPANS, watch=True), life([1, 2, 3], [0, 5, 6])
    flights.begin(1, [Share(one, 2, 6)])
    flights.begin(2, [Share(one, 6, 9)])
    assert set(flights.written) == {1, 2, 3, 5, 6}
    list(flights.land(1))
    assert set(flights.written) == {2, 3, 5, 6}
    list(flights.land(2))
    assert not flights.written


def test_nothing_is_watched_where_nobody_asks() -> None:
    flights = Flights(SPANS, watch=False)
    flights.begin(1, [Share(life([1], [2]), 0, 4)])
    assert not flights.written
