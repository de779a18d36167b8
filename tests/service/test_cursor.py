"""What one replay client can hold is bounded, and it gets all of it in order once it reads."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvevents_service.core.journal import Journal
from kvevents_service.core.replay import Reply
from kvevents_service.service.cursor import IN_FLIGHT_BYTES, Cursor
from kvevents_service.service.outputs import Output
from kvevents_service.sockets import Receiver, bind
from kvevents_service.wire.frames import REPLAY_END, parse_replay_reply

DEADLINE_S = 20.0
LARGE = 1 << 20


class Room:
    """A router with one client that has said hello, and a journal of `batches` payloads of `size` bytes."""

    def __init__(self, context: zmq.Context, batches: int, size: int) -> None:
        self.router, self.client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.SNDHWM, 100_000)
        self.client.setsockopt(zmq.RCVHWM, 1)
        self.client.connect(bind(self.router, "tcp://127.0.0.1:0", "replay"))
        self.journal = Journal()
        for number in range(batches):
            self.journal.append((), 0.0)
            self.journal.take_pending()
            self.journal.retain(number, bytes([number % 256]) * size)
        self.output = Output(context.socket(zmq.PUB), topic="kv")

    async def cursor(self) -> Cursor:
        self.client.send(b"hello")
        with Receiver(self.router) as receiver:
            identity, _ = await asyncio.wait_for(receiver.recv(), DEADLINE_S)
        reply = Reply(self.journal, 0, 0, self.journal.next_seq - 1)
        return Cursor(self.router, identity, self.output, reply)

    def reaches(self, cursor: Cursor) -> bool:
        try:
            self.router.send_multipart([cursor._identity, b""], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


@pytest.fixture
def make() -> Iterator[Callable[..., Room]]:
    """Rooms whose sockets are closed at the end."""
    context, made = zmq.Context(), []

    def room(batches: int, size: int) -> Room:
        made.append(Room(context, batches, size))
        return made[-1]

    yield room
    context.destroy(linger=0)


async def test_a_client_that_does_not_read_has_so_much_on_the_way_and_no_more(make: Callable[..., Room]) -> None:
    room = make(60, LARGE)
    cursor = await room.cursor()
    for _ in range(200):
        cursor.send_some()
        await asyncio.sleep(0.001)
    stuck_at = cursor.reply.seq
    assert cursor._in_flight_bytes <= IN_FLIGHT_BYTES + LARGE
    assert stuck_at < 60, "the rest waits in the journal"
    seqs = []
    with Receiver(room.client) as receiver:
        async with asyncio.timeout(DEADLINE_S):
            while not cursor.over or len(seqs) < 60:
                cursor.send_some()
                frames = receiver.recv_nowait()
                if frames is None:
                    await asyncio.sleep(0.001)
                elif (reply := parse_replay_reply(frames)) is not None:
                    assert reply.payload == bytes([reply.seq % 256]) * LARGE
                    seqs.append(reply.seq)
    assert seqs == list(range(60))


async def test_the_end_marker_is_the_last_message(make: Callable[..., Room]) -> None:
    room = make(3, 10)
    cursor = await room.cursor()
    while not cursor.over:
        assert cursor.send_some()
    with Receiver(room.client) as receiver:
        frames = [await asyncio.wait_for(receiver.recv(), DEADLINE_S) for _ in range(4)]
    assert frames[-1] == REPLAY_END


async def test_a_client_that_has_left_is_over(make: Callable[..., Room]) -> None:
    room = make(300, 10)
    cursor = await room.cursor()
    room.client.close(linger=0)
    async with asyncio.timeout(DEADLINE_S):
        while not cursor.over:
            cursor.reply.seq = 0
            cursor.send_some()
            await asyncio.sleep(0.001)


async def test_a_client_that_left_before_its_end_marker_is_over(make: Callable[..., Room]) -> None:
    room = make(0, 1)
    cursor = await room.cursor()
    room.client.close(linger=0)
    async with asyncio.timeout(DEADLINE_S):
        while room.reaches(cursor):
            await asyncio.sleep(0.01)
    assert cursor.send_some()
    assert cursor.over
