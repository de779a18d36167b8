"""What the soak measured, and which of it may not be."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools.proving.process import MIB, LogLine

WARM_UP, WARM_UP_BLOCKS = 0.4, 800_000
"""This share of the run, and so many blocks at least, fill tiers, journal and queues, and are not measured."""
LEAST_SAMPLES = 5
GROWTH_BYTES, GROWTH_SHARE = 16 * MIB, 0.05
LAG_S, CONTROL_LAG_S = 0.010, 0.005
RATE_SHARE = 0.9
FULL_FOLDS = 2
ODD_LEVELS = ("warning", "error", "critical")
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


def rate_faults(reached: float, asked: float) -> list[str]:
    """In blocks offered a second."""
    if reached >= RATE_SHARE * asked:
        return []
    return [f"{reached:,.0f} blocks/s were offered, of {asked:,.0f} asked for"]


def reader_faults(readers: Sequence[Mapping[str, Any]], expected: int) -> list[str]:
    """What they found, and whether enough of them looked. Each told `folds`, `late_by_replay` and `faults`."""
    folds = [reader for reader in readers if reader["folds"]]
    found = [f"reader {number}: {fault}" for number, reader in enumerate(readers) for fault in reader["faults"]]
    if len(readers) != expected:
        found.append(f"{len(readers)} of {expected} readers told how they got on")
    if len(folds) < FULL_FOLDS or not any(reader["late_by_replay"] for reader in folds):
        found.append(f"{len(folds)} readers folded all: {FULL_FOLDS} are wanted, one of them late by replay")
    return found


def log_faults(lines: Sequence[LogLine]) -> list[str]:
    """A sidecar with nothing wrong warns of nothing."""
    odd = [line for line in lines if line.level in ODD_LEVELS]
    return [f"log: {line.level}: {line.message[:300]} {line.error[-300:]}" for line in odd]


def lag_is_judged(control_p99_s: float) -> bool:
    """A process that only sleeps was in time; else the machine is too busy to tell."""
    return control_p99_s <= CONTROL_LAG_S


def lag_faults(lag_p99_s: float, control_p99_s: float) -> list[str]:
    if lag_p99_s <= LAG_S or not lag_is_judged(control_p99_s):
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
