"""Prometheus metrics, made from what is counted anyway when somebody asks: nothing here runs on the hot path.

`FAMILIES` is the whole list; docs/operations.md has it as a table, and a test holds the dashboard to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvevents_service.service.copy_meter import CopyMeter, Route
from kvevents_service.service.histogram import Histogram
from kvevents_service.service.instruments import VERSION, Instruments, OutputView
from kvevents_service.service.logs import limit
from kvevents_service.service.tier_view import TierView
from kvevents_service.wire.dialects import DIALECTS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "kvevents_"

Samples = Iterable[tuple[tuple[str, ...], float | Histogram]]


class Reading:
    """The instruments at one scrape: what is dear to read is read once."""

    def __init__(self, instruments: Instruments) -> None:
        self.of = instruments

    @cached_property
    def stats(self) -> dict[str, int]:
        return self.of.sidecar.stats()

    @cached_property
    def tiers(self) -> list[TierView]:
        return self.of.tiers()

    @cached_property
    def outputs(self) -> list[OutputView]:
        return self.of.outputs()


class Family(NamedTuple):
    """One metric: its name without the prefix and the ending, its labels, and how its samples are read."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Reading], Samples]

    @property
    def full_name(self) -> str:
        """As in a query."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def metric(self, reading: Reading) -> Metric:
        name = f"{PREFIX}{self.name}"
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(name, self.help, labels=self.labels)
            for labels, found in self.read(reading):
                assert isinstance(found, Histogram), "a histogram's sample is one"
                histograms.add_metric(labels, list(found.buckets()), found.total_s)
            return histograms
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        metric = made(name, self.help, labels=self.labels)
        for labels, value in self.read(reading):
            assert not isinstance(value, Histogram), "a number's sample is one"
            metric.add_metric(labels, value)
        return metric


def _one(value: float | Histogram) -> Samples:
    return (((), value),)


def _stat(key: str) -> Callable[[Reading], Samples]:
    return lambda reading: _one(reading.stats.get(key, 0))


def _by_tier(read: Callable[[TierView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [((tier.medium,), read(tier)) for tier in reading.tiers]


def _tier_stat(key: str) -> Callable[[Reading], Samples]:
    return _by_tier(lambda tier: tier.stats.get(key, 0))


def _by_output(read: Callable[[OutputView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [(view.labels, read(view)) for view in reading.outputs]


def _output_stat(key: str) -> Callable[[Reading], Samples]:
    return lambda reading: [(view.labels, view.stats[key]) for view in reading.outputs if key in view.stats]


def _blocks(reading: Reading) -> Samples:
    return [((tier.medium, state), blocks) for tier in reading.tiers for state, blocks in tier.blocks.items()]


def _declined(reading: Reading) -> Samples:
    return [
        ((tier.medium, key.removeprefix("declined_")), blocks)
        for tier in reading.tiers
        for key, blocks in tier.stats.items()
        if key.startswith("declined_")
    ]


def _copies(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for route, traffic in reading.of.sidecar.meter.traffic.items():
        yield (*route, "ok"), traffic.seconds.count - traffic.failed
        yield (*route, "failed"), traffic.failed


def _by_route(read: Callable[[CopyMeter, Route], float | Histogram]) -> Callable[[Reading], Samples]:
    def samples(reading: Reading) -> Samples:
        meter = reading.of.sidecar.meter
        return [(route, read(meter, route)) for route in meter.traffic]

    return samples


def _said(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for view in reading.outputs:
        for kind, medium, events in reading.of.tally.said_in(DIALECTS[view.bound.dialect]):
            yield (*view.labels, kind, medium), events


def _burnt(reading: Reading) -> Samples:
    journal = reading.of.events.publisher.journal
    return [(("dropped",), journal.dropped_batches), (("unencodable",), journal.lost_batches)]


def _errors(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    """Refused messages by their code, and every fault that has a counter of its own."""
    for code, count in reading.of.sidecar.errors.items():
        yield (f"refused_{code}",), count
    stats = reading.stats
    for kind in FAULTS:
        yield (kind,), stats.get(kind, 0)


FAULTS: Final = (
    "copies_failed",
    "stores_failed",
    "loads_failed",
    "transfers_lost_a_rank",
    "batches_encode_failed",
    "state_write_failed",
    "snapshots_failed",
    "replay_bad_requests",
)
_TIER, _OUTPUT = ("medium",), ("output", "dialect")
_ROUTE = ("direction", "medium")

FAMILIES: Final = (
    Family("gauge", "build_info", "1; the version that runs.", ("version",), lambda _: [((VERSION,), 1)]),
    Family("gauge", "start_time_seconds", "When it started, since the epoch.", (), lambda r: _one(r.of.started_at)),
    Family("gauge", "draining", "1 once it was told to stop.", (), lambda r: _one(r.of.sidecar.draining)),
    # tiers
    Family("gauge", "tier_capacity_blocks", "Slots of the tier.", _TIER, _by_tier(lambda t: t.capacity_blocks)),
    Family("gauge", "tier_block_bytes", "Bytes of a block on all ranks.", _TIER, _by_tier(lambda t: t.block_bytes)),
    Family("gauge", "tier_blocks", "Slots by state; a pinned one is counted under its state, too.",
           ("medium", "state"), _blocks),
    Family("counter", "stored_blocks", "Blocks stored and announced.", _TIER, _tier_stat("blocks_stored")),
    Family("counter", "removed_blocks", "Blocks that left.", _TIER, _tier_stat("blocks_removed")),
    Family("counter", "loaded_blocks", "Blocks copied back to an engine.", _TIER, _tier_stat("blocks_loaded")),
    Family("counter", "known_blocks", "Blocks offered that were there.", _TIER, _tier_stat("blocks_known")),
    Family("counter", "declined_blocks", "Blocks offered and not stored.", ("medium", "reason"), _declined),
    Family("counter", "lookups", "Lookups of engines.", _TIER, _tier_stat("lookups")),
    Family("counter", "lookup_blocks", "Hash units they asked for.", _TIER, _tier_stat("lookup_blocks")),
    Family("counter", "hit_blocks", "Hash units they were granted.", _TIER, _tier_stat("hit_blocks")),
    Family("counter", "lookups_refused", "Hits that could not be granted.", _TIER, _tier_stat("lookups_refused")),
    Family("gauge", "leases", "Hits that are pinned and not loaded yet.", _TIER, _tier_stat("leases")),
    Family("counter", "leases_expired", "Hits whose engine never came back.", _TIER, _tier_stat("leases_expired")),
    # copies
    Family("counter", "copies", "Transfers that ended.", (*_ROUTE, "result"), _copies),
    Family("counter", "copied_bytes", "Bytes of those that ended well.", _ROUTE,
           _by_route(lambda meter, route: meter.traffic[route].bytes)),
    Family("histogram", "copy_seconds", "From the decision to the end on the last rank.", _ROUTE,
           _by_route(lambda meter, route: meter.traffic[route].seconds)),
    Family("gauge", "copies_pending", "Transfers under way.", _ROUTE, _by_route(CopyMeter.pending)),
    Family("gauge", "oldest_copy_seconds", "Age of the oldest one under way.", (),
           lambda r: _one(r.of.sidecar.meter.oldest_s)),
    # events
    Family("gauge", "next_event_number", "The number that the next batch takes.", (), _stat("next_seq")),
    Family("counter", "events", "Events sent, before any dialect.", ("type", "medium"),
           lambda r: r.of.said().items()),
    Family("counter", "event_blocks", "Their blocks.", ("type", "medium"), lambda r: r.of.blocks_said().items()),
    Family("counter", "output_events", "Events as the output's dialect says them.",
           (*_OUTPUT, "type", "medium"), _said),
    Family("counter", "output_batches", "Batches sent.", _OUTPUT, _by_output(lambda view: view.output.sent)),
    Family("counter", "output_batches_refused", "Batches the socket did not take.", _OUTPUT,
           _by_output(lambda view: view.output.refused)),
    Family("counter", "output_sends_held", "Sends that took over 50 ms: readers came and went in masses.", _OUTPUT,
           _by_output(lambda view: view.output.held)),
    Family("gauge", "output_subscribers", "Connections now.", _OUTPUT, _by_output(lambda view: len(view.readers))),
    Family("counter", "replay_requests", "Replays asked for.", _OUTPUT, _output_stat("replay_requests")),
    Family("counter", "replay_dropped_clients", "Replay clients given up.", _OUTPUT,
           _output_stat("replay_dropped_clients")),
    Family("counter", "snapshots_answered", "Snapshots sent whole.", _OUTPUT, _output_stat("snapshots_answered")),
    Family("counter", "snapshots_unavailable", "Snapshots refused for now.", _OUTPUT,
           _output_stat("snapshots_unavailable")),
    Family("counter", "states_told_live", "States told live, to readers no reply can help.", (),
           _stat("states_told_live")),
    Family("counter", "snapshots_made", "Snapshots rendered, for replays too.", (), _stat("snapshots_made")),
    Family("gauge", "snapshot_bytes", "Held for late readers.", (), _stat("snapshot_bytes")),
    Family("counter", "burnt_numbers", "Numbers without a batch: a hole for every reader.", ("reason",), _burnt),
    Family("gauge", "pending_batches", "Numbered and not sent yet.", (), _stat("batches_pending")),
    Family("gauge", "retained_batches", "Kept for replay.", (), _stat("batches_retained")),
    Family("gauge", "retained_bytes", "Their bytes, in every encoding.", (), _stat("retained_bytes")),
    Family("counter", "heartbeats", "Empty batches sent while idle.", (), _stat("heartbeats")),
    # engines and the process
    Family("gauge", "engine_sessions", "Engines connected.", (), _stat("sessions")),
    Family("gauge", "worker_sessions", "Workers of engines connected.", (), _stat("workers")),
    Family("counter", "sessions_refused", "Peers turned away at their hello.", (),
           lambda r: _one(r.of.plane.refused)),
    Family("counter", "errors", "Faults and refused messages.", ("kind",), _errors),
    Family("counter", "log_lines_held_back", "Lines the log left out as repeats.", (),
           lambda _: _one(limit.held_back)),
    Family("histogram", "event_loop_lag_seconds", "Lateness of a timer.", (), lambda r: _one(r.of.lag.seconds)),
)  # fmt: skip


class MetricsCollector(Collector):
    """Reads the instruments anew for every scrape."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        reading = Reading(self._instruments)
        for family in FAMILIES:
            yield family.metric(reading)


class Metrics:
    """What `/metrics` answers: our own, and those of the process (memory, descriptors, CPU)."""

    def __init__(self, instruments: Instruments) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(MetricsCollector(instruments))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
