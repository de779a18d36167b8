"""A transfer ends once, at the last report of its ranks, and well only if every rank did well and lived."""

from array import array
from itertools import permutations, product

import pytest

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.ranks import RankReports


def transfer(session_id: int = 1) -> TransferMeta:
    return TransferMeta(1, "store", session_id, 1, array("i", [0]), array("i", [0]), 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_ends_at_the_last_report_in_every_order_with_every_outcome(ranks: int) -> None:
    for order, outcomes in product(permutations(range(ranks)), product([True, False], repeat=ranks)):
        reports, one = RankReports(), transfer()
        reports.begin(one, ranks)
        ends = [reports.report(one, rank, good=outcomes[rank]) for rank in order]
        assert ends == [None] * (ranks - 1) + [all(outcomes)]
        assert len(reports) == 0


@pytest.mark.parametrize("second", [True, False])
def test_a_rank_counts_once(second: bool) -> None:
    reports, one = RankReports(), transfer()
    reports.begin(one, 2)
    assert reports.report(one, 0, good=True) is None
    assert reports.report(one, 0, good=second) is None
    assert reports.report(one, 1, good=True) is True
    assert reports.report(one, 1, good=False) is None
    assert reports.counters["reports_ignored"] == 2


def test_a_rank_that_is_none_of_its_ranks_counts_nothing() -> None:
    reports, one = RankReports(), transfer()
    reports.begin(one, 1)
    assert reports.report(one, 1, good=True) is None
    assert reports.report(one, 0, good=True) is True


@pytest.mark.parametrize("reported", [0, 1])
def test_a_rank_that_dies_fails_what_is_open_and_still_waits_for_the_others(reported: int) -> None:
    reports, one, other = RankReports(), transfer(), transfer(session_id=2)
    reports.begin(one, 2)
    reports.begin(other, 1)
    for rank in range(reported):
        reports.report(one, rank, good=True)
    reports.lose(1)
    reports.lose(1)
    ends = [reports.report(one, rank, good=True) for rank in range(reported, 2)]
    assert ends == [None] * (1 - reported) + [False]
    assert reports.report(other, 0, good=True) is True
    assert reports.counters["transfers_lost_a_rank"] == 1


def test_transfers_that_look_alike_are_counted_apart() -> None:
    reports, one, twin = RankReports(), transfer(), transfer()
    reports.begin(one, 1)
    reports.begin(twin, 1)
    assert reports.report(one, 0, good=False) is False
    assert reports.report(twin, 0, good=True) is True
