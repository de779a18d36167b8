"""NATS: removes and clears, restarts of the sidecar, brokers without room. On a real nats-server; nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from service.test_nats_output import (
    STREAM,
    SUBJECT,
    Server,
    agrees,
    output_of,
    pytestmark,
    reading,
    server,
    settings,
    until,
)
from service.test_recovery import Tier

from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.app import Service
from kvevents_service.service.nats_broker import Credentials
from kvevents_service.service.nats_output import NatsOutput
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

__all__ = ["pytestmark", "server"]

TURN_S = 0.25
"""No store may take longer, whatever the broker does: a turn of a busy loop on a slow machine."""
SMALL_BYTES = 60_000


@asynccontextmanager
async def administering(server: Server) -> AsyncIterator[Any]:
    """JetStream, as an operator uses it."""
    import nats

    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


async def messages_of(js: Any) -> list[Any]:
    """Everything in the stream."""
    last = (await js.stream_info(STREAM)).state.last_seq
    return [await js.get_msg(STREAM, place) for place in range(1, last + 1)]


def batch_of(message: Any) -> EventBatch:
    return decode_batch(message.data).batch


async def stored_under_way(service: Service, tier: Tier, families: range) -> None:
    """Stores, each at once, and the ZeroMQ output has them all."""
    for family in families:
        before = time.monotonic()
        tier.store(family, 5)
        await asyncio.sleep(0.002)
        assert time.monotonic() - before < TURN_S
    zeromq = service.events.outputs[0]
    await until(lambda: zeromq.sent >= len(families), lambda: (zeromq, service.publisher))


async def test_removes_of_a_full_tier_and_of_a_reset_reach_a_reader(server: Server, run, engine) -> None:
    async with run(**settings(server)) as service, reading(server) as reader:
        mini = await asyncio.to_thread(engine)

        def resident() -> set[int]:
            names = service.sidecar.tier.scheduler.pool.ready_hashes(0)
            return {int.from_bytes(name[-8:], "big") for name in names}

        def same() -> bool:
            newest = service.publisher.journal.next_seq - 1
            return reader.at is not None and reader.at.upto >= newest and reader.fold.hashes("CPU", 0) == resident()

        for family in range(6):  # 48 blocks, and the tier has room for 32
            await asyncio.to_thread(
                mini.store, make_chain(range(1000 * family, 1000 * family + 32), 4), [*range(8)]
            )
        await until(same, lambda: (reader.at, output_of(service)))
        assert 0 < len(resident()) <= 32
        await asyncio.to_thread(mini.client.reset, 5.0)
        await until(lambda: same() and not resident(), lambda: (reader.at, output_of(service)))
        reader.fold.check()
        assert reader.gaps == 0
        async with administering(server) as js:
            events = [event for message in await messages_of(js) for event in batch_of(message).events]
    assert {type(event) for event in events} == {BlockStored, BlockRemoved}
    removed = [one for event in events if isinstance(event, BlockRemoved) for one in event.block_hashes]
    assert len(removed) == 48


async def test_after_a_restart_no_message_is_taken_for_one_of_the_life_before(
    server: Server, run, tmp_path: Path
) -> None:
    """With state_dir the numbers go on, behind a clear; without it they begin again: all of both lives is there."""
    state = str(tmp_path / "state")
    lives: list[int] = []
    async with administering(server) as js:
        for more in ({"state_dir": state}, {"state_dir": state}, {}, {}):
            async with run(**settings(server), **more) as service:
                tier, output = Tier(service, 1000), output_of(service)
                for family in range(3):
                    tier.store(family, 4)
                newest = service.publisher.journal
                await until(lambda o=output, n=newest: not o.queue and o.sent >= 3, lambda o=output: o)
            lives.append(output.sent)
            assert output.refused == 0
        messages = await messages_of(js)
    assert len(messages) == sum(lives)
    assert len({message.headers["Nats-Msg-Id"] for message in messages}) == len(messages)
    by_life: dict[str, list[Any]] = {}
    for message in messages:
        by_life.setdefault(message.headers["Kv-Publisher"], []).append(message)
    numbers = [[int(message.headers["Kv-Seq"]) for message in life] for life in by_life.values()]
    assert [len(life) for life in numbers] == lives
    assert all(life == [*range(life[0], life[0] + len(life))] for life in numbers)
    assert (numbers[0][0], numbers[1][0] > numbers[0][-1], numbers[2][0], numbers[3][0]) == (0, True, 0, 0)
    second = [*by_life.values()][1]
    assert isinstance(batch_of(second[0]).events[0], AllBlocksCleared)


async def test_a_stream_that_takes_no_more_costs_a_hole_and_a_snapshot(server: Server, run) -> None:
    """An operator's stream that refuses new messages when it is full, as JetStream can be told to."""
    from nats.js.api import DiscardPolicy, StreamConfig

    async with administering(server) as js:
        full = StreamConfig(STREAM, subjects=["kv.>"], max_bytes=SMALL_BYTES, discard=DiscardPolicy.NEW)
        await js.add_stream(full)
        async with run(**settings(server, queue_messages=50)) as service, reading(server) as reader:
            tier, output = Tier(service, 100_000), output_of(service)
            await stored_under_way(service, tier, range(200))
            await until(lambda: output.refused > 0 and output.disconnects > 0, lambda: output)
            assert len(output.queue) <= 50
            await js.purge_stream(STREAM)
            tier.store(1000, 5)
            await agrees(reader, tier, output)
            assert reader.snapshots >= 1


async def test_a_broker_without_room_for_the_stream_is_asked_again_until_it_has_some(tmp_path: Path, run) -> None:
    store = f'jetstream {{ store_dir: "{tmp_path / "store"}", max_file_store: 1MB }}'
    server = Server(tmp_path)
    whole = server._config.read_text()
    server._config.write_text(f"listen: 127.0.0.1:{server.port}\n{store}\n")
    server.start()
    try:
        async with run(**settings(server, queue_messages=20)) as service:
            tier, output = Tier(service, 100_000), output_of(service)
            await stored_under_way(service, tier, range(100))
            await until(lambda: output.disconnects > 1, lambda: output)
            assert (output.sent, output.connected) == (0, False)
            server.kill()
            server._config.write_text(whole)
            server.start()
            async with reading(server) as reader:
                await agrees(reader, tier, output)
    finally:
        server.kill()


async def test_a_broker_that_flaps_under_load_loses_nothing_that_the_queue_can_hold(server: Server, run) -> None:
    async with run(**settings(server, queue_messages=5000)) as service, reading(server) as reader:
        tier, output = Tier(service, 100_000), output_of(service)
        for round_ in range(3):
            await until(lambda: output.connected, lambda: output)
            await stored_under_way(service, tier, range(100 * round_, 100 * round_ + 50))
            await asyncio.to_thread(server.kill)
            await stored_under_way(service, tier, range(100 * round_ + 50, 100 * round_ + 100))
            await asyncio.to_thread(server.start)
        await agrees(reader, tier, output)
        assert (output.refused, output.connections >= 4) == (0, True), output
        async with administering(server) as js:
            messages = await messages_of(js)
    numbers = [int(message.headers["Kv-Seq"]) for message in messages]
    assert numbers == [*range(len(numbers))], "each once, in order, whatever was sent again"


@pytest.mark.parametrize("moment", ["start", "end"])
async def test_a_broker_that_hangs_holds_up_neither_start_nor_end(server: Server, run, moment: str) -> None:
    import signal

    if moment == "start":
        server.signal(signal.SIGSTOP)
    began = time.monotonic()
    async with run(**settings(server)) as service:
        tier = Tier(service, 1000)
        if moment == "end":
            await until(lambda: output_of(service).connected, lambda: output_of(service))
            server.signal(signal.SIGSTOP)
        await stored_under_way(service, tier, range(20))
    server.signal(signal.SIGCONT)
    assert time.monotonic() - began < 15.0, "3 s to see off what waits, and what closing takes"


class Swallowing:
    """A broker whose client takes the first cancellation for a timeout, as nats-py does."""

    is_up, largest = True, 1 << 20

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.swallowed = self.closed = 0

    async def last_place(self) -> int:
        self.asked.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.swallowed += 1
            if self.swallowed > 1:
                raise
        return 0

    async def put_snapshot(self, *_: object) -> None: ...

    async def close(self) -> None:
        self.closed += 1


class Empty:
    is_empty = True


async def test_a_client_that_swallows_a_cancellation_does_not_outlive_its_output() -> None:
    config = NatsConfig(servers=("nats://127.0.0.1:1",), subject=SUBJECT)
    output = NatsOutput(config, Credentials({}), publisher_id="x", encoding=0, first=0, clock=lambda: 0.0)
    broker = Swallowing()
    serving = asyncio.create_task(output._serve(broker, Empty()))  # type: ignore[arg-type]
    await broker.asked.wait()
    serving.cancel()
    done, _ = await asyncio.wait([serving], timeout=5.0)
    assert (len(done), broker.closed, output.connected) == (1, 1, False)
    assert serving.cancelled()
