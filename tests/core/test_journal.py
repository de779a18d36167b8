"""The journal: numbers rise by one, what is dropped keeps its number, what is kept is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.journal import Journal, JournalLimits, PendingBatch, Told
from kvevents_service.core.metadata import Cleared, RemovedRun, snapshot
from kvevents_service.testing import make_chain

CLEARED = (Cleared(),)


def removal(blocks: int) -> tuple[RemovedRun]:
    return (RemovedRun(FULL, "CPU", (b"\0" * 32,) * blocks),)


def journal_of(**limits: int) -> Journal:
    return Journal(JournalLimits(**limits))


def retained(journal: Journal, seq: int = 0, limit: int = 1000) -> list[int]:
    return [batch.seq for batch in journal.retained_from(seq, limit)]


def test_numbers_rise_by_one_from_the_first() -> None:
    journal = Journal(first_seq=41)
    assert [journal.append(CLEARED, 1.0) for _ in range(3)] == [41, 42, 43]
    assert journal.next_seq == 44


def test_batches_are_taken_in_order() -> None:
    journal = Journal()
    journal.append(CLEARED, 1.0)
    journal.append(removal(1), 2.0)
    assert journal.take_pending() == PendingBatch(0, 1.0, CLEARED)
    assert journal.take_pending() == PendingBatch(1, 2.0, removal(1))
    assert journal.take_pending() is None


def test_a_dropped_batch_keeps_its_number() -> None:
    journal = journal_of(pending_batches=1)
    assert [journal.append(CLEARED, 1.0) for _ in range(3)] == [0, 1, 2]
    assert journal.dropped_batches == 2
    assert journal.take_pending() == PendingBatch(0, 1.0, CLEARED)
    assert journal.append(CLEARED, 2.0) == 3
    assert journal.take_pending() == PendingBatch(3, 2.0, CLEARED)


def test_an_empty_batch_is_never_dropped() -> None:
    journal = journal_of(pending_batches=1)
    journal.append(CLEARED, 1.0)
    for _ in range(3):
        journal.append((), 1.0)
    assert (journal.dropped_batches, journal.whole_from) == (0, 0)
    journal.append(CLEARED, 1.0)
    assert (journal.dropped_batches, journal.whole_from) == (1, 5)


def test_what_is_told_to_some_is_numbered_behind_the_rest_and_never_dropped() -> None:
    journal = journal_of(pending_batches=1)
    journal.append(CLEARED, 1.0)
    assert [journal.tell(Told(1, (b"a",)), 2.0), journal.tell(Told(1, (b"b",)), 2.0)] == [1, 2]
    assert journal.dropped_batches == 0
    found = [journal.take_pending() for _ in range(3)]
    assert [batch and batch.told for batch in found] == [None, Told(1, (b"a",)), Told(1, (b"b",))]
    assert journal.whole_from == 3


def test_what_is_needed_is_kept_longer_up_to_a_bound() -> None:
    journal = journal_of(retained_batches=2, retained_bytes=100, needed_batches=2, needed_bytes=50)
    journal.needed_from = lambda: 1
    for seq in range(4):
        journal.retain(seq, b"0123456789")
    assert retained(journal) == [1, 2, 3]
    journal.retain(4, b"0123456789")
    journal.retain(5, b"0123456789")
    assert retained(journal) == [2, 3, 4, 5]
    journal.retain(6, b"x" * 130)
    assert retained(journal) == [4, 5, 6], "the bytes of all that is kept are bounded too"
    journal.needed_from = lambda: 6
    journal.retain(7, b"0123456789")
    assert retained(journal) == [6, 7]


def test_what_waits_is_bounded_by_blocks() -> None:
    journal = journal_of(pending_blocks=10)
    meta = snapshot(make_chain(range(12), 2).offer(range(6)), FULL, "CPU", 32)
    for announcements in ((meta,), removal(4), removal(1)):
        journal.append(announcements, 1.0)
    assert journal.dropped_batches == 1
    journal.take_pending()
    journal.append(removal(6), 1.0)
    assert journal.dropped_batches == 1


def test_a_batch_larger_than_the_bound_goes_alone() -> None:
    journal = journal_of(pending_blocks=10)
    journal.append(removal(99), 1.0)
    journal.append(removal(1), 1.0)
    assert journal.dropped_batches == 1
    assert journal.take_pending() == PendingBatch(0, 1.0, removal(99))


def test_the_oldest_are_pushed_out_by_count() -> None:
    journal = journal_of(retained_batches=3)
    for seq in range(5):
        journal.retain(seq, b"x")
    assert retained(journal) == [2, 3, 4]


def test_the_oldest_are_pushed_out_by_bytes() -> None:
    journal = journal_of(retained_bytes=10)
    for seq in range(5):
        journal.retain(seq, b"four")
    assert retained(journal) == [3, 4]
    assert journal.stats()["retained_bytes"] == 8


def test_the_newest_is_kept_however_large() -> None:
    journal = journal_of(retained_bytes=10)
    journal.retain(0, b"x")
    journal.retain(1, bytes(100))
    assert retained(journal) == [1]
    journal.retain(2, b"x")
    assert retained(journal) == [2]
    assert journal.stats()["retained_bytes"] == 1


def test_nothing_is_retained_at_first() -> None:
    assert Journal().retained_from(0, 10) == []


@pytest.mark.parametrize(
    ("start", "found"), [(0, [3, 4]), (3, [3, 4]), (4, [4, 8]), (5, [8, 9]), (9, [9]), (10, [])]
)
def test_a_replay_steps_over_holes(start: int, found: list[int]) -> None:
    journal = Journal()
    for seq in (3, 4, 8, 9):
        journal.retain(seq, b"x")
    assert retained(journal, start, limit=2) == found


@given(st.lists(st.booleans(), max_size=60), st.integers(-1, 61), st.integers(0, 9), st.integers(1, 40))
def test_any_replay_is_what_is_kept_from_there(kept: list[bool], start: int, limit: int, batches: int) -> None:
    journal = journal_of(retained_batches=batches)
    seqs = [seq for seq, keep in enumerate(kept) if keep]
    for seq in seqs:
        journal.retain(seq, b"x")
    expected = [seq for seq in seqs[-batches:] if seq >= start]
    assert retained(journal, start, limit) == expected[:limit]


def test_stats_and_repr_tell_the_live_state() -> None:
    journal = journal_of(pending_batches=1)
    for _ in range(3):
        journal.append(CLEARED, 1.0)
    journal.retain(0, b"four")
    assert list(journal.stats().values()) == [3, 1, 2, 0, 1, 4]
    assert repr(journal) == "<Journal next=3 pending=1 retained=1>"
