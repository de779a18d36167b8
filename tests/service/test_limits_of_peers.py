"""One host that asks too much is refused, is counted, and takes nothing from the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.app import started
from kvevents_service.settings import load_config
from kvevents_service.sockets import Receiver, bind, peer_of
from kvevents_service.testing import make_chain
from kvevents_service.wire.frames import (
    SNAPSHOT_REQUEST,
    SNAPSHOT_UNAVAILABLE,
    parse_replay_reply,
    parse_snapshot_reply,
    replay_request,
)

DEADLINE_S = 20.0
CHAIN = make_chain(range(32), 4)


@asynccontextmanager
async def dealer(endpoint: str) -> AsyncIterator[tuple[zmq.Socket, Receiver]]:
    context = zmq.Context()
    try:
        asked = context.socket(zmq.DEALER)
        asked.connect(endpoint)
        with Receiver(asked) as receiver:
            async with asyncio.timeout(DEADLINE_S):
                yield asked, receiver
    finally:
        context.destroy(linger=0)


async def replayed(endpoint: str, start: int = 0) -> int:
    """How many batches a replay brings, asked over a connection of its own."""
    async with dealer(endpoint) as (asked, receiver):
        asked.send_multipart(replay_request(start))
        count = 0
        while parse_replay_reply(await receiver.recv()) is not None:
            count += 1
        return count


async def test_a_host_that_asks_too_often_gets_end_markers_until_it_has_waited(run, engine) -> None:
    async with run(requests_per_s=0.25, heartbeat_s=0.0) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        replay = service.ready.replay
        answers = [await replayed(replay) for _ in range(6)]  # 16 s' worth are four
        assert answers[:4] == [answers[0]] * 4
        assert answers[0] > 0
        assert answers[4:] == [0, 0]  # a new connection is the same host
        assert service.publisher.stats()["requests_over_allowance"] == 2


async def test_bytes_that_were_sent_are_charged(run, engine) -> None:
    async with run(answer_bytes_per_s=1.0, heartbeat_s=0.0) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        assert await replayed(service.ready.replay) > 0
        assert await replayed(service.ready.replay) == 0


async def test_another_host_is_served_while_one_is_refused(run, engine, tmp_path: Path) -> None:
    """A host over ipc is another one than 127.0.0.1; both endpoints share one set of books."""
    outputs = (
        OutputConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        OutputConfig("tcp://127.0.0.1:0", f"ipc://{tmp_path}/replay"),
    )
    config = ServeConfig(
        str(tmp_path / "run" / "engine.sock"),
        host_bytes=4096,
        outputs=outputs,
        requests_per_s=1 / 16,
        heartbeat_s=0.0,
    )
    async with started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        over_tcp, over_ipc = service.ready.outputs
        assert await replayed(over_tcp.replay) > 0
        assert await replayed(over_tcp.replay) == 0
        assert await replayed(over_ipc.replay) > 0
        assert await replayed(over_ipc.replay) == 0
        for task in tasks:
            task.cancel()


async def test_snapshots_are_out_of_the_same_allowance(run, engine) -> None:
    async with run(requests_per_s=1 / 16, snapshot="tcp://127.0.0.1:0", heartbeat_s=0.0) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        assert await replayed(service.ready.replay) > 0
        async with dealer(service.ready.outputs[0].snapshot) as (asked, receiver):
            asked.send_multipart([b"", SNAPSHOT_REQUEST])
            reply = parse_snapshot_reply((await receiver.recv())[1:])
            assert reply.seq == SNAPSHOT_UNAVAILABLE


@pytest.mark.parametrize("setting", ["requests_per_s", "answer_bytes_per_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_rate_is_a_number(setting: str, value: float) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {setting: value})
    assert error.value.setting == setting


@pytest.mark.parametrize(("endpoint", "name"), [("tcp://127.0.0.1:0", "127.0.0.1"), ("ipc", "localhost:")])
async def test_a_peer_is_named_without_its_port_or_process(tmp_path: Path, endpoint: str, name: str) -> None:
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        bound = bind(router, f"ipc://{tmp_path}/r" if endpoint == "ipc" else endpoint, "replay")
        seen = set()
        for _ in range(2):
            async with dealer(bound) as (asking, _):
                asking.send(b"hello")
                with Receiver(router) as receiver:
                    peer, frames = await receiver.recv_from()
            assert frames[1:] == [b"hello"]
            seen.add(peer)
        (peer,) = seen
        assert peer.startswith(name)
        assert peer.count(":") == (2 if endpoint == "ipc" else 0)
    finally:
        context.destroy(linger=0)


def test_a_message_that_came_from_nowhere_has_no_peer() -> None:
    assert peer_of(zmq.Frame(b"x")) == ""
