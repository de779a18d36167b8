"""What operators look at, in one place: the service's parts, and what is measured beside them.

The parts are any number of event planes, each with its journal, the relay into it, and for a sidecar its tiers and
engines (`offload`). Nothing here needs torch: a relay has it, too.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import asdict

from kvevents_service.core.journal import Journal
from kvevents_service.service.connections import Connections
from kvevents_service.service.event_plane import BoundOutput, EventPlane
from kvevents_service.service.logs import limit
from kvevents_service.service.loop_lag import LoopLag
from kvevents_service.service.nats_output import NatsOutput
from kvevents_service.service.outputs import Output
from kvevents_service.service.relay import Relay
from kvevents_service.service.relayed import SourceView
from kvevents_service.service.tally import LATEST, Kind, Tally
from kvevents_service.version import VERSION
from kvevents_service.wire.dialects import DIALECTS

if TYPE_CHECKING:
    from kvevents_service.service.offload_view import OffloadView

NO_OFFLOAD: Final[dict[str, object]] = {
    **{"engine_socket": "", "tiers": [], "engines": [], "copies": [], "oldest_copy_s": 0.0, "errors": {}}
}
"""What `/state` says in the place of an `OffloadView`'s."""


class Watched(NamedTuple):
    """One journal with its outputs, and what is relayed into it."""

    events: EventPlane
    relay: Relay

    @property
    def dp_rank(self) -> int:
        return self.events.bound[0].dp_rank


class OutputView(NamedTuple):
    """One output with its readers. stats: of its replay and snapshot endpoints, where it has them."""

    place: int
    bound: BoundOutput
    output: Output
    readers: Connections
    tally: Tally
    stats: dict[str, int]

    @property
    def labels(self) -> tuple[str, str]:
        return str(self.place), self.bound.dialect


class JournalView(NamedTuple):
    """One journal. stats: those of its publisher, outputs and sources."""

    dp_rank: int
    journal: Journal
    stats: dict[str, int]


class NatsView(NamedTuple):
    """One output on NATS."""

    subject: str
    output: NatsOutput
    stats: dict[str, int]


class Instruments:
    """Read it at any time; nothing here changes the service. `close` it before the sockets of the outputs.

    service: `serve` or `relay`. boot_id: of this life. look: a view of the sidecar proper, if there is one.
    """

    def __init__(
        self,
        service: str,
        boot_id: str,
        watched: Sequence[Watched],
        *,
        is_draining: Callable[[], bool],
        look: Callable[[], OffloadView] | None = None,
    ) -> None:
        self.service = service
        self.boot_id = boot_id
        self.watched = watched
        self.lag = LoopLag(time.monotonic)
        self.started_at = time.time()
        self._is_draining = is_draining
        self._look = look
        self._readers = [Connections(output.socket) for one in watched for output in one.events.outputs]

    def __repr__(self) -> str:
        return f"<Instruments of {self.service} {self.boot_id[:8]}, {len(self.watched)} journals>"

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        return [self.lag.run(), *(readers.run() for readers in self._readers)]

    def close(self) -> None:
        for readers in self._readers:
            readers.close()

    @property
    def draining(self) -> bool:
        return self._is_draining()

    @property
    def offload(self) -> OffloadView | None:
        """As it is now; take it once for one look."""
        return None if self._look is None else self._look()

    @property
    def tallies(self) -> list[Tally]:
        return [one.events.publisher.tally for one in self.watched]

    # views

    def outputs(self) -> list[OutputView]:
        places, readers = count(), iter(self._readers)
        return [
            OutputView(next(places), bound, output, next(readers), one.events.publisher.tally, stats)
            for one in self.watched
            for bound, output, stats in _outputs_of(one.events)
        ]

    def nats(self) -> list[NatsView]:
        return [
            NatsView(output.config.subject, output, output.stats())
            for one in self.watched
            for output in one.events.nats
        ]

    def journals(self) -> list[JournalView]:
        return [
            JournalView(one.dp_rank, one.events.publisher.journal, one.events.publisher.stats())
            for one in self.watched
        ]

    def sources(self) -> list[SourceView]:
        return [view for one in self.watched for view in one.relay.views()]

    def said(self) -> Counter[tuple[str, str]]:
        """Events by type and medium, before any dialect."""
        return _by_medium(tally.events for tally in self.tallies)

    def blocks_said(self) -> Counter[tuple[str, str]]:
        """Their blocks."""
        return _by_medium(tally.blocks for tally in self.tallies)

    def stats(self) -> dict[str, int]:
        """Counters and gauges of every part, summed over journals."""
        offload = self.offload
        if offload is not None:
            return offload.stats
        total: Counter[str] = Counter()
        for one in self.watched:
            total.update(one.events.publisher.stats())
        return dict(total)

    # the state

    def state(self) -> dict[str, object]:
        """Everything, as plain values: what `/state` answers and `kvevents top` shows. No token ids."""
        offload = self.offload
        return {
            "service": self.service,
            "version": VERSION,
            "pid": os.getpid(),
            "boot_id": self.boot_id,
            "started_at": self.started_at,
            "now": time.time(),
            "draining": self.draining,
            **(NO_OFFLOAD if offload is None else offload.plain()),
            "outputs": [_plain_output(view) for view in self.outputs()],
            "nats": [{"subject": view.subject, **view.stats} for view in self.nats()],
            "sources": [msgspec.to_builtins(view) for view in self.sources()],
            "journals": [{"dp_rank": one.dp_rank, "next_seq": one.journal.next_seq} for one in self.journals()],
            "events": self._plain_events(),
            "latest": self._latest(),
            "lag_s": {"largest": self.lag.seconds.largest_s, "count": self.lag.seconds.count},
            "log_lines_held_back": limit.held_back,
            "stats": self.stats() if offload is None else offload.stats,
        }

    def _plain_events(self) -> list[dict[str, object]]:
        blocks = self.blocks_said()
        return [
            {"type": kind, "medium": medium, "events": events, "blocks": blocks[kind, medium]}
            for (kind, medium), events in self.said().items()
        ]

    def _latest(self) -> list[dict[str, object]]:
        """Of all journals together, the newest last."""
        told = [(one.dp_rank, event) for one in self.watched for event in one.events.publisher.tally.latest()]
        told.sort(key=lambda placed: placed[1].ts)
        return [{"dp_rank": dp_rank, **event._asdict()} for dp_rank, event in told[-LATEST:]]


def _outputs_of(events: EventPlane) -> Iterator[tuple[BoundOutput, Output, dict[str, int]]]:
    replayers, snapshots = iter(events.replayers), iter(events.snapshot_endpoints)
    for bound, output in zip(events.bound, events.outputs, strict=True):
        stats = next(replayers).stats() if bound.replay else {}
        stats |= next(snapshots).stats() if bound.snapshot else {}
        yield bound, output, stats


def _plain_output(view: OutputView) -> dict[str, object]:
    said = [
        {"type": kind, "medium": medium, "events": events}
        for kind, medium, events in view.tally.said_in(DIALECTS[view.bound.dialect])
    ]
    counts = {"batches": view.output.sent, "refused": view.output.refused}
    return {**asdict(view.bound), "subscribers": len(view.readers), **counts, **view.stats, "said": said}


def _by_medium(counts: Iterator[Counter[Kind]]) -> Counter[tuple[str, str]]:
    """Without regard to groups."""
    total: Counter[tuple[str, str]] = Counter()
    for kinds in counts:
        for kind, events in kinds.items():
            total[kind.type, kind.medium] += events
    return total
