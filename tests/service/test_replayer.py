"""Replay over real sockets: every form of request is answered, and nobody waits for a reader that does not read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal
from kvevents_service.core.replay import WAIT, Recovery, Reply
from kvevents_service.service import replayer
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.renderer import Renderer
from kvevents_service.service.replayer import Replayer
from kvevents_service.sockets import Receiver, bind
from kvevents_service.wire.frames import REPLAY_END, parse_replay_reply

DEADLINE_S = 20.0


class Desk:
    """A replayer with `batches` retained from `first` on, and its clients."""

    def __init__(self, context: zmq.Context, first: int, batches: int, high_water_mark: int) -> None:
        self.context = context
        self.journal = Journal(first_seq=first)
        for _ in range(batches):
            self.journal.retain(self.journal.append((), 0.0), b"x" * 2000)
            self.journal.take_pending()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, high_water_mark)
        router.setsockopt(zmq.SNDBUF, 8192)
        self.endpoint = bind(router, "tcp://127.0.0.1:0", "replay")
        output = Output(context.socket(zmq.PUB), topic="kv")
        publisher = Publisher(self.journal, [output], numbers=None, wall_clock=time.time)
        recovery = Recovery(self.journal, [Encoding()], clock=time.monotonic, wall_clock=time.time)
        self.renderer = Renderer(recovery, publisher)
        self.replayer = Replayer(router, output, self.renderer, clock=time.monotonic)
        self.parts = (publisher, self.renderer, self.replayer)

    def client(self, kind: int = zmq.DEALER, high_water_mark: int = 1000) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.RCVBUF, 8192)
        socket.connect(self.endpoint)
        return socket

    async def ask(self, frames: list[bytes], kind: int = zmq.DEALER) -> list[int]:
        """The numbers of a whole answer, up to its end marker."""
        with self.client(kind) as socket, Receiver(socket) as receiver:
            socket.send_multipart(frames)
            return await answer(receiver)


async def answer(receiver: Receiver) -> list[int]:
    numbers = []
    async with asyncio.timeout(DEADLINE_S):
        while (reply := parse_replay_reply(await receiver.recv())) is not None:
            numbers.append(reply.seq)
    return numbers


@asynccontextmanager
async def desk(first: int = 0, batches: int = 5, high_water_mark: int = 1000) -> AsyncIterator[Desk]:
    context = zmq.Context()
    try:
        opened = Desk(context, first, batches, high_water_mark)
        tasks = [asyncio.create_task(part.run()) for part in opened.parts]
        try:
            yield opened
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        context.destroy(linger=0)


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("delimiter", [[b""], []])
async def test_a_dealer_is_answered_with_and_without_delimiter(start: int, delimiter: list[bytes]) -> None:
    async with desk() as opened:
        assert await opened.ask([*delimiter, seq(start)]) == list(range(start, 5))


async def test_a_snapshot_stands_for_numbers_that_are_no_longer_kept() -> None:
    async with desk(first=100) as opened:
        assert await opened.ask([b"", seq(7)]) == list(range(7, 105))


@pytest.mark.parametrize("bad", [b"", b"1234567", b"123456789", seq(-1)])
async def test_a_bad_request_gets_the_end_marker(bad: bytes) -> None:
    async with desk() as opened:
        assert await opened.ask([b"", bad]) == []
        assert opened.replayer.bad_requests == 1


async def test_the_future_gets_the_end_marker() -> None:
    async with desk() as opened:
        assert await opened.ask([b"", seq(1_000_000)]) == []


async def test_a_req_socket_gets_its_first_reply() -> None:
    async with desk() as opened:
        with opened.client(zmq.REQ) as socket, Receiver(socket) as receiver:
            socket.send(seq(3))
            assert (await asyncio.wait_for(receiver.recv(), DEADLINE_S))[1] == seq(3)


async def test_a_reader_that_does_not_read_delays_nobody() -> None:
    async with desk(batches=300, high_water_mark=2) as opened:
        with opened.client(high_water_mark=2) as slow:
            slow.send_multipart([b"", seq(0)])
            assert await opened.ask([b"", seq(0)]) == list(range(300))
            with Receiver(slow) as receiver:  # and when it does read, it gets everything, the end marker included
                assert await answer(receiver) == list(range(300))


async def test_fifty_clients_at_once_all_get_everything() -> None:
    async with desk(batches=50) as opened:
        answers = await asyncio.gather(*(opened.ask([b"", seq(0)]) for _ in range(50)))
        assert answers == [list(range(50))] * 50


async def test_a_state_that_breaks_off_has_no_end_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Reply.payload
    monkeypatch.setattr(Reply, "payload", lambda reply: told(reply) if reply.seq not in range(10, 104) else WAIT)
    monkeypatch.setattr(replayer, "CLIENT_DEADLINE_S", 2.0)
    async with desk(first=100) as opened, asyncio.timeout(DEADLINE_S):
        with opened.client() as socket, Receiver(socket) as receiver:
            socket.send_multipart([b"", seq(7)])
            while not opened.replayer.dropped_clients:
                await asyncio.sleep(0.01)
            socket.send_multipart([b"", seq(104)])  # its answer comes at once behind the three numbers
            assert await answer(receiver) == [7, 8, 9, 104]


async def test_a_flood_of_requests_leaves_turns_to_the_rest_of_the_loop() -> None:
    async with desk() as opened:
        with opened.client() as socket:
            for _ in range(900):
                socket.send_multipart([b"", b"bad"])
            in_one_turn = [0]
            async with asyncio.timeout(DEADLINE_S):
                while (before := opened.replayer.requests) < 900:
                    await asyncio.sleep(0)
                    in_one_turn.append(opened.replayer.requests - before)
            assert max(in_one_turn) == 1


async def test_the_end_marker_is_the_one_vllm_sends() -> None:
    assert REPLAY_END == [b"", b"", b"\xff" * 8, b""]
