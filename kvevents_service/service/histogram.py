"""Seconds counted by how many they are: one bisection an observation, read when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts of observations up to each of `BOUNDS_S`, and of larger ones."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.largest_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def __repr__(self) -> str:
        return f"<Histogram {self.count} observations, at most {self.largest_s:.3f} s>"

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        self.largest_s = max(self.largest_s, seconds)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Upper bound as Prometheus writes it, and how many observations were not above it."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return zip(bounds, accumulate(self._counts), strict=True)
