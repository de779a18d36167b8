"""Prometheus metrics, made from what is counted anyway when somebody asks: nothing here runs on the hot path.

`FAMILIES` is the whole list; docs/operations.md has it as a table, and tests hold that and the dashboard to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvevents_service.service.event_families import EVENTS
from kvevents_service.service.family import Family, Reading, one
from kvevents_service.service.instruments import Instruments
from kvevents_service.service.logs import limit
from kvevents_service.service.offload_families import OFFLOAD
from kvevents_service.service.source_families import SOURCES
from kvevents_service.version import VERSION

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PIECE_FAMILIES: Final = 8

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


def _errors(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    """Refused messages by their code, and every fault that has a counter of its own."""
    for code, count in reading.offload.errors.items() if reading.offload else ():
        yield (f"refused_{code}",), count
    stats = reading.stats
    for kind in FAULTS:
        yield (kind,), stats.get(kind, 0)


FAMILIES: Final = (
    Family("gauge", "build_info", "1; the version that runs.", ("version",), lambda _: [((VERSION,), 1)]),
    Family("gauge", "start_time_seconds", "When it started, since the epoch.", (), lambda r: one(r.of.started_at)),
    Family("gauge", "draining", "1 once it was told to stop.", (), lambda r: one(r.of.draining)),
    *OFFLOAD,
    *EVENTS,
    *SOURCES,
    # the process
    Family("counter", "errors", "Faults and refused messages.", ("kind",), _errors),
    Family("counter", "log_lines_held_back", "Lines the log left out as repeats.", (),
           lambda _: one(limit.held_back)),
    Family("histogram", "event_loop_lag_seconds", "Lateness of a timer.", (), lambda r: one(r.of.lag.seconds)),
)  # fmt: skip


class Metrics:
    """What `/metrics` answers: our own, and those of the process (memory, descriptors, CPU)."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._process = ProcessCollector(registry=None)

    def text(self) -> bytes:
        """The whole page."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The page, some families at a time: all of it takes as long as many lookups. Read anew each time."""
        reading = Reading(self._instruments)
        for start in range(0, len(FAMILIES), PIECE_FAMILIES):
            yield _written([family.metric(reading) for family in FAMILIES[start : start + PIECE_FAMILIES]])
        yield _written(self._process.collect())


class _Written(Collector):
    """What has been read already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _written(metrics: Iterable[Metric]) -> bytes:
    """As Prometheus reads them: the text of a page is that of its families, one behind the other."""
    return generate_latest(_Written(metrics))
