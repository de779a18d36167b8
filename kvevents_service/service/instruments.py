"""What operators look at, in one place: the service's parts, and what is measured beside them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Final, NamedTuple

from msgspec.structs import asdict

from kvevents_service.service.connections import Connections
from kvevents_service.service.engines import EnginePlane
from kvevents_service.service.event_plane import BoundOutput, EventPlane
from kvevents_service.service.logs import limit
from kvevents_service.service.loop_lag import LoopLag
from kvevents_service.service.outputs import Output
from kvevents_service.service.roster import Engine
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.service.tally import Kind, Tally
from kvevents_service.service.tier_view import TierView, tiers_of
from kvevents_service.wire.dialects import DIALECTS

VERSION: Final = version("kvevents-service")


class OutputView(NamedTuple):
    """One output with its readers. stats: of its replay and snapshot endpoints, where it has them."""

    place: int
    bound: BoundOutput
    output: Output
    readers: Connections
    stats: dict[str, int]

    @property
    def labels(self) -> tuple[str, str]:
        return str(self.place), self.bound.dialect


class Instruments:
    """Read it at any time; nothing here changes the service. `close` it before the sockets of the outputs."""

    def __init__(self, sidecar: Sidecar, plane: EnginePlane, events: EventPlane) -> None:
        self.sidecar = sidecar
        self.plane = plane
        self.events = events
        self.lag = LoopLag(time.monotonic)
        self.started_at = time.time()
        self._readers = [Connections(output.socket) for output in events.outputs]

    def __repr__(self) -> str:
        return f"<Instruments of {self.sidecar!r}>"

    @property
    def tally(self) -> Tally:
        return self.events.publisher.tally

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        return [self.lag.run(), *(readers.run() for readers in self._readers)]

    def close(self) -> None:
        for readers in self._readers:
            readers.close()

    def tiers(self) -> list[TierView]:
        return tiers_of(self.sidecar)

    def outputs(self) -> list[OutputView]:
        events, views = self.events, []
        replayers, snapshots = iter(events.replayers), iter(events.snapshot_endpoints)
        for place, bound in enumerate(events.bound):
            stats = next(replayers).stats() if bound.replay else {}
            stats |= next(snapshots).stats() if bound.snapshot else {}
            views.append(OutputView(place, bound, events.outputs[place], self._readers[place], stats))
        return views

    def said(self) -> Counter[tuple[str, str]]:
        """Events by type and medium, before any dialect."""
        return _by_medium(self.tally.events)

    def blocks_said(self) -> Counter[tuple[str, str]]:
        """Their blocks."""
        return _by_medium(self.tally.blocks)

    def state(self) -> dict[str, object]:
        """Everything, as plain values: what `/state` answers and `kvevents top` shows. No token ids."""
        sidecar = self.sidecar
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "boot_id": sidecar.boot_id,
            "started_at": self.started_at,
            "now": time.time(),
            "draining": sidecar.draining,
            "engine_socket": self.plane.path,
            "outputs": [self._plain_output(view) for view in self.outputs()],
            "tiers": [tier.plain() for tier in self.tiers()],
            "engines": [_plain_engine(engine) for engine in sidecar.roster.engines.values()],
            "copies": self._plain_copies(),
            "oldest_copy_s": sidecar.meter.oldest_s,
            "events": self._plain_events(),
            "latest": [told._asdict() for told in self.tally.latest()],
            "errors": dict(sidecar.errors),
            "lag_s": {"largest": self.lag.seconds.largest_s, "count": self.lag.seconds.count},
            "log_lines_held_back": limit.held_back,
            "stats": sidecar.stats(),
        }

    def _plain_output(self, view: OutputView) -> dict[str, object]:
        output = view.output
        said = [
            {"type": kind, "medium": medium, "events": events}
            for kind, medium, events in self.tally.said_in(DIALECTS[view.bound.dialect])
        ]
        counts = {"batches": output.sent, "refused": output.refused}
        return {**asdict(view.bound), "subscribers": len(view.readers), **counts, **view.stats, "said": said}

    def _plain_copies(self) -> list[dict[str, object]]:
        meter = self.sidecar.meter
        return [
            {
                **route._asdict(),
                "count": traffic.seconds.count,
                "failed": traffic.failed,
                "bytes": traffic.bytes,
                "seconds": traffic.seconds.total_s,
                "pending": meter.pending(route),
            }
            for route, traffic in meter.traffic.items()
        ]

    def _plain_events(self) -> list[dict[str, object]]:
        blocks = self.blocks_said()
        return [
            {"type": kind, "medium": medium, "events": events, "blocks": blocks[kind, medium]}
            for (kind, medium), events in self.said().items()
        ]


def _by_medium(counts: Counter[Kind]) -> Counter[tuple[str, str]]:
    """Without regard to groups."""
    total: Counter[tuple[str, str]] = Counter()
    for kind, count in counts.items():
        total[kind.type, kind.medium] += count
    return total


def _plain_engine(engine: Engine) -> dict[str, object]:
    return {"session_id": engine.session_id, "engine_id": engine.engine_id[:64], "ranks": engine.head.ranks}
