"""Numbers of an output: the journal's until it is re-based, then lower ones that no reader takes for old."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.numbers import FIRST_AGAIN, OutputNumbers


def test_at_first_they_are_the_journals() -> None:
    numbers = OutputNumbers()
    assert [numbers.outward(seq) for seq in (0, 5, 10**9)] == [0, 5, 10**9]
    assert numbers.inward(17) == 17


def test_a_rebased_output_starts_again() -> None:
    numbers = OutputNumbers()
    numbers.rebase(1_000_002)
    said = [numbers.outward(seq) for seq in range(1_000_000, 1_000_006)]
    assert said == [1_000_000, 1_000_001, FIRST_AGAIN, 2, 3, 4]


def test_a_request_is_read_by_the_newest_numbers() -> None:
    numbers = OutputNumbers()
    numbers.rebase(1_000_002)
    assert numbers.outward(numbers.inward(4)) == 4
    assert numbers.inward(0) < 1_000_002


@given(st.lists(st.integers(3, 20_000), max_size=6), st.integers(0, 50))
def test_rebased_often_each_batch_keeps_the_number_of_its_time(steps: list[int], ahead: int) -> None:
    """Batches that wait to be sent while an output is re-based have the numbers of before."""
    numbers, seq = OutputNumbers(), ahead
    for step in steps:
        before = [numbers.outward(old) for old in range(seq, seq + step)]
        assert all(later == earlier + 1 for earlier, later in pairwise(before))
        seq += step
        numbers.rebase(seq)
        assert [numbers.outward(old) for old in range(seq - 3, seq)] == before[-3:]
        assert (numbers.outward(seq), numbers.outward(seq + 1)) == (1, 2)
    assert numbers.rebased == len(steps)
