"""The relay: reads engines' own streams and speaks for them in our journal, beside our tiers or alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvevents_service.core.cut import StateSource
from kvevents_service.core.metadata import Announcement
from kvevents_service.core.source_union import SourceUnion
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
        self._publish = publish
        self.relayed = [
            RelayedSource(config, self._tell, wake=self._wake.set, wall_clock=wall_clock, others=others)
            for config in configs
        ]
        self._union = SourceUnion([source.state for source in self.relayed])

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
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                self._wake.clear()
                busy = [source.turn(loop.time()) for source in self.relayed]
                await (asyncio.sleep(0) if any(busy) else self._wake.wait())
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        """Sources are looked at now and then, whatever wakes. A timeout for each wait would cost more."""
        while True:
            await asyncio.sleep(RECHECK_S)
            self._wake.set()

    def withdraw(self) -> None:
        """Say that everything relayed is gone, before nobody says anything any more."""
        for source in self.relayed:
            source.withdraw()

    def _tell(self, source: RelayedSource, said: tuple[Announcement, ...]) -> None:
        told = said if len(self.relayed) == 1 else self._union.told_of(source.state, said)
        if told:
            self._publish(told)

    # instruments

    def sources(self) -> list[StateSource]:
        """For snapshots: an engine's own tiers are faster than ours."""
        return [self._union] if len(self.relayed) > 1 else [source.state for source in self.relayed]

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
