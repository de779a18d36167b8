"""Observations fall into the bucket whose bound they do not exceed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.service.histogram import BOUNDS_S, Histogram


@given(st.lists(st.floats(0, 100), max_size=50))
def test_each_bucket_counts_what_is_not_above_it(seconds: list[float]) -> None:
    histogram = Histogram()
    for one in seconds:
        histogram.observe(one)
    buckets = dict(histogram.buckets())
    for bound in BOUNDS_S:
        assert buckets[str(bound)] == sum(1 for one in seconds if one <= bound)
    assert buckets["+Inf"] == histogram.count == len(seconds)
    assert histogram.largest_s == max(seconds, default=0)
    assert histogram.total_s == pytest.approx(sum(seconds), rel=1e-12)
