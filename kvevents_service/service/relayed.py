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
from kvevents_service.core.source import StreamSource
from kvevents_service.core.source_holding import SourceLimits
from kvevents_service.feed import Feed
from kvevents_service.items import Batch, Item, Source, Undecodable
from kvevents_service.lane import Options
from kvevents_service.service.rarely import is_told
from kvevents_service.service.recorded_feed import RecordedFeed
from kvevents_service.service.recorder import Recorder
from kvevents_service.sockets import RECHECK_S
from kvevents_service.source_config import SourceConfig

log = logging.getLogger(__name__)

GONE_AFTER_S: Final = 1.0
"""A connection that is lost for less is a hiccup of the network."""
LOOK_S: Final = RECHECK_S / 2
"""Whether it is there is looked at so often at most: the answer costs as much as a batch."""
TURN_ITEMS: Final = 32
"""After so many items the other sources, the publisher and the engines get a turn."""


CONNECTING, JOINING, CONNECTED, STALE = SOURCE_STATES = ("connecting", "joining", "connected", "stale")
"""Nobody is there; what it has is being asked for; all is told as it comes; its blocks are withdrawn."""


class SourceView(msgspec.Struct, frozen=True):
    """A source for people and metrics. lag_s: from its last batch's time to when it came, age_s: to now, both by
    its clock; None: nothing has come. state: one of SOURCE_STATES.

    resident: blocks that are announced, by medium. orphans: blocks that wait for their parent.
    """

    name: str
    engine: str
    model: str
    dp_rank: int
    state: str
    connected: bool
    away: bool
    lag_s: float | None
    age_s: float | None
    resident: dict[str, int]
    counts: dict[str, int]


class RelayedSource:
    """`turn` reads what there is and says it through `publish`, in the same step of the loop: a cut is always the
    fold of what is numbered."""

    def __init__(
        self,
        config: SourceConfig,
        publish: Callable[[RelayedSource, tuple[Announcement, ...]], None],
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
        self.sent_at: float | None = None
        self._sent: float | None = None
        self._origin: Origin | None = None
        self._publish = publish
        self._wall_clock = wall_clock
        self._heard = False
        self._duplicates = 0
        self._look_at = 0.0

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
        if self.state.settling:
            said += self.state.step()
        if items < TURN_ITEMS:
            said += self._at_rest(now)
        if self._sent is not None:
            self._note_lag(self._sent)
        if said:
            self._publish(self, tuple(said))
        return items == TURN_ITEMS or self.feed.readable or self.state.settling

    def _note_lag(self, sent: float) -> None:
        """Of the newest batch of a turn."""
        self._sent = None
        if isfinite(sent):
            self.sent_at, self.lag_s = sent, max(0.0, self._wall_clock() - sent)

    def withdraw(self) -> None:
        """Say that everything of it is gone: nobody will follow it any more."""
        gone = self.state.hide()
        while gone or self.state.settling:
            self._publish(self, gone)
            gone = self.state.step()

    # items

    def _said_by(self, item: Item) -> tuple[Announcement, ...]:
        match item:
            case Batch() | Gap() | Restart() | Resync() | Undecodable():
                return self._said_of(item) if self._is_of_origin(item) else ()
        return ()  # silence is looked at when all is taken

    def _said_of(self, item: Batch | Gap | Restart | Resync | Undecodable) -> tuple[Announcement, ...]:
        self._heard = True
        match item:
            case Batch():
                self._sent = item.batch.ts
                return self.state.apply(item.batch.events)
            case Restart() | Resync():
                return self.state.doubt()
            case Undecodable(seq=None):
                return ()  # no batch, and no number is missing
        log.warning("source %s: batches are lost, what was known of it is withdrawn", self.feed.source.name)
        return self.state.lose()

    def _is_of_origin(self, item: Batch | Gap | Restart | Resync | Undecodable) -> bool:
        """The first counter of our rank is the one that is relayed: two would be two caches.

        Only a batch says whose it is.
        """
        origin, ours = item.source, item.source.dp_rank == self.dp_rank
        if self._origin is None and ours and isinstance(item, Batch):
            self._origin = origin
        if origin == self._origin or (self._origin is None and ours):
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
        settled = self.state.settle() if self.state.doubting and not asking else ()
        if now < self._look_at:
            return settled
        self._look_at = now + LOOK_S
        look = self.presence.look(
            now,
            connected=self.feed.connected,
            stale=self.feed.stale,
            asking=asking or self.state.settling,
            heard=self._take_heard(),
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
        config, feed = self.config, self.feed.stats()
        return SourceView(
            name=self.feed.source.name,
            engine=config.engine,
            model=config.model,
            dp_rank=self.dp_rank,
            state=self._state(),
            connected=self.feed.connected,
            away=self.presence.away,
            lag_s=self.lag_s,
            age_s=None if self.sent_at is None else max(0.0, self._wall_clock() - self.sent_at),
            resident=self.state.resident(),
            counts={"duplicate_batches": feed.pop("duplicates", 0), **feed, **self.state.stats(), **self.counts},
        )

    def _state(self) -> str:
        if self.presence.away:
            return STALE
        if not self.feed.connected:
            return CONNECTING
        return JOINING if self.feed.replaying or self.state.settling else CONNECTED
