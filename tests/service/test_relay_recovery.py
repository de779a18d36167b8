"""Engines that cannot be asked, or whose answers are no answers: what is live comes through all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from core.engine_model import stored
from test_relay import AB, ABC, AC, A, engine, relayed

from kvevents_service.sockets import Receiver, bind
from kvevents_service.source_config import SourceConfig
from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.events import EventBatch
from kvevents_service.wire.frames import REPLAY_END, replay_reply

ENDLESS_S = 0.01
EMPTY = encode_batch(EventBatch(1.0, [], 0))
Frames = list[bytes]


@asynccontextmanager
async def odd_replay(answer: list[Frames], *, again: bool) -> AsyncIterator[str]:
    """An endpoint that gives this to whoever asks. again: and goes on doing so, without an end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    endpoint = bind(socket, "tcp://127.0.0.1:0", "replay")
    task = asyncio.create_task(_answer(socket, answer, again=again))
    try:
        yield endpoint
    finally:
        task.cancel()
        await asyncio.wait([task])
        context.destroy(linger=0)


async def _answer(socket: zmq.Socket[bytes], answer: list[Frames], *, again: bool) -> None:
    asking: set[bytes] = set()
    with Receiver(socket) as receiver:
        while True:
            while (request := receiver.recv_nowait()) is not None:
                asking.add(request[0])
                _send(socket, {request[0]}, answer)
            await asyncio.sleep(ENDLESS_S)
            if again:
                _send(socket, asking, answer)


def _send(socket: zmq.Socket[bytes], asking: set[bytes], answer: list[Frames]) -> None:
    for identity in asking:
        for frames in answer:
            socket.send_multipart([identity, *frames])


ODD = {
    "nothing at all": ([], False),
    "no frames of a reply": ([[b"", b"?"], [b"", b"kv", b"short", b"x"], [b"", b"", b"", b"", b"", b""]], False),
    "that, and for ever": ([[b"", b"?"]], True),
    "the end alone, for ever": ([REPLAY_END], True),
    "one batch for ever": ([replay_reply(b"kv", 0, EMPTY)], True),
    "another topic's for ever": ([replay_reply(b"other", 0, EMPTY)], True),
}


@pytest.mark.parametrize("name", ODD)
async def test_a_replay_that_is_none_ends_and_what_is_live_is_told(name: str) -> None:
    answer, again = ODD[name]
    async with (
        odd_replay(answer, again=again) as replay,
        engine() as peer,
        relayed(SourceConfig(peer.endpoint, replay, topic="kv")) as relay,
    ):
        await peer.subscribed()
        peer.model.next_seq = 1
        peer.send(1, stored(AB, 2))
        await relay.shows(A, AB)
        peer.send(1, stored(ABC))
        await relay.shows(A, AB, ABC)


async def test_a_batch_of_a_replay_that_cannot_be_read_is_a_loss_and_no_more() -> None:
    async with (
        odd_replay([replay_reply(b"kv", 0, b"\xc1"), REPLAY_END], again=False) as replay,
        engine() as peer,
        relayed(SourceConfig(peer.endpoint, replay)) as relay,
    ):
        await relay.until(lambda: relay.view.counts["undecodable"] == 1)
        await peer.subscribed()
        peer.model.next_seq = 1
        peer.send(1, stored(AB, 2))
        await relay.shows(A, AB)
        assert relay.view.counts["replays"] == 1, "to ask again would bring the same"


async def test_an_engine_that_cannot_be_asked() -> None:
    """Joined in the middle, with a batch lost and a restart: never more than it holds."""
    async with engine() as peer:
        peer.model.next_seq = 7
        async with relayed(SourceConfig(peer.endpoint)) as relay:
            await peer.subscribed()
            peer.send(1, stored(ABC))
            await relay.until(lambda: relay.view.counts["orphans"] == 1)
            peer.send(1, stored(AB, 2))
            await relay.shows(A, AB, ABC)
            peer.model.publish(stored(AC))
            peer.send(1, stored((1,)))
            await relay.shows((1,))
            assert relay.view.counts["lost"] == 1
            peer.model.next_seq = 0
            peer.send(1, stored(A))
            await relay.shows(A)
            assert relay.view.counts["lost"] == 1


async def test_a_history_that_is_shorter_than_the_gap() -> None:
    """What it still tells is taken, behind parents that are known."""
    async with engine(retained=3) as peer, relayed(SourceConfig(peer.endpoint, peer.replay)) as relay:
        await peer.subscribed()
        peer.send(1, stored((1,)))
        await relay.shows((1,))
        peer.lose(5)
        peer.model.publish(stored(A))
        peer.model.publish(stored(AB))
        peer.send(1, stored(ABC))
        await relay.shows(A, AB, ABC)
        assert relay.view.counts["lost"] >= 1
