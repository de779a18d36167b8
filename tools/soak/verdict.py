"""What the soak measured, and which of it may not be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tools.proving.process import MIB

WARM_UP, WARM_UP_BLOCKS = 0.4, 800_000
"""This share of the run, and so many blocks at least, fill tiers, journal and queues, and are not measured."""
LEAST_SAMPLES = 5
GROWTH_BYTES, GROWTH_SHARE = 16 * MIB, 0.05
LAG_S, CONTROL_LAG_S = 0.010, 0.005
DESCRIPTORS = 32
"""Connections of readers that come and go differ by so many."""


class Sample(NamedTuple):
    """One look at the sidecar. at_s: since the start; blocks: in all events until then."""

    at_s: float
    blocks: float
    anon_bytes: int
    resident_bytes: int
    descriptors: int


def level(samples: Sequence[Sample]) -> list[Sample]:
    """Those after the warm-up."""
    start = samples[-1].at_s * WARM_UP
    return [sample for sample in samples if sample.at_s >= start and sample.blocks >= WARM_UP_BLOCKS]


class Growth(NamedTuple):
    """A straight line through the memory after the warm-up."""

    bytes_per_s: float
    over_s: float
    mean_bytes: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth | None:
        """After the warm-up. None: too little is left of the run."""
        late = level(samples)
        if len(late) < LEAST_SAMPLES:
            return None
        times, sizes = [sample.at_s for sample in late], [sample.anon_bytes for sample in late]
        slope = statistics.linear_regression(times, sizes).slope
        return cls(slope, times[-1] - times[0], statistics.fmean(sizes))

    @property
    def total_bytes(self) -> float:
        return self.bytes_per_s * self.over_s

    def told(self) -> dict[str, float]:
        """For the report."""
        return {
            "memory_mib": round(self.mean_bytes / MIB, 1),
            "memory_slope_mib_per_min": round(self.bytes_per_s * 60 / MIB, 2),
            "memory_grown_mib": round(self.total_bytes / MIB, 1),
            "memory_bound_mib": round(self.bound_bytes / MIB, 1),
            "memory_over_s": round(self.over_s),
        }

    @property
    def bound_bytes(self) -> float:
        """What a line through a level may rise by, as readers come and go meanwhile."""
        return max(GROWTH_BYTES, GROWTH_SHARE * self.mean_bytes)


def lag_faults(lag_p99_s: float, control_p99_s: float) -> list[str]:
    """A thread that only sleeps was late as well: then the machine is too busy to tell."""
    if lag_p99_s <= LAG_S or control_p99_s > CONTROL_LAG_S:
        return []
    return [f"the event loop's lag is up to {lag_p99_s * 1000:.0f} ms at p99, not {LAG_S * 1000:.0f} ms"]


def memory_faults(growth: Growth | None, samples: Sequence[Sample]) -> list[str]:
    if growth is None:
        return [
            f"{samples[-1].blocks:,.0f} blocks in {samples[-1].at_s:.0f} s do not fill the tiers: run it longer"
        ]
    faults = []
    if growth.total_bytes > growth.bound_bytes:
        grown, bound = growth.total_bytes / MIB, growth.bound_bytes / MIB
        faults.append(f"memory grew by {grown:.1f} MiB in {growth.over_s:.0f} s; the bound is {bound:.1f} MiB")
    late = [sample.descriptors for sample in level(samples)]
    if late[-1] > late[0] + DESCRIPTORS:
        faults.append(f"open files grew from {late[0]} to {late[-1]}")
    return faults
