"""What runs inside a router: one publisher's batches, in order, with every loss said.

    async with Subscriber("tcp://10.0.0.7:5557", replay="tcp://10.0.0.7:5558") as subscriber:
        async for item in subscriber:
            match item:
                case Batch():
                    residency.apply(item.batch.events)
                case Restart():
                    residency.forget()

It reads only while the consumer waits for an item. What a consumer is too slow for is lost in one place, the high
water marks of ZeroMQ, and comes back by replay or as a `Gap`. An endpoint is one publisher with one counter; of a
proxy in front of several, a topic selects one. A publisher that started anew, and is past the last number by the
time it is heard again, looks like a gap.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, NamedTuple, TypeAlias

from kvevents_service.core.sequence import Ask, Deliver, Gap, HoldLimits, Restart, Sequencer, Step
from kvevents_service.errors import WireError
from kvevents_service.subscription import HIGH_WATER_MARK, Replay, Subscription, Timing, TopicFilter
from kvevents_service.wire.codec import Skipped, decode_batch
from kvevents_service.wire.events import EventBatch
from kvevents_service.wire.frames import LiveFrame, parse_live, parse_replay_reply

__all__ = ["Batch", "Gap", "HoldLimits", "Item", "Restart", "Subscriber", "Timing", "Undecodable"]

TICK_S: Final = 0.01
"""How long live messages stay in their socket while a replay is waited for."""
TURN: Final = 64
"""After so many items other coroutines get the loop; of so many live messages, those of the replay get a turn."""
_COUNTED: Final = (
    *("batches", "replayed", "events_skipped", "undecodable"),
    *("gaps", "batches_missing", "restarts", "replays", "replays_given_up"),
)


class Batch(NamedTuple):
    """One batch. skipped: what of it was left out (unknown events). replayed: it came by replay."""

    topic: bytes
    seq: int
    batch: EventBatch
    skipped: tuple[Skipped, ...]
    replayed: bool


class Undecodable(NamedTuple):
    """A message that is no batch. If its number is known, that counts as delivered: no `Gap` follows for it."""

    topic: bytes
    seq: int | None
    error: WireError


Item: TypeAlias = Batch | Gap | Restart | Undecodable


class Subscriber:
    """An async context manager and iterator of `Item`, for one consumer. Cancelling its wait loses nothing.

    endpoint: the publisher's; a wildcard is this machine. replay: its replay endpoint; with it the history comes
    first, holes are filled, and live batches wait meanwhile, bounded by `hold`. topic: exactly this one; "" or
    None for all. observe_topics: receive every topic, so that `topics_seen` tells what the exact match leaves out.

    Entering raises ConfigError for an endpoint that cannot be one; a peer that is not there is waited for.
    Iterating ends only after `close`, and raises nothing of its own.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str | None = "",
        observe_topics: bool = False,
        high_water_mark: int = HIGH_WATER_MARK,
        hold: HoldLimits | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay
        self.topic = (topic or "").encode()
        self._topics = TopicFilter(self.topic)
        self._observe_topics = observe_topics
        self._high_water_mark = high_water_mark
        self._timing = timing or Timing()
        self._sequence = Sequencer(replay=replay is not None, limits=hold)
        self._out: deque[Deliver | Gap | Restart | Undecodable] = deque()
        self._counts: Counter[str] = Counter()
        self._turn = 0
        self._settles_at = 0.0
        self._live: Subscription | None = None
        self._replay: Replay | None = None

    def __repr__(self) -> str:
        state = "closed" if self._live is None else "connected" if self.connected else "connecting"
        return f"<Subscriber {self.endpoint} {state} {self._sequence!r}>"

    @property
    def connected(self) -> bool:
        """Whether a publisher answered at the endpoint, and has not gone away since."""
        return self._live is not None and self._live.connected

    @property
    def joined_at(self) -> int | None:
        """The first number ever delivered. Without replay, what was before it is unknown but no `Gap`."""
        return self._sequence.joined_at

    @property
    def topics_seen(self) -> Mapping[bytes, int]:
        """Messages of each topic that came, also of those left out; the first 64 topics, cut to 256 bytes."""
        return self._topics.seen

    def stats(self) -> dict[str, int]:
        """Counts since the start: what came, what was lost and where, how often a replay was needed."""
        counts = {name: self._counts[name] for name in _COUNTED}
        return {**counts, "other_topics": self._topics.refused, **self._sequence.stats()}

    async def __aenter__(self) -> Subscriber:
        prefix = b"" if self._observe_topics else self.topic
        self._live = Subscription(self.endpoint, prefix, self._high_water_mark)
        try:
            self.endpoint = self._live.endpoint
            self._take(self._sequence.start())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the sockets at once, and wait a bounded time for ZeroMQ's thread. Again is harmless."""
        live, self._live = self._live, None
        self._close_replay()
        if live is not None:
            await live.close()

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Item:
        """The next item, waiting as long as it takes. StopAsyncIteration once closed."""
        self._turn += 1
        if self._turn % TURN == 0:
            await asyncio.sleep(0)
        while not self._out:
            if self._live is None:
                raise StopAsyncIteration
            await self._read(self._live, self._replay)
        return self._item(self._out.popleft())

    async def _read(self, live: Subscription, replay: Replay | None) -> None:
        if replay is not None:
            return await self._read_both(live, replay)
        try:
            async with asyncio.timeout_at(None if self._sequence.settled else self._settles_at):
                self._on_live(await live.receiver.recv())
        except TimeoutError:
            self._sequence.settle()
        return None

    async def _read_both(self, live: Subscription, replay: Replay) -> None:
        frames = await replay.reply(TICK_S)
        for _ in range(TURN):
            if (message := live.receiver.recv_nowait()) is None:
                break
            self._on_live(message)
        if self._replay is not replay:
            return  # a live message told of a restart: this answer is the old publisher's
        if frames is not None:
            self._on_reply(frames, replay)
        if self._replay is replay and replay.overdue(self._timing):
            self._counts["replays_given_up"] += 1
            self._take(self._sequence.give_up())

    def _on_live(self, frames: list[bytes]) -> None:
        if not self._topics.accepts(frames[0]):
            return
        try:
            frame = parse_live(frames)
        except WireError as error:
            self._out.append(Undecodable(frames[0], None, error))
        else:
            self._take(self._sequence.live(frame))

    def _on_reply(self, frames: list[bytes], replay: Replay) -> None:
        try:
            frame = parse_replay_reply(frames)
        except WireError as error:
            self._out.append(Undecodable(b"", None, error))
            return
        if frame is None:
            self._take(self._sequence.end())
        elif len(frames) < 4 and not frame.topic:  # a publisher of the older framing does not say the topic
            self._on_replayed(frame._replace(topic=self.topic), replay)
        elif self._topics.accepts(frame.topic):
            self._on_replayed(frame, replay)

    def _on_replayed(self, frame: LiveFrame, replay: Replay) -> None:
        steps = self._sequence.replayed(frame)
        if steps:
            replay.progressed()
        self._take(steps)

    def _take(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self._ask(step.start)
            else:
                self._out.append(step)
        if self._replay is not None and not self._sequence.replaying:
            self._close_replay()
            self._settles_at = asyncio.get_running_loop().time() + self._timing.settle_s

    def _ask(self, start: int) -> None:
        self._close_replay()
        if self._live is not None and self.replay_endpoint is not None:
            self._counts["replays"] += 1
            self._replay = self._live.replay(self.replay_endpoint, start)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _item(self, step: Deliver | Gap | Restart | Undecodable) -> Item:
        match step:
            case Deliver():
                return self._decoded(step.frame, step.replayed)
            case Gap():
                self._counts["gaps"] += 1
                self._counts["batches_missing"] += step.got - step.expected
            case Restart():
                self._counts["restarts"] += 1
            case Undecodable():
                self._counts["undecodable"] += 1
        return step

    def _decoded(self, frame: LiveFrame, replayed: bool) -> Item:
        try:
            batch, skipped = decode_batch(frame.payload)
        except WireError as error:
            self._counts["undecodable"] += 1
            return Undecodable(frame.topic, frame.seq, error)
        self._counts["batches"] += 1
        self._counts["replayed"] += replayed
        self._counts["events_skipped"] += len(skipped)
        return Batch(frame.topic, frame.seq, batch, skipped, replayed)
