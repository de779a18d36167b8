"""What the connector counts: one table for vLLM's log line, its Prometheus endpoint and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvevents_service.engine.vllm_scheduler import SchedulerHalf

PREFIX = "kvevents_connector_"
EVERY_S = 5.0
"""How often at most the scheduler half gives its counters to vLLM."""

Values = dict[str, float]


class Metric(NamedTuple):
    """A gauge is what it was last; a counter's values are what was added since the last time."""

    name: str
    what: str
    read: Callable[[SchedulerHalf], float]
    gauge: bool = False

    @property
    def exported(self) -> str:
        return f"{PREFIX}{self.name}{'' if self.gauge else '_total'}"


def _client(name: str) -> Callable[[SchedulerHalf], float]:
    return lambda half: half.client.counters[name]


METRICS = (
    Metric("connected", "1 while the sidecar is there.", lambda half: half.client.connected, gauge=True),
    Metric("held_blocks", "Engine blocks that wait for a copy.", lambda half: half.planner.book.held_blocks, True),
    Metric("lookups", "Lookups of prompts.", _client("lookups")),
    Metric(
        "lookups_spared", "Misses that the name board told of.", lambda half: half.loads.counters["lookups_spared"]
    ),
    Metric("loads", "Hits that began to be loaded.", lambda half: half.loads.counters["loads"]),
    Metric("loaded_tokens", "Prompt tokens that were loaded.", lambda half: half.loads.counters["loaded_tokens"]),
    Metric("loads_failed", "Loads that ended in a miss.", lambda half: half.loads.counters["loads_failed"]),
    Metric("loads_late", "Of these, for lack of time.", lambda half: half.loads.counters["loads_late"]),
    Metric("offered_blocks", "Blocks that were offered.", lambda half: half.planner.counts.offered),
    Metric("stored_blocks", "Of these, that were stored.", lambda half: half.stored_blocks),
    Metric("declined_blocks", "Of these, that were not stored.", lambda half: half.declined_blocks),
    Metric("skipped_blocks", "Blocks that were never offered.", lambda half: half.planner.counts.skipped),
    Metric("steps_dropped", "Messages that the sidecar was not there for.", _client("steps_dropped")),
    Metric("deadlines_missed", "Answers that did not come in time.", _client("deadlines_missed")),
    Metric("registrations", "Times that the engine was registered with a sidecar.", _client("registrations")),
)
GAUGES = frozenset(metric.name for metric in METRICS if metric.gauge)


class StatsReader:
    """What has happened since it was asked last, at most every `EVERY_S`."""

    def __init__(self, half: SchedulerHalf, clock: Callable[[], float]) -> None:
        self._half = half
        self._clock = clock
        self._due = clock()
        self._before: Values = {}

    def read(self) -> Values | None:
        """None if it is not time yet, or nothing has changed."""
        if self._clock() < self._due:
            return None
        self._due = self._clock() + EVERY_S
        before, self._before = self._before, {metric.name: float(metric.read(self._half)) for metric in METRICS}
        if before == self._before:
            return None
        base = {name: 0.0 if name in GAUGES else before.get(name, 0.0) for name in self._before}
        return {name: value - base[name] for name, value in self._before.items()}


def aggregated(first: Mapping[str, float], second: Mapping[str, float]) -> Values:
    """`second` is the later one, or that of another rank."""
    names = dict.fromkeys((*first, *second))
    return {
        name: second.get(name, first.get(name, 0.0))
        if name in GAUGES
        else first.get(name, 0.0) + second.get(name, 0.0)
        for name in names
    }
