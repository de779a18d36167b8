"""One metric: its name, its labels, and how it is read from the instruments when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvevents_service.service.histogram import Histogram
from kvevents_service.service.instruments import Instruments, JournalView, NatsView, OutputView
from kvevents_service.service.relayed import SourceView

if TYPE_CHECKING:
    from kvevents_service.service.offload_view import OffloadView

PREFIX: Final = "kvevents_"

Samples = Iterable[tuple[tuple[str, ...], float | Histogram]]


class Reading:
    """The instruments at one scrape: what is dear to read is read once."""

    def __init__(self, instruments: Instruments) -> None:
        self.of = instruments

    @property
    def offload(self) -> OffloadView | None:
        return self.of.offload

    @cached_property
    def stats(self) -> dict[str, int]:
        return self.of.stats()

    @cached_property
    def journals(self) -> list[JournalView]:
        return self.of.journals()

    @cached_property
    def outputs(self) -> list[OutputView]:
        return self.of.outputs()

    @cached_property
    def nats(self) -> list[NatsView]:
        return self.of.nats()

    @cached_property
    def sources(self) -> list[SourceView]:
        return self.of.sources()


class Family(NamedTuple):
    """name: without the prefix and the ending."""

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


def one(value: float | Histogram) -> Samples:
    """The only sample of a metric without labels."""
    return (((), value),)


def stat(key: str) -> Callable[[Reading], Samples]:
    """A counter of the whole process, 0 where no part has it."""
    return lambda reading: one(reading.stats.get(key, 0))
