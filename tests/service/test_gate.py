"""CURVE at the event endpoints: who is on the list reads everything, others nothing, and both sides say so."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.core.residency import key64
from kvevents_service.curve import ClientKeys
from kvevents_service.errors import ConfigError
from kvevents_service.service.app import Service, started
from kvevents_service.sockets import Receiver
from kvevents_service.subscriber import Batch, Item, Refused, Source, Subscriber
from kvevents_service.testing import make_chain
from kvevents_service.wire.frames import SNAPSHOT_REQUEST, replay_request

DEADLINE_S = 20.0
CHAIN = make_chain(range(32), 4)


class Pair(NamedTuple):
    public: bytes
    secret: bytes


@pytest.fixture
def pairs() -> Iterator[Pair]:
    """Key pairs, new ones each."""
    return iter(lambda: Pair(*zmq.curve_keypair()), None)


class Keys:
    """The files of a sidecar, and a router that is on its list."""

    def __init__(self, directory: Path, server: Pair, router: Pair) -> None:
        self.server, self.router = server, router
        self.secret_file, self.allowed_file = directory / "sidecar.key", directory / "routers.keys"
        self.secret_file.write_bytes(server.secret)
        self.secret_file.chmod(0o600)
        self.allow(router)

    def allow(self, *routers: Pair) -> None:
        """Replace the list, as an operator does: a new file, moved into its place."""
        new = self.allowed_file.with_suffix(".new")
        new.write_bytes(b"# routers\n" + b"".join(one.public + b" router\n" for one in routers))
        new.chmod(0o644)
        os.replace(new, self.allowed_file)

    @property
    def settings(self) -> dict[str, str]:
        return {"curve_secret_file": str(self.secret_file), "curve_allowed_keys_file": str(self.allowed_file)}

    def of(self, router: Pair) -> ClientKeys:
        return ClientKeys(router.secret, self.server.public)


@pytest.fixture
def keys(tmp_path: Path, pairs: Iterator[Pair]) -> Keys:
    return Keys(tmp_path, next(pairs), next(pairs))


@asynccontextmanager
async def reading(service: Service, keys: ClientKeys | None) -> AsyncIterator[Subscriber]:
    source = Source(service.ready.pub, service.ready.replay, label="sidecar", keys=keys)
    async with asyncio.timeout(DEADLINE_S), Subscriber(source, track=True) as subscriber:
        yield subscriber


async def first(subscriber: Subscriber, kind: type[Item]) -> Item:
    async for item in subscriber:
        if isinstance(item, kind):
            return item
    raise AssertionError


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def held(subscriber: Subscriber) -> set[int]:
    return {name for fold in subscriber.state().values() for name in fold.hashes("CPU", 0)}


async def test_who_is_on_the_list_reads_history_and_what_comes(run, engine, keys: Keys) -> None:
    async with run(**keys.settings) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN.part(0, 4), [0, 1, 2, 3])
        async with reading(service, keys.of(keys.router)) as subscriber:
            await first(subscriber, Batch)
            await asyncio.to_thread(mini.store, CHAIN.part(4), [4, 5, 6, 7])
            async for _ in subscriber:
                if len(held(subscriber)) == 8:
                    break
            assert held(subscriber) == {key64(name) for name in CHAIN.hashes}
        assert service.events.gate.keys_allowed >= 2  # the subscription and the replay
        assert service.events.gate.keys_refused == service.events.gate.failures.total() == 0


async def test_a_key_that_is_not_on_the_list_is_told_so_and_counted(
    run, keys: Keys, pairs: Iterator[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    stranger = next(pairs)
    async with run(**keys.settings) as service:
        async with reading(service, keys.of(stranger)) as subscriber:
            told = await first(subscriber, Refused)
        stats = service.publisher.stats()
    assert told.label == "sidecar"
    assert stranger.public.decode() in told.reason
    assert "curve_allowed_keys_file" in told.reason
    assert stats["curve_keys_refused"] >= 1
    (line, *_) = [record for record in caplog.records if "was refused" in record.message]
    assert line.levelno == logging.WARNING
    assert stranger.public.decode() in line.message
    assert "127.0.0.1" in line.message
    assert keys.allowed_file.name in line.message


async def test_another_server_key_is_told_on_both_sides(
    run, keys: Keys, pairs: Iterator[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ClientKeys(keys.router.secret, next(pairs).public)
    async with run(**keys.settings) as service:
        async with reading(service, wrong) as subscriber:
            told = await first(subscriber, Refused)
        await until(lambda: service.publisher.stats()["curve_handshakes_failed"] >= 1)
    assert "is the server key that of its curve_secret_file" in told.reason
    assert "another key than ours" in caplog.text


async def test_a_reader_without_keys_is_told_on_both_sides(
    run, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    async with run(**keys.settings) as service:
        async with reading(service, None) as subscriber:
            told = await first(subscriber, Refused)
        await until(lambda: service.publisher.stats()["curve_handshakes_failed"] >= 1)
    assert "it wants CURVE keys" in told.reason
    assert "speak CURVE" in caplog.text


async def test_a_reader_with_keys_takes_nothing_from_a_publisher_without(run, keys: Keys) -> None:
    async with run() as service, reading(service, keys.of(keys.router)) as subscriber:
        told = await first(subscriber, Refused)
        assert "speak CURVE" in told.reason
        assert subscriber.stats()["batches"] == 0


async def test_a_key_that_is_added_later_is_let_in_without_a_restart(
    run, keys: Keys, pairs: Iterator[Pair]
) -> None:
    late = next(pairs)
    async with run(**keys.settings, heartbeat_s=0.05) as service, reading(service, keys.of(late)) as subscriber:
        await first(subscriber, Refused)
        keys.allow(keys.router, late)
        await first(subscriber, Batch)
        assert subscriber.connected


async def test_a_key_that_is_taken_off_the_list_does_not_come_in_again(
    run, keys: Keys, pairs: Iterator[Pair]
) -> None:
    async with run(**keys.settings, heartbeat_s=0.05) as service:
        async with reading(service, keys.of(keys.router)) as subscriber:
            await first(subscriber, Batch)
        keys.allow(next(pairs))
        async with reading(service, keys.of(keys.router)) as subscriber:
            await first(subscriber, Refused)


async def test_a_list_that_went_bad_leaves_the_keys_of_before(
    run, keys: Keys, pairs: Iterator[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    async with run(**keys.settings, heartbeat_s=0.05) as service:
        keys.allowed_file.write_text("no key\n")
        for _ in range(2):
            async with reading(service, keys.of(keys.router)) as subscriber:
                await first(subscriber, Batch)
        told = [record.getMessage() for record in caplog.records if "those of before" in record.getMessage()]
        assert sorted(one.split()[0] for one in told) == ["pub", "replay"]  # once for each, though all are let in
        async with reading(service, keys.of(next(pairs))) as subscriber:
            await first(subscriber, Refused)


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
async def test_no_endpoint_answers_a_reader_without_a_key(run, keys: Keys, kind: str) -> None:
    request = {"replay": replay_request(0), "snapshot": [b"", SNAPSHOT_REQUEST]}[kind]
    async with run(**keys.settings, snapshot="tcp://127.0.0.1:0") as service:
        context = zmq.Context()
        try:
            asked = context.socket(zmq.DEALER)
            asked.connect(getattr(service.ready.outputs[0], kind))
            asked.send_multipart(request)
            with Receiver(asked) as receiver:
                await until(lambda: service.events.gate.failures.total() >= 1)
                assert receiver.recv_nowait() is None
        finally:
            context.destroy(linger=0)
        stats = service.publisher.stats()
        assert stats["replay_requests"] == stats["snapshot_requests"] == 0


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
async def test_every_endpoint_answers_who_is_on_the_list(run, keys: Keys, kind: str) -> None:
    request = {"replay": replay_request(0), "snapshot": [b"", SNAPSHOT_REQUEST]}[kind]
    async with run(**keys.settings, snapshot="tcp://127.0.0.1:0") as service:
        context = zmq.Context()
        try:
            asked = context.socket(zmq.DEALER)
            keys.of(keys.router).guard(asked)
            asked.connect(getattr(service.ready.outputs[0], kind))
            asked.send_multipart(request)
            with Receiver(asked) as receiver:
                async with asyncio.timeout(DEADLINE_S):
                    assert await receiver.recv()
        finally:
            context.destroy(linger=0)


async def test_one_output_may_be_open_beside_one_that_is_not(run, tmp_path: Path, keys: Keys) -> None:
    outputs = (
        OutputConfig("tcp://127.0.0.1:0", **keys.settings),
        OutputConfig("tcp://127.0.0.1:0"),
    )
    config = ServeConfig(str(tmp_path / "run" / "engine.sock"), host_bytes=4096, outputs=outputs, heartbeat_s=0.05)
    async with started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        guarded, plain = service.ready.outputs
        sources = [
            Source(guarded.pub, keys=keys.of(keys.router), label="guarded"),
            Source(plain.pub, label="plain"),
        ]
        async with asyncio.timeout(DEADLINE_S), Subscriber(sources) as subscriber:
            heard: set[str] = set()
            while heard != {"guarded", "plain"}:
                item = await anext(subscriber)
                assert isinstance(item, Batch)
                heard.add(item.source.label)
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(
    ("spoil", "setting", "expected"),
    [
        (lambda keys: keys.secret_file.chmod(0o604), "curve_secret_file", "others cannot read"),
        (lambda keys: keys.secret_file.chmod(0o620), "curve_secret_file", "only this user can write"),
        (lambda keys: keys.secret_file.write_text("short"), "curve_secret_file", "keys of 40 letters"),
        (lambda keys: keys.secret_file.unlink(), "curve_secret_file", "can be read"),
        (lambda keys: keys.allowed_file.write_text("x" * 39 + "\n"), "curve_allowed_keys_file", "40 letters"),
        (lambda keys: keys.allowed_file.chmod(0o666), "curve_allowed_keys_file", "only this user can write"),
    ],
)
async def test_files_that_cannot_be_used_stop_the_start(
    run, keys: Keys, spoil: Callable[[Keys], object], setting: str, expected: str
) -> None:
    secret = keys.secret_file.read_text()
    spoil(keys)
    with pytest.raises(ConfigError, match=expected) as error:
        async with run(**keys.settings):
            pass
    assert error.value.setting == setting
    assert secret not in str(error.value)
