"""Replay over real sockets: every form of request is answered, and nobody waits for a reader that does not read."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal
from kvevents_service.core.replay import Recovery
from kvevents_service.core.telling import Teller
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.renderer import Renderer
from kvevents_service.service.replayer import CLIENT_DEADLINE_S, EXACT_S, MAX_CLIENTS, STALL_S, Replayer
from kvevents_service.sockets import Receiver, bind
from kvevents_service.testing import ManualClock
from kvevents_service.wire.frames import REPLAY_END, parse_replay_reply

DEADLINE_S = 20.0


class Desk:
    """A replayer with `batches` retained from `first` on, and its clients."""

    def __init__(
        self,
        context: zmq.Context,
        first: int,
        batches: int,
        high_water_mark: int,
        *,
        exact: bool = False,
        heartbeat_s: float = 0.0,
    ) -> None:
        self.context = context
        self.clock = ManualClock()
        self.journal = Journal(first_seq=first)
        for _ in range(batches):
            self.journal.retain(self.journal.append((), 0.0), b"x" * 2000)
            self.journal.take_pending()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, high_water_mark)
        router.setsockopt(zmq.SNDBUF, 8192)
        self.endpoint = bind(router, "tcp://127.0.0.1:0", "replay")
        output = Output(context.socket(zmq.PUB), topic="kv", exact=exact)
        publisher = Publisher(
            self.journal, [output], numbers=None, wall_clock=time.time, heartbeat_s=heartbeat_s
        )  # fmt: skip
        recovery = Recovery(self.journal, [Encoding()], clock=time.monotonic, wall_clock=time.time)
        self.teller = Teller(recovery, clock=self.clock, wall_clock=time.time)
        self.renderer = Renderer(recovery, self.teller, publisher)
        self.replayer = Replayer(router, output, self.renderer, clock=self.clock)
        self.parts = (publisher, self.renderer, self.replayer)

    @property
    def due(self) -> list[int]:
        """Encodings to be told live, because a request came to nothing."""
        return self.teller.due

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
async def desk(
    first: int = 0, batches: int = 5, high_water_mark: int = 1000, *, renders: bool = True, **options: Any
) -> AsyncIterator[Desk]:
    context = zmq.Context()
    try:
        opened = Desk(context, first, batches, high_water_mark, **options)
        running = [part for part in opened.parts if renders or part is not opened.renderer]
        tasks = [asyncio.create_task(part.run()) for part in running]
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


async def until(so: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not so():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("half", [True, False])
async def test_a_client_is_given_up_but_not_told_that_half_a_state_is_all(half: bool) -> None:
    async with desk(first=100, renders=False) as opened:
        recovery = opened.renderer.recovery
        with opened.client() as socket, Receiver(socket) as receiver:
            socket.send_multipart([b"", seq(7)])
            await until(lambda: recovery.rendering)
            if half:  # its first part, and nothing says yet that it is the last
                recovery.rendering.render_next()
                assert parse_replay_reply(await asyncio.wait_for(receiver.recv(), DEADLINE_S)).seq == 7
            opened.clock.advance(CLIENT_DEADLINE_S + 1)
            await until(lambda: opened.replayer.dropped_clients == 1)
            if not half:
                assert await answer(receiver) == []
            socket.send_multipart([b"", seq(104)])
            assert await answer(receiver) == [104]


async def test_time_that_we_take_is_not_held_against_a_client() -> None:
    async with desk(first=100, renders=False) as opened:
        recovery = opened.renderer.recovery
        with opened.client() as socket, Receiver(socket) as receiver:
            socket.send_multipart([b"", seq(7)])
            await until(lambda: recovery.rendering)
            recovery.rendering.render_next()
            assert parse_replay_reply(await asyncio.wait_for(receiver.recv(), DEADLINE_S)).seq == 7
            for _ in range(2):
                opened.clock.advance(STALL_S + 1)
                await asyncio.sleep(0.05)
            while recovery.rendering is not None:
                recovery.rendering.render_next()
            assert await answer(receiver) == list(range(8, 105))
            assert opened.replayer.dropped_clients == 0


async def test_a_client_that_takes_nothing_is_given_up_after_a_while() -> None:
    async with desk(batches=4000, high_water_mark=10) as opened:
        with opened.client(high_water_mark=1) as socket:
            socket.send_multipart([b"", seq(0)])
            await until(lambda: opened.replayer.requests == 1)
            await asyncio.sleep(0.3)  # until its queues are full
            opened.clock.advance(STALL_S + 1)
            await until(lambda: opened.replayer.dropped_clients == 1)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_reader_of_exact_replies_that_is_given_up_is_told_live(exact: bool) -> None:
    async with desk(first=100, renders=False, exact=exact) as opened:
        with opened.client() as socket:
            socket.send_multipart([b"", seq(7)])
            await until(lambda: opened.renderer.recovery.rendering)
            opened.clock.advance(CLIENT_DEADLINE_S + 1)
            await until(lambda: opened.replayer.dropped_clients == 1)
            assert opened.due == ([0] if exact else [])


async def test_a_reader_of_exact_replies_that_one_helped_is_not_told_live() -> None:
    async with desk(first=100, exact=True) as opened:
        assert await opened.ask([b"", seq(7)]) == list(range(7, 105))
        assert await opened.ask([b"", seq(102)]) == [102, 103, 104]
        assert await opened.ask([b"", seq(900)]) == []
        assert opened.due == []


async def test_a_reply_that_takes_longer_than_its_reader_waits_is_told_live() -> None:
    async with desk(first=100, renders=False, exact=True) as opened:
        recovery = opened.renderer.recovery
        with opened.client() as socket, Receiver(socket) as receiver:
            socket.send_multipart([b"", seq(7)])
            await until(lambda: recovery.rendering)
            opened.clock.advance(EXACT_S)
            while recovery.rendering is not None:
                recovery.rendering.render_next()
            assert await answer(receiver) == list(range(7, 105))
        await until(lambda: opened.due == [0])


async def test_one_request_too_many_is_told_live() -> None:
    async with desk(first=100, renders=False, exact=True) as opened:
        sockets = [opened.client() for _ in range(MAX_CLIENTS + 1)]
        for socket in sockets:
            socket.send_multipart([b"", seq(7)])
        await until(lambda: opened.replayer.dropped_clients == 1)
        assert opened.due == [0]
        for socket in sockets:
            socket.close(linger=0)


async def test_requests_do_not_put_the_heartbeat_off() -> None:
    async with desk(heartbeat_s=0.3) as opened:
        async with asyncio.timeout(DEADLINE_S):
            while opened.journal.next_seq == 5:
                await opened.ask([b"", seq(4)])
                await asyncio.sleep(0.05)


async def test_a_fault_of_ours_in_a_snapshot_costs_that_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(first=7, batches=1) as opened:
        with monkeypatch.context() as patched, opened.client() as socket, Receiver(socket):

            def broken(*_: object, **__: object) -> bytes:
                raise RecursionError("of ours")

            patched.setattr(Encoding, "press", broken)
            socket.send_multipart([b"", seq(0)])
            async with asyncio.timeout(DEADLINE_S):
                while not opened.renderer.failed:
                    await asyncio.sleep(0.005)
        assert await opened.ask([b"", seq(0)]), "the next one is rendered"
    assert "of ours" in caplog.text
    assert "Traceback" in caplog.text
