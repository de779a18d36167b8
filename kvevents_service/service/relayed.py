"""One relayed source: its feed, what it holds, whether it is there. Nothing here waits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Final

import msgspec

from kvevents_service.core.metadata import Announcement
from kvevents_service.core.presence import Look, Presence
from kvevents_service.core.sequence import Gap, Origin, Restart, Resync
from kvevents_service.core.source import SourceLimits, StreamSource
from kvevents_service.feed import Feed
from kvevents_service.items import Batch, Item, Source, Undecodable
from kvevents_service.lane import Options
from kvevents_service.service.rarely import is_told
from kvevents_service.service.recorded_feed import RecordedFeed
from kvevents_service.service.recorder import Recorder
from kvevents_service.source_config import SourceConfig

log = logging.getLogger(__name__)

GONE_AFTER_S: Final = 1.0
"""A connection that is lost for less is a hiccup of the network."""
TURN_ITEMS: Final = 16
"""After so many items the other sources, the publisher and the engines get a turn."""


class SourceView(msgspec.Struct, frozen=True):
    """A source for people and metrics. lag_s: from its last batch's time to ours; None: nothing has come.

    resident: blocks that are announced, by medium. orphans: blocks that wait for their parent.
    """

    name: str
    engine: str
    model: str
    dp_rank: int
    connected: bool
    away: bool
    lag_s: float | None
    resident: dict[str, int]
    counts: dict[str, int]


class RelayedSource:
    """`turn` reads what there is and says it through `publish`, in the same step of the loop: a cut is always the
    fold of what is numbered."""

    def __init__(
        self,
        config: SourceConfig,
        publish: Callable[[tuple[Announcement, ...]], int],
        *,
        wake: Callable[[], None],
        wall_clock: Callable[[], float],
        others: frozenset[str] = frozenset(),
        limits: SourceLimits | None = None,
    ) -> None:
        ((self.dp_rank, self.config),) = config.expanded()
        self.recorder: Recorder | None = None
        self.feed = self._made(wake)
        self.state = StreamSource(block_size=config.block_size, others=others, limits=limits)
        self.presence = Presence(GONE_AFTER_S)
        self.counts = Counter(other_origin=0)
        self.lag_s: float | None = None
        self._origin: Origin | None = None
        self._publish = publish
        self._wall_clock = wall_clock
        self._heard = False
        self._duplicates = 0

    def __repr__(self) -> str:
        return f"<RelayedSource {self.feed!r} {self.presence!r} {self.state!r}>"

    def _made(self, wake: Callable[[], None]) -> Feed | RecordedFeed:
        config = self.config
        if config.input is not None:
            return RecordedFeed(config.input, config.speed, dp_rank=self.dp_rank)
        source = Source(config.endpoint, config.replay, topic=config.topic, dp_rank=self.dp_rank)
        record = self._record if config.record is not None else None
        return Feed(source, Options(stale_after_s=config.stale_after_s, read_tokens=True, record=record), wake)

    def open(self, now: float) -> None:
        """Connect, or wait for somebody to be there. ConfigError for what cannot be followed or recorded."""
        config = self.config
        if config.record is not None:
            self.recorder = Recorder(
                config.record, self._wall_clock, replay=config.replay is not None, redact=config.redact
            )
        self.feed.open(now)

    def _record(self, frames: Sequence[bytes], reply: bool) -> None:
        if self.recorder is not None:
            self.recorder.message(frames, reply=reply)

    async def close(self) -> None:
        await self.feed.close()
        if self.recorder is not None:
            self.recorder.close()

    def turn(self, now: float) -> bool:
        """Whether there may be more."""
        said: list[Announcement] = []
        self.feed.poll(now)
        items = 0
        while items < TURN_ITEMS and (item := self.feed.take()) is not None:
            said += self._said_by(item)
            items += 1
        if items < TURN_ITEMS:
            said += self._at_rest(now)
        if said:
            self._publish(tuple(said))
        return items > 0 or self.state.settling

    def withdraw(self) -> None:
        """Say that everything of it is gone: nobody will follow it any more."""
        gone = self.state.hide()
        if gone:
            self._publish(gone)

    # items

    def _said_by(self, item: Item) -> tuple[Announcement, ...]:
        match item:
            case Batch() | Gap() | Restart() | Resync() | Undecodable():
                return self._said_of(item) if self._is_of_origin(item.source) else ()
        return ()  # silence is looked at when all is taken

    def _said_of(self, item: Batch | Gap | Restart | Resync | Undecodable) -> tuple[Announcement, ...]:
        self._heard = True
        match item:
            case Batch():
                sent = item.batch.ts
                self.lag_s = max(0.0, self._wall_clock() - sent) if isfinite(sent) else self.lag_s
                return self.state.apply(item.batch.events)
            case Restart() | Resync():
                return self.state.doubt()
            case Undecodable(seq=None):
                return ()  # no batch, and no number is missing
        log.warning("source %s: batches are lost, what was known of it is withdrawn", self.feed.source.name)
        return self.state.lose()

    def _is_of_origin(self, origin: Origin) -> bool:
        """The first counter of our rank is the one that is relayed: two would be two caches."""
        if self._origin is None and origin.dp_rank == self.dp_rank:
            self._origin = origin
        if origin == self._origin or (self._origin is None and not origin.topic):
            return True
        self.counts["other_origin"] += 1
        if is_told(self.counts["other_origin"]):
            log.warning(
                "source %s: events of topic %r and rank %s are left out: see topic and dp_rank of its settings",
                self.feed.source.name, origin.topic.decode(errors="replace"), origin.dp_rank,
            )  # fmt: skip
        return False

    # when all that came is taken

    def _at_rest(self, now: float) -> tuple[Announcement, ...]:
        asking = self.feed.replaying
        settled = () if asking else self.state.settle()
        asking |= self.state.settling
        look = self.presence.look(
            now, connected=self.feed.connected, stale=self.feed.stale, asking=asking, heard=self._take_heard()
        )
        match look:
            case Look.ASK:
                self.feed.refresh()
            case Look.HIDE:
                log.warning("source %s is gone: its blocks are withdrawn", self.feed.source.name)
                return (*settled, *self.state.hide())
            case Look.SHOW:
                log.info("source %s is back", self.feed.source.name)
                return (*settled, *self.state.show())
        return settled

    def _take_heard(self) -> bool:
        duplicates = self.feed.duplicates
        heard = self._heard or duplicates > self._duplicates
        self._heard, self._duplicates = False, duplicates
        return heard

    # instruments

    def view(self) -> SourceView:
        config = self.config
        return SourceView(
            name=self.feed.source.name,
            engine=config.engine,
            model=config.model,
            dp_rank=self.dp_rank,
            connected=self.feed.connected,
            away=self.presence.away,
            lag_s=self.lag_s,
            resident=self.state.resident(),
            counts={**self.feed.stats(), **self.state.stats(), **self.counts},
        )
