"""A publisher on real sockets, as the wire knows it, and what a test takes from a subscriber of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
from core.publishers import ModelPublisher, stored

from kvevents_service.core.sequence import NOWHERE
from kvevents_service.sockets import Receiver, bind
from kvevents_service.subscriber import Batch, Gap, Item, Restart, Resync, Source, Subscriber, Timing
from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.events import Event, EventBatch
from kvevents_service.wire.frames import REPLAY_END, live_frames, parse_replay_request, replay_reply

DEADLINE_S = 20
EMPTY = encode_batch(EventBatch(1.0, [], 0))
QUICK = Timing(stall_s=0.1, settle_s=0.02)


class Peer:
    """A publisher on XPUB, which tells when a subscriber is there, and its replay endpoint."""

    def __init__(self, context: zmq.Context, ports: tuple[str, str] = ("0", "0"), **shape: object) -> None:
        self.context = context
        self.xpub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDHWM, 0)
        self.endpoint = bind(self.xpub, f"tcp://127.0.0.1:{ports[0]}", "pub")
        self.replay = bind(self.router, f"tcp://127.0.0.1:{ports[1]}", "replay")
        self.model = ModelPublisher(**shape)

    @property
    def ports(self) -> tuple[str, str]:
        return self.endpoint.rpartition(":")[2], self.replay.rpartition(":")[2]

    def send(self, batches: int, *events: Event) -> None:
        for _ in range(batches):
            self.xpub.send_multipart(live_frames(*self.model.publish(*(events or (stored(self.model.next_seq),)))))

    def lose(self, batches: int) -> None:
        """Batches that are retained but never arrive."""
        for _ in range(batches):
            self.model.publish(stored(self.model.next_seq))

    def source(self, **more: object) -> Source:
        return Source(self.endpoint, self.replay, **more)

    async def subscribed(self) -> None:
        await received(self.xpub)

    async def answer(self) -> None:
        with Receiver(self.router) as receiver:
            while True:
                identity, *request = await receiver.recv()
                if request[-1] == b"snapshot":
                    self.router.send_multipart([identity, b"", *self.snapshot()])
                    continue
                for frame in self.model.reply(parse_replay_request(request)):
                    self.router.send_multipart([identity, *replay_reply(*frame)])
                self.router.send_multipart([identity, *REPLAY_END])

    def snapshot(self) -> list[bytes]:
        snapshot = self.model.snapshot()
        return [snapshot.seq.to_bytes(8, "big", signed=True), snapshot.publisher_id, *snapshot.payloads]


@asynccontextmanager
async def peer(**options: object) -> AsyncIterator[Peer]:
    context = zmq.Context()
    try:
        made = Peer(context, **options)
        answering = asyncio.create_task(made.answer())
        try:
            yield made
        finally:
            answering.cancel()
            await asyncio.wait([answering])
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Subscriber]:
    """A reader that takes all that comes and keeps its fold."""

    async def follow() -> None:
        async for _ in subscriber:
            pass

    async with Subscriber(source, track=True) as subscriber, asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        yield subscriber
        task.cancel()


async def received(socket: zmq.Socket) -> list[bytes]:
    with Receiver(socket) as receiver:
        async with asyncio.timeout(DEADLINE_S):
            return await receiver.recv()


async def take(subscriber: Subscriber, items: int) -> list[Item]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(subscriber) for _ in range(items)]


async def briefly(subscriber: Subscriber, items: int) -> list[object]:
    """Numbers of batches ("r5": by replay), the other items as they are."""
    taken = await take(subscriber, items)
    return [plain(item) for item in taken]


def plain(item: Item) -> object:
    if isinstance(item, Batch):
        return f"r{item.seq}" if item.replayed else item.seq
    return item._replace(source=NOWHERE) if isinstance(item, Gap | Restart | Resync) else item
