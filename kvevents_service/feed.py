"""One source of a subscriber: its subscription, and a lane for each counter that comes over it.

Nothing here waits. `poll` reads what there is, `take` gives the next item.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from kvevents_service.core.residency import Residency
from kvevents_service.core.sequence import Ask, Deliver, Gap, Origin, Restart, Resync, Step
from kvevents_service.errors import WireError
from kvevents_service.items import Back, Batch, Item, Refused, Source, Stale, Undecodable
from kvevents_service.lane import Lane, Options
from kvevents_service.sockets import RECHECK_S
from kvevents_service.subscription import TURN, Request, Subscription, TopicFilter
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.frames import LiveFrame, parse_live, parse_replay_reply
from kvevents_service.wire.peek import parse_snapshot, peek

_OF_THE_SOURCE: Final = (Stale, Back, Refused)
MAX_LANES: Final = 64
STEP_S: Final = 0.25
"""The most that passes on the clock of deadlines between two polls: a consumer that was away stalls no replay."""
COUNTED: Final = (
    *("batches", "replayed", "events_skipped", "undecodable", "gaps", "batches_missing", "restarts", "resyncs"),
    *("replays", "replays_given_up", "lanes_refused", "bytes"),
)


class Feed:
    """Reads one source. `open` raises ConfigError for an endpoint that cannot be one."""

    def __init__(self, source: Source, options: Options, wake: Callable[[], None]) -> None:
        self.source = source
        self.endpoint = source.endpoint
        self.stale = False
        self.topics = TopicFilter(source.topic.encode())
        self.options = options
        self._wake = wake
        self._counts: Counter[str] = Counter()
        self._lanes = [self._lane(Origin(source.name, source.topic.encode(), source.dp_rank))]
        self._keyed: dict[tuple[bytes, int | None], Lane] = {}
        self._out: deque[tuple[Lane, Deliver | Gap | Restart | Resync | Undecodable] | Stale | Back | Refused] = (
            deque()
        )
        self._live: Subscription | None = None
        self._behind = False  # what was asked for was not all taken
        self._known = source.replay is None and source.snapshot is None  # nothing asked for went unanswered
        self._polled_at = self._heard_at = 0.0

    def __repr__(self) -> str:
        state = "closed" if self._live is None else "connected" if self.connected else "connecting"
        lanes = " ".join(repr(lane.sequence) for lane in self._lanes)
        return f"{self.endpoint} {state}{' stale' if self.stale else ''} {lanes}"

    @property
    def connected(self) -> bool:
        """Whether a publisher answered at the endpoint, and has not gone away since."""
        return self._live is not None and self._live.connected

    @property
    def joined_at(self) -> int | None:
        return self._lanes[0].sequence.joined_at

    @property
    def replaying(self) -> bool:
        """Whether an answer is under way."""
        return any(lane.sequence.replaying for lane in self._lanes)

    @property
    def catching_up(self) -> bool:
        """Whether what was taken is not yet all that the publisher tells of what it holds."""
        return self._behind or not self._known or any(lane.sequence.distrusted for lane in self._lanes)

    @property
    def duplicates(self) -> int:
        """Messages that had come before."""
        return sum(lane.sequence.duplicates for lane in self._lanes)

    @property
    def readable(self) -> bool:
        """Whether there may be more than was taken. Now and then `poll` without."""
        live = self._live
        if self._out or (live is not None and live.incoming.readable):
            return True
        return any(lane.request is not None and lane.request.readable for lane in self._lanes)

    def refresh(self) -> None:
        """Ask again for all there is, as after a loss: it may be another publisher. Needs an endpoint to ask."""
        for lane in self._lanes:
            self._take(lane, lane.sequence.refresh())

    def stats(self) -> Counter[str]:
        counts = Counter({name: self._counts[name] for name in COUNTED})
        counts.update(other_topics=self.topics.refused, dropped=self._live.dropped if self._live else 0)
        for lane in self._lanes:
            counts.update(lane.sequence.stats())
        return counts

    def state(self) -> dict[Origin, Residency]:
        return {lane.origin: lane.residency for lane in self._lanes if lane.residency is not None}

    def open(self, now: float) -> None:
        """Connect, and ask for the history."""
        options = self.options
        prefix = b"" if options.observe_topics else self.topics.wanted
        inbox = options.hold if options.overflow == "drop" else None
        self._live = Subscription(
            self.endpoint, prefix, options.high_water_mark, self._wake, inbox, self.source.keys
        )
        self.endpoint = self._live.endpoint
        self._heard_at = self._polled_at = now
        self._take(self._lanes[0], self._lanes[0].sequence.start())

    async def close(self) -> None:
        """Close the sockets at once, and wait a bounded time for ZeroMQ's thread. Again is harmless."""
        live, self._live = self._live, None
        self._out.clear()
        for lane in self._lanes:
            lane.close_request()
        if live is not None:
            await live.close()

    def poll(self, now: float) -> None:
        """Read what there is, if there may be something and all that was read is taken."""
        live = self._live
        if live is None or self._out or not self._due(now):
            return
        step, self._polled_at = min(now - self._polled_at, STEP_S), now
        idle = True
        for frames in live.incoming.drain(TURN):
            if idle:
                self._heard(now)
                idle = False
            self._record(frames, False)
            self._on_live(frames)
        for lane in tuple(self._lanes):
            self._take(lane, lane.passed(step, idle))
            self._poll_request(lane, step)
        self._check_silence(now)
        self._check_taken()
        if idle and (reason := live.new_refusal(now)):
            self._out.append(Refused(self.source.name, reason))

    def take(self) -> Item | None:
        """The next item of what was read."""
        if not self._out:
            return None
        head = self._out.popleft()
        self._check_taken()
        return head if isinstance(head, _OF_THE_SOURCE) else self._item(*head)

    def _check_taken(self) -> None:
        if self._behind and not self._out:
            self._behind = self.replaying

    def _due(self, now: float) -> bool:
        return now - self._polled_at >= RECHECK_S or self.readable

    def _record(self, frames: list[bytes], reply: bool) -> None:
        self._counts["bytes"] += sum(map(len, frames))
        if self.options.record is not None:
            self.options.record(frames, reply)

    # silence

    def _heard(self, now: float) -> None:
        self._heard_at, self._known = now, True
        if self.stale:
            self.stale = False
            self._out.append(Back(self.source.name))

    def _check_silence(self, now: float) -> None:
        limit_s, silent_s = self.options.stale_after_s, now - self._heard_at
        if limit_s is not None and silent_s > limit_s and not self.stale:
            self.stale = True
            self._out.append(Stale(self.source.name, silent_s))

    # live messages

    def _on_live(self, frames: list[bytes]) -> None:
        if not self.topics.accepts(frames[0]):
            return
        try:
            frame = parse_live(frames)
        except WireError as error:
            self._undecodable(self._lanes[0], frames[0], error)
        else:
            lane = self._lane_of(frame)
            if lane is not None:
                self._take(lane, lane.sequence.live(frame))

    def _lane(self, origin: Origin) -> Lane:
        asks = self.source.replay is not None or self.source.snapshot is not None
        return Lane(origin, replay=asks, options=self.options)

    def _lane_of(self, frame: LiveFrame) -> Lane | None:
        """The counter that a batch belongs to; the first one has the first that comes. None: too many."""
        if self.source.snapshot is not None:
            return self._lanes[0]
        header = peek(frame.payload)
        if header is None:  # no batch: its number is that of the topic's newest counter
            return next(
                (lane for lane in reversed(self._lanes) if lane.origin.topic == frame.topic), self._lanes[0]
            )
        key = frame.topic, self.source.dp_rank if header.dp_rank is None else header.dp_rank
        return self._keyed.get(key) or self._new_lane(key)

    def _new_lane(self, key: tuple[bytes, int | None]) -> Lane | None:
        origin = Origin(self.source.name, *key)
        if not self._keyed:
            self._lanes[0].name(origin)
        elif len(self._lanes) < MAX_LANES:
            self._lanes.append(self._lane(origin))
            self._take(self._lanes[-1], self._lanes[-1].sequence.start())
        else:
            self._counts["lanes_refused"] += 1
            return None
        self._keyed[key] = self._lanes[-1]
        return self._lanes[-1]

    # answers

    def _poll_request(self, lane: Lane, step_s: float) -> None:
        request = lane.request
        if request is None:
            return
        request.waited(step_s)
        for frames in request.drain(TURN):
            self._on_answer(lane, request, frames)
            if lane.request is not request:
                return
        if request.overdue(self.options.timing):
            self._give_up(lane)

    def _give_up(self, lane: Lane) -> None:
        self._counts["replays_given_up"] += 1
        self._known = False
        self._take(lane, lane.sequence.give_up())

    def _on_answer(self, lane: Lane, request: Request, frames: list[bytes]) -> None:
        self._known = True
        try:
            if request.kind == "snapshot":
                self._on_snapshot(lane, frames)
            else:
                self._record(frames, True)
                self._on_reply(lane, request, frames)
        except WireError as error:
            self._undecodable(lane, b"", error)

    def _on_snapshot(self, lane: Lane, frames: list[bytes]) -> None:
        snapshot = parse_snapshot(frames)
        if snapshot is None:
            self._give_up(lane)
        else:
            self._take(lane, lane.sequence.snapshot(snapshot))

    def _on_reply(self, lane: Lane, request: Request, frames: list[bytes]) -> None:
        frame = parse_replay_reply(frames)
        if frame is None:
            return self._take(lane, lane.sequence.end())
        if len(frames) < 4 and not frame.topic:  # a publisher of the older framing does not say the topic
            frame = frame._replace(topic=lane.origin.topic)
        elif not self.topics.accepts(frame.topic):
            return None
        if self._keyed and self._lane_of(frame) is not lane:
            return None
        steps = (lane if self._keyed else self._lane_of(frame) or lane).sequence.replayed(frame)
        if steps:
            request.progressed()
        return self._take(lane, steps)

    # what the numbers say

    def _take(self, lane: Lane, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self._ask(lane, step.start)
            else:
                self._out.append((lane, step))
        if lane.request is not None and not lane.sequence.replaying:
            lane.close_request()
            lane.settle_in_s = self.options.timing.settle_s

    def _ask(self, lane: Lane, start: int) -> None:
        lane.close_request()
        live, source = self._live, self.source
        if live is None:
            return
        self._counts["replays"] += 1
        self._behind = True
        if source.replay is None or (start == 0 and source.snapshot is not None):
            assert source.snapshot is not None, "one of the two can be asked"
            lane.request = live.snapshot(source.snapshot)
        else:
            lane.request = live.replay(source.replay, start)

    def _undecodable(self, lane: Lane, topic: bytes, error: WireError) -> None:
        self._out.append((lane, Undecodable(topic, None, error, lane.origin)))

    # items

    def _item(self, lane: Lane, step: Deliver | Gap | Restart | Resync | Undecodable) -> Item:
        item = self._decoded(lane, step.frame, step.replayed) if isinstance(step, Deliver) else step
        self._count(item)
        if lane.residency is not None:
            if isinstance(item, Batch):
                lane.residency.apply(item.batch.events)
            else:
                lane.residency.forget()
        return item

    def _decoded(self, lane: Lane, frame: LiveFrame, replayed: bool) -> Batch | Undecodable:
        topic = frame.topic or lane.origin.topic
        try:
            batch, skipped = decode_batch(frame.payload, read_tokens=self.options.read_tokens)
        except WireError as error:
            if not replayed:  # to ask again would bring the same
                lane.sequence.distrust()
            return Undecodable(topic, frame.seq, error, lane.origin)
        return Batch(topic, frame.seq, batch, skipped, replayed, lane.origin, frame.payload)

    def _count(self, item: Item) -> None:
        match item:
            case Batch():
                self._counts["batches"] += 1
                if item.replayed or item.skipped:
                    self._counts["replayed"] += item.replayed
                    self._counts["events_skipped"] += len(item.skipped)
            case Gap():
                self._counts["gaps"] += 1
                self._counts["batches_missing"] += item.got - item.expected
            case Restart():
                self._counts["restarts"] += 1
            case Resync():
                self._counts["resyncs"] += 1
            case Undecodable():
                self._counts["undecodable"] += 1
