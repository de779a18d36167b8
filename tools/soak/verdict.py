"""What the soak measured, and which of it may not be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tools.proving.process import MIB

WARM_UP = 0.4
"""This share of the run fills tiers, journal and queues, and is not measured."""
GROWTH_BYTES, GROWTH_SHARE = 16 * MIB, 0.05
LAG_S, CONTROL_LAG_S = 0.010, 0.005
DESCRIPTORS = 32
"""Connections of readers that come and go differ by so many."""


class Sample(NamedTuple):
    """One look at the sidecar. at_s: since the start."""

    at_s: float
    anon_bytes: int
    resident_bytes: int
    descriptors: int


class Growth(NamedTuple):
    """A straight line through the memory after the warm-up."""

    bytes_per_s: float
    over_s: float
    mean_bytes: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """After the warm-up. At least two samples must be left."""
        start = samples[-1].at_s * WARM_UP
        late = [sample for sample in samples if sample.at_s >= start]
        times, sizes = [sample.at_s for sample in late], [sample.anon_bytes for sample in late]
        slope = statistics.linear_regression(times, sizes).slope
        return cls(slope, times[-1] - times[0], statistics.fmean(sizes))

    @property
    def total_bytes(self) -> float:
        return self.bytes_per_s * self.over_s

    @property
    def bound_bytes(self) -> float:
        """What a line through a level may rise by, as readers come and go meanwhile."""
        return max(GROWTH_BYTES, GROWTH_SHARE * self.mean_bytes)


def lag_faults(lag_p99_s: float, control_p99_s: float) -> list[str]:
    """A thread that only sleeps was late as well: then the machine is too busy to tell."""
    if lag_p99_s <= LAG_S or control_p99_s > CONTROL_LAG_S:
        return []
    return [f"the event loop's lag is up to {lag_p99_s * 1000:.0f} ms at p99, not {LAG_S * 1000:.0f} ms"]


def memory_faults(growth: Growth, samples: Sequence[Sample]) -> list[str]:
    faults = []
    if growth.total_bytes > growth.bound_bytes:
        grown, bound = growth.total_bytes / MIB, growth.bound_bytes / MIB
        faults.append(f"memory grew by {grown:.1f} MiB in {growth.over_s:.0f} s; the bound is {bound:.1f} MiB")
    late = [sample.descriptors for sample in samples if sample.at_s >= samples[-1].at_s * WARM_UP]
    if late[-1] > late[0] + DESCRIPTORS:
        faults.append(f"open files grew from {late[0]} to {late[-1]}")
    return faults
