"""What operators see of the sidecar proper: tiers, copies, engines. A relay has none of it."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from kvevents_service.service.copy_meter import CopyMeter
from kvevents_service.service.engines import EnginePlane
from kvevents_service.service.roster import Engine
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.service.tier_view import TierView, tiers_of


class OffloadView:
    """One look at it: what is dear to read is read once."""

    def __init__(self, sidecar: Sidecar, plane: EnginePlane) -> None:
        self.sidecar = sidecar
        self.plane = plane

    def __repr__(self) -> str:
        return f"<OffloadView of {self.sidecar!r}>"

    @property
    def meter(self) -> CopyMeter:
        return self.sidecar.meter

    @property
    def errors(self) -> Counter[str]:
        """Refused messages by their code."""
        return self.sidecar.errors

    @cached_property
    def tiers(self) -> list[TierView]:
        return tiers_of(self.sidecar)

    @cached_property
    def stats(self) -> dict[str, int]:
        """Counters of every part, those of the publisher among them."""
        return self.sidecar.stats()

    def plain(self) -> dict[str, object]:
        """Its part of `/state`."""
        return {
            "engine_socket": self.plane.path,
            "tiers": [tier.plain() for tier in self.tiers],
            "engines": [_plain_engine(engine) for engine in self.sidecar.roster.engines.values()],
            "copies": self._plain_copies(),
            "oldest_copy_s": self.meter.oldest_s,
            "errors": dict(self.errors),
        }

    def _plain_copies(self) -> list[dict[str, object]]:
        return [
            {
                **route._asdict(),
                "count": traffic.seconds.count,
                "failed": traffic.failed,
                "bytes": traffic.bytes,
                "seconds": traffic.seconds.total_s,
                "pending": self.meter.pending(route),
            }
            for route, traffic in self.meter.traffic.items()
        ]


def _plain_engine(engine: Engine) -> dict[str, object]:
    return {"session_id": engine.session_id, "engine_id": engine.engine_id[:64], "ranks": engine.head.ranks}
