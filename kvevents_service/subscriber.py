"""What runs inside a router: the batches of one or many publishers, each in order, with every loss said.

    async with Subscriber([Source("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", label="pod-7"), ...]) as subscriber:
        async for item in subscriber:
            match item:
                case Batch():
                    residency[item.source].apply(item.batch.events)
                case Restart() | Resync() | Gap() | Undecodable():
                    residency[item.source].forget()

Each (endpoint, topic, rank) has numbers of its own. A hole is filled by replay, and live batches wait meanwhile.
Where a replay cannot fill it, the loss is said (`Gap`) and the whole state asked for; a publisher that has it tells
it after a `Resync`, in many batches: it is `catching_up` until the last of them was taken. Sources take turns; none
waits for another.

overflow: what happens to a consumer that is too slow. "wait": nothing is read while it is busy, and what ZeroMQ's
high water marks cannot keep is lost there. "drop": every source is read at once into a queue within `hold`, which
drops its oldest. In both cases the loss is a hole in the numbers like any other.

A publisher that started anew, is past the last number by the time it is heard again, says no id and does not clear
first looks like a gap.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal

from kvevents_service.core.residency import Residency
from kvevents_service.core.sequence import Gap, HoldLimits, Origin, Restart, Resync
from kvevents_service.errors import ConfigError
from kvevents_service.feed import Feed
from kvevents_service.items import Back, Batch, Item, Refused, Source, Stale, Undecodable
from kvevents_service.lane import Options
from kvevents_service.sockets import RECHECK_S
from kvevents_service.subscription import HIGH_WATER_MARK, MAX_TOPICS, TURN, Timing

__all__ = [
    "Back", "Batch", "Gap", "HoldLimits", "Item", "Origin", "Refused", "Restart", "Resync", "Source", "Stale",
    "Subscriber", "Timing", "Undecodable",
]  # fmt: skip

BURST: Final = 16
"""So many items of one source come before the next one's."""


class Subscriber:
    """An async context manager and iterator of `Item`, for one consumer. Cancelling its wait loses nothing.

    sources: endpoints or `Source`s. replay, topic: of those given as endpoints.
    observe_topics: receive every topic, so that `topics_seen` tells what the exact match leaves out.
    high_water_mark: messages that ZeroMQ keeps of each source. hold: bounds of each of our own queues.
    stale_after_s: a source silent for so long is `Stale`; None: never. Publishers with heartbeats send one every
        few seconds.
    track: keep the fold of each counter, for `state`.
    read_tokens: every `token_ids` is going to be read. They are lists then, cheaper than to read them later, and a
        batch with one that is no int is `Undecodable`; else many are `TokenIds`, which cost nothing until they are
        read, and raise WireError then.
    since: the first replay asks for this number and later ones; what was before is no loss.

    Entering raises ConfigError for an endpoint that cannot be one; a peer that is not there is waited for.
    Iterating ends only after `close`, and raises nothing of its own.
    """

    def __init__(
        self,
        sources: str | Source | Iterable[str | Source],
        *,
        replay: str | None = None,
        topic: str | None = "",
        observe_topics: bool = False,
        high_water_mark: int = HIGH_WATER_MARK,
        hold: HoldLimits | None = None,
        timing: Timing | None = None,
        overflow: Literal["wait", "drop"] = "wait",
        stale_after_s: float | None = None,
        track: bool = False,
        read_tokens: bool = False,
        since: int = 0,
    ) -> None:
        if overflow not in ("wait", "drop"):
            raise ConfigError("overflow", '"wait" or "drop"')
        several = [sources] if isinstance(sources, str | Source) else sources
        made = [one if isinstance(one, Source) else Source(one, replay, topic=topic or "") for one in several]
        if len({one.name for one in made}) != len(made) or not made:
            raise ConfigError("sources", "at least one, with labels or endpoints that differ")
        options = Options(
            observe_topics,
            high_water_mark,
            hold or HoldLimits(),
            timing or Timing(),
            overflow,
            stale_after_s,
            track,
            read_tokens,
            since,
        )
        self._wake = asyncio.Event()
        self._feeds = tuple(Feed(one, options, self._wake.set) for one in made)
        self._turns = deque(self._feeds)
        self._taken = 0
        self._burst = 0
        self._open = False
        self.since = since

    def __repr__(self) -> str:
        return f"<Subscriber {'; '.join(map(repr, self._feeds))}>"

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is read, with the endpoints that wildcards became."""
        return tuple(feed.source._replace(endpoint=feed.endpoint) for feed in self._feeds)

    @property
    def connected(self) -> bool:
        """Whether every source has a publisher that answered and has not gone away since."""
        return all(self.connections.values())

    @property
    def connections(self) -> dict[str, bool]:
        """By label: whether a publisher is there."""
        return {feed.source.name: feed.connected for feed in self._feeds}

    @property
    def stale(self) -> frozenset[str]:
        """Labels of the sources that are silent."""
        return frozenset(feed.source.name for feed in self._feeds if feed.stale)

    @property
    def catching_up(self) -> frozenset[str]:
        """Labels of the sources whose state is not whole yet: its history, what a hole lacks or the whole state is
        still to be asked for, or was not taken to its end. Never one that has no endpoint to ask."""
        return frozenset(feed.source.name for feed in self._feeds if feed.catching_up)

    @property
    def joined_at(self) -> int | None:
        """The first number ever delivered, of the first source. Without replay nothing is said of those before."""
        return self._feeds[0].joined_at

    @property
    def topics_seen(self) -> Mapping[bytes, int]:
        """Messages of each topic that came, also of those left out; the first 64 topics, cut to 256 bytes."""
        seen: Counter[bytes] = Counter()
        for feed in self._feeds:
            seen.update(feed.topics.seen)
        return dict(list(seen.items())[:MAX_TOPICS])

    def stats(self) -> dict[str, int]:
        """Counts since the start: what came, what was lost and where, how often a replay was needed."""
        counts: Counter[str] = Counter()
        for feed in self._feeds:
            counts.update(feed.stats())
        return dict(counts)

    def state(self) -> dict[Origin, Residency]:
        """With `track`: what each counter's batches add up to, as far as they were taken."""
        return {origin: fold for feed in self._feeds for origin, fold in feed.state().items()}

    async def __aenter__(self) -> Subscriber:
        self._open = True
        try:
            for feed in self._feeds:
                feed.open(asyncio.get_running_loop().time())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the sockets at once, and wait a bounded time for ZeroMQ's threads. Again is harmless."""
        self._open = False
        self._wake.set()
        await asyncio.gather(*(feed.close() for feed in self._feeds))

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Item:
        """The next item, waiting as long as it takes. StopAsyncIteration once closed."""
        self._taken += 1
        if self._taken % TURN == 0:
            await asyncio.sleep(0)
        while self._open:
            item = self._next(asyncio.get_running_loop().time())
            if item is not None:
                return item
            await self._wait()
        raise StopAsyncIteration

    def _next(self, now: float) -> Item | None:
        for _ in self._feeds:
            feed = self._turns[0]
            feed.poll(now)
            item = feed.take()
            self._burst = 0 if item is None else self._burst + 1
            if item is None or self._burst >= BURST:
                self._turns.rotate(-1)
                self._burst = 0
            if item is not None:
                return item
        return None

    async def _wait(self) -> None:
        """Until something can be read, or time has passed."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK_S):
                await self._wake.wait()
