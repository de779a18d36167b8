"""Readers: the real subscriber's `Feed`, and strict doubles of two routers with the rules of docs/interop.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from core.models import UNIT
from doubles import dynamo, vllm_router

from kvevents_service.core.residency import Residency
from kvevents_service.feed import Feed
from kvevents_service.items import Batch, Item, Source
from kvevents_service.lane import Options
from kvevents_service.subscription import Timing
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.frames import parse_live, parse_replay_reply
from kvevents_service.wire.peek import starts_anew
from recovery.network import Frames, Network, Request, Subscription
from recovery.sidecar import DYNAMO, LIFE_S, ROUTER, SNAPSHOTS, VLLM, Name, State

TIMING = Timing(stall_s=0.6, total_s=30.0, settle_s=0.5, refresh_s=0.5, refresh_max_s=1.0)
TICK_S = 0.25


class OpenFeed(Feed):
    """A feed of a subscription that is there already."""

    def attach(self, live: Subscription) -> None:
        self._live = live  # type: ignore[assignment]
        self._take(self._lanes[0], self._lanes[0].sequence.start())


class Told:
    """The last batch that a feed's consumer took: whose it was, and its number."""

    life = -1
    seq = -1


class FeedReader:
    """`Feed` and a consumer in its own time. `sure`: no loss was told since the state was last told anew."""

    def __init__(self, network: Network, output: int, model: tuple[GroupSpec, ...], options: Options) -> None:
        self.output = output
        self.link = network.subscribe(output)
        snapshots = "snapshot" if output == SNAPSHOTS else None
        self.feed = OpenFeed(Source("live", "replay", snapshots), options._replace(track=True), lambda: None)
        self.lane = self.feed._lanes[0]
        inner = {group.index: group.block_size for group in model if group.block_size > UNIT}
        self.fold = self.lane.residency = Residency(inner)
        self.subscription = Subscription(network, self.link)
        self.told = Told()
        self.sure = True
        self.items: list[str] = []
        self.now = 0.0
        self.feed.attach(self.subscription)

    def __repr__(self) -> str:
        return f"<FeedReader of {self.output} {self.lane.sequence!r} {' '.join(self.items[-12:])}>"

    @property
    def busy(self) -> bool:
        sequence = self.lane.sequence
        waits = self.lane.request is not None or not sequence.settled or sequence.distrusted
        return waits or bool(self.feed._out) or len(self.link) > 0 or sequence.stats()["held"] > 0

    @property
    def knows(self) -> bool:
        """Nothing is held back, missing or half told."""
        sequence = self.lane.sequence
        return self.sure and not sequence.replaying and not self.feed._out and not sequence.stats()["held"]

    def read(self, live: int, replies: int, seconds: float) -> None:
        self.link.allowed = live
        if self.lane.request is not None:
            self.lane.request.allowed = replies  # type: ignore[attr-defined]
        self.now += seconds
        self.feed.poll(self.now)

    def consume(self, most: int) -> None:
        for _ in range(most):
            before = sum((+self.fold.faults).values())
            item = self.feed.take()
            if item is None:
                return
            self._took(item)
            if self.sure and self.output != ROUTER:  # an exact reply may be newer than what comes live behind it
                assert sum((+self.fold.faults).values()) == before, f"{self.fold.faults} by {item}, {self}"

    def _took(self, item: Item) -> None:
        self.items.append(type(item).__name__)
        if isinstance(item, Batch):
            self.items[-1] = str(item.seq)
            self.told.life, self.told.seq = int(item.batch.ts // LIFE_S), item.seq
        else:
            assert self.items[-1] in ("Gap", "Restart", "Resync"), item
            self.sure = self.items[-1] != "Gap"
        if isinstance(item, Batch) and self.fold.cleared and not self.sure:
            self.sure = type(item.batch.events[0]).__name__ == "AllBlocksCleared" if item.batch.events else False

    @property
    def state(self) -> State:
        return frozenset(
            Name(shelf.medium, shelf.group, key) for shelf, keys in self.fold.shelves.items() for key in keys
        )

    def close(self) -> None:
        self.lane.close_request()


class BlockingReader:
    """A router that reads nothing live while it waits for an answer."""

    output: int
    media: Mapping[str, str]
    """What its tiers are called here."""

    def __init__(self, network: Network, block_size: int) -> None:
        self.link = network.subscribe(self.output)
        self.last = -1
        self.whole = False
        """What it has is a state and all that followed. Set by a clear, and by the first number of all."""
        self.request: Request | None = None
        self._pending: Frames = []
        self._told: list[Frames] = []
        self._network = network
        self.start(block_size)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} last={self.last} whole={self.whole} {self.request and self.request.number}>"

    def start(self, block_size: int) -> None:
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        return self.request is not None or len(self.link) > 0

    def read(self, live: int, replies: int) -> None:
        if self.request is not None:
            self.request.allowed = replies
            for frames in self.request.drain(replies):
                if parse_replay_reply(frames) is None:
                    return self._answered(ended=True)
                self._told.append(frames[1:])
            if self.request.dead:
                self.gone()
            return None
        self.link.allowed = live
        while self.request is None:
            frames = next(self.link.drain(1), None)
            if frames is None:
                return None
            self.live(frames)

    def gone(self) -> None:
        """The process that was asked died."""
        raise NotImplementedError

    def live(self, frames: Frames) -> None:
        raise NotImplementedError

    def judge(self, told: list[Frames], pending: Frames, *, ended: bool) -> None:
        raise NotImplementedError

    def ask(self, frames: Frames) -> None:
        self.request, self._pending, self._told = (
            self._network.ask("replay", self.output, self.last + 1),
            frames,
            [],
        )

    def _answered(self, *, ended: bool) -> None:
        assert self.request is not None
        self.request.close()
        self.request = None
        self.judge(self._told, self._pending, ended=ended)

    def apply(self, frames: Frames) -> None:
        message = parse_live(frames)
        self.whole |= starts_anew(message.payload)
        self.last = message.seq
        self.index.feed(frames)

    def close(self) -> None:
        if self.request is not None:
            self.request.close()

    @property
    def state(self) -> State:
        return frozenset(Name(self.media[tier], 0, key) for tier, keys in self.held().items() for key in keys)


class RouterReader(BlockingReader):
    """vllm-router: takes a reply only from the number asked for up to the live message, else has no blocks."""

    output = ROUTER
    media = MappingProxyType({"CPU": "CPU", "STORAGE": "STORAGE"})

    def start(self, block_size: int) -> None:
        self.index = vllm_router.Index(block_size)
        self.held = self.index.tree.held

    def live(self, frames: Frames) -> None:
        seq = parse_live(frames).seq
        if seq == self.last:
            return
        if seq < self.last:
            self.clear()
            self.last = -1
        if seq == 0:
            self.whole = True
        if seq > self.last + 1:
            self.ask(frames)
        else:
            self.apply(frames)

    def clear(self) -> None:
        self.index.tree.clear()
        self.whole = False

    def judge(self, told: list[Frames], pending: Frames, *, ended: bool) -> None:
        first, live = self.last + 1, parse_live(pending).seq
        seqs, wanted = [parse_live(frames).seq for frames in told], list(range(first, live + 1))
        if ended and seqs[: len(wanted)] == wanted:
            self.whole |= first == 0
            for frames in told[: len(wanted)]:
                self.apply(frames)
            return
        self.clear()
        self.last = live
        if not seqs or seqs[0] != first:
            self.apply(pending)

    def gone(self) -> None:
        self._answered(ended=False)


class DynamoReader(BlockingReader):
    """Dynamo's indexer: applies whatever a reply has, and waits for its end for ever, or until it is restarted."""

    output = DYNAMO
    media = MappingProxyType({"host": "CPU", "disk": "STORAGE"})

    def start(self, block_size: int) -> None:
        self._block_size = block_size
        self.index = dynamo.Index(block_size)

    def held(self) -> dict[str, set[int]]:
        return self.index.held()

    def live(self, frames: Frames) -> None:
        seq = parse_live(frames).seq
        if seq == 0:
            self.whole = True
        if seq > self.last + 1:
            self.ask(frames)
        elif seq > self.last:
            self.apply(frames)

    def judge(self, told: list[Frames], pending: Frames, *, ended: bool) -> None:
        self.whole |= bool(told) and parse_live(told[0]).seq == 0
        for frames in told:
            self._reach(frames)
        if parse_live(pending).seq > self.last:
            self._reach(pending)

    def _reach(self, frames: Frames) -> None:
        self.whole &= parse_live(frames).seq <= self.last + 1
        self.apply(frames)

    def gone(self) -> None:
        self.request = None
        self.start(self._block_size)
        self.last, self.whole = -1, False


Reader = FeedReader | RouterReader | DynamoReader
FEED_OUTPUTS = (VLLM, VLLM, SNAPSHOTS, ROUTER, DYNAMO)
