"""The relay: reads engines' own streams and speaks for them in our journal, beside our tiers or alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvevents_service.core.cut import StateSource
from kvevents_service.core.metadata import Announcement
from kvevents_service.service.event_plane import EventPlane
from kvevents_service.service.relayed import RelayedSource, SourceView
from kvevents_service.sockets import RECHECK_S
from kvevents_service.source_config import SourceConfig
from kvevents_service.wire.media import MEDIUM_CPU, MEDIUM_STORAGE

OUR_MEDIA = frozenset({MEDIUM_CPU, MEDIUM_STORAGE})
"""What a sidecar's own tiers are. An engine whose connector offloads to us says them as well."""


class Relay:
    """The sources of one journal; they take turns. `others`: media that are not theirs to speak of."""

    def __init__(
        self,
        configs: Sequence[SourceConfig],
        publish: Callable[[tuple[Announcement, ...]], int],
        *,
        wall_clock: Callable[[], float],
        others: frozenset[str] = frozenset(),
    ) -> None:
        self._wake = asyncio.Event()
        self.relayed = [
            RelayedSource(config, publish, wake=self._wake.set, wall_clock=wall_clock, others=others)
            for config in configs
        ]

    def __repr__(self) -> str:
        return f"<Relay of {self.relayed!r}>"

    def open(self) -> None:
        """ConfigError for an endpoint that cannot be one; the sources need not be there yet."""
        now = asyncio.get_running_loop().time()
        for source in self.relayed:
            source.open(now)

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self.relayed))

    async def run(self) -> None:
        """Relay until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            busy = [source.turn(loop.time()) for source in self.relayed]
            if any(busy):
                await asyncio.sleep(0)
            else:
                await self._woken()

    async def _woken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK_S):
                await self._wake.wait()

    def withdraw(self) -> None:
        """Say that everything relayed is gone, before nobody says anything any more."""
        for source in self.relayed:
            source.withdraw()

    # instruments

    def sources(self) -> list[StateSource]:
        """For snapshots: an engine's own tiers are faster than ours."""
        return [source.state for source in self.relayed]

    def views(self) -> list[SourceView]:
        return [source.view() for source in self.relayed]

    def stats(self) -> dict[str, int]:
        """Counters summed over the sources."""
        total: Counter[str] = Counter(relay_sources=len(self.relayed), relay_connected=0, relay_away=0)
        for view in self.views():
            total.update(relay_connected=view.connected, relay_away=view.away)
            total.update({f"relay_{name}": count for name, count in view.counts.items()})
            total.update({f"relay_resident_{medium}": blocks for medium, blocks in view.resident.items()})
        return dict(total)


def relay_into(events: EventPlane, configs: Sequence[SourceConfig], others: frozenset[str] = frozenset()) -> Relay:
    """A relay that says what it hears in this journal; its counters are among the publisher's."""
    publisher = events.publisher
    relay = Relay(configs, publisher.publish, wall_clock=time.time, others=others)
    if configs:
        publisher.more_stats = lambda: {**events.stats(), **relay.stats()}
    return relay
