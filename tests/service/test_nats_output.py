"""A sidecar, a real nats-server on loopback, readers of examples/nats_reader.py: all end with what is resident."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from service.test_recovery import Tier

from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.app import Service
from kvevents_service.service.nats_output import NatsOutput

SERVER = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin")
pytestmark = [
    pytest.mark.skipif(SERVER is None, reason="nats-server is not installed (Debian: apt-get install nats-server)"),
    pytest.mark.skipif(importlib.util.find_spec("nats") is None, reason="nats-py is not installed (extra: nats)"),
]

DEADLINE_S = 30.0
SUBJECT, STREAM = "kv.m.pod.0", "KVEVENTS"
EXAMPLE = Path(__file__).parents[2] / "examples" / "nats_reader.py"


class Server:
    """nats-server with JetStream, whose store outlives it."""

    def __init__(self, directory: Path, config: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = directory / "nats.conf"
        store = f'jetstream {{ store_dir: "{directory / "store"}" }}'
        self._config.write_text(f"listen: 127.0.0.1:{self.port}\n{store}\n{config}\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SERVER is not None
        self._process = subprocess.Popen([SERVER, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError("nats-server does not listen")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


def example() -> Any:
    spec = importlib.util.spec_from_file_location("nats_reader", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["nats_reader"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def reading(server: Server, silent_s: float = 3.0) -> AsyncIterator[Any]:
    import nats

    async def ignore(_: Exception) -> None: ...

    client = await nats.connect(server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=ignore)
    reader = example().NatsReader(client.jetstream(), STREAM, SUBJECT, silent_s)
    task = asyncio.create_task(reader.run())
    try:
        yield reader
    finally:
        while not task.done():  # nats-py takes some cancellations for a timeout
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
        await client.close()


def settings(server: Server, **more: object) -> dict[str, Any]:
    return {"nats": (NatsConfig(servers=(server.url,), subject=SUBJECT, **more),), "heartbeat_s": 0.2}  # type: ignore[arg-type]


async def until(true: Callable[[], bool], told: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not true():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(told()) from None


async def agrees(reader: Any, tier: Tier, output: NatsOutput) -> None:
    """The reader comes to know what is resident, in a stream without a fault."""
    journal = tier.publisher.journal
    newest = journal.next_seq - 1

    def same() -> bool:
        return reader.at is not None and reader.at.upto >= newest and reader.fold.hashes("CPU", 0) == tier.names()

    await until(same, lambda: f"{reader.at} {reader.__dict__} {output} newest {newest}")
    reader.fold.check()


def output_of(service: Service) -> NatsOutput:
    return service.events.nats[0]


async def test_a_reader_follows_live_and_one_that_comes_late_starts_at_the_snapshot(server: Server, run) -> None:
    async with run(**settings(server, max_messages=40, snapshot_s=1000)) as service:
        tier, output = Tier(service, 10_000), output_of(service)
        async with reading(server) as early:
            for family in range(60):
                tier.store(family, 10)
                await asyncio.sleep(0.005)
            await agrees(early, tier, output)
            assert (early.gaps, early.restarts, early.snapshots) == (0, 0, 1)
            assert early.batches > 40
            async with reading(server) as late:
                await agrees(late, tier, output)
                assert late.at.upto >= 59
                assert late.batches < 60, "the stream has forgotten the first ones"
        assert output.refused == 0
        assert output.snapshots >= 3, "one before each half of the stream is forgotten"


async def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_anew(server: Server, run) -> None:
    async with run(**settings(server, max_messages=20, snapshot_s=1000)) as service:
        tier, output = Tier(service, 10_000), output_of(service)
        for family in range(20):
            tier.store(family, 10)
        await until(lambda: output.snapshots >= 2, lambda: output)
        async with reading(server) as reader:
            replaced = replaced_once(reader)
            began = time.monotonic()
            await agrees(reader, tier, output)
            assert replaced, "while it was read"
            assert time.monotonic() - began < DEADLINE_S / 3, "the deadline of a read is not waited for"


def replaced_once(reader: Any) -> list[str]:
    """The snapshot is put again between its info and its first part. Returns what has been replaced."""
    js, subscribe, replaced = reader._js, reader._js.subscribe, []

    async def replacing(*args: Any, **kwargs: Any) -> Any:
        js.subscribe = subscribe
        from nats.js.api import ObjectMeta

        store = await js.object_store(f"{STREAM}_snapshots")
        found = await store.get(SUBJECT)
        await store.put(SUBJECT, found.data, ObjectMeta(headers=found.info.headers))
        replaced.append(found.info.nuid)
        return await subscribe(*args, **kwargs)

    js.subscribe = replacing
    return replaced


async def test_messages_are_as_documented_and_once_even_if_sent_twice(server: Server, run) -> None:
    import nats

    async with run(**settings(server)) as service:
        tier, output = Tier(service, 1000), output_of(service)
        tier.store(1)
        await until(lambda: output.sent > 0, lambda: output)
        client = await nats.connect(server.url)
        js = client.jetstream()
        first = await js.get_msg(STREAM, 1)
        assert first.headers is not None
        publisher = first.headers["Kv-Publisher"]
        assert (first.subject, first.headers["Kv-Seq"], first.headers["Kv-Dialect"]) == (SUBJECT, "0", "vllm")
        assert first.headers["Nats-Msg-Id"] == f"{publisher}-0"
        assert first.data == service.publisher.journal.payload(0)
        again = await js.publish(SUBJECT, b"again", headers=dict(first.headers))
        assert (again.duplicate, again.seq) == (True, 1)
        await client.close()


async def test_a_new_life_whose_numbers_begin_again_is_not_taken_for_the_old_one(server: Server, run) -> None:
    async with reading(server) as reader:
        async with run(**settings(server)) as service:
            tier = Tier(service, 1000)
            for family in range(5):
                tier.store(family)
            await agrees(reader, tier, output_of(service))
        async with run(**settings(server)) as service:
            tier = Tier(service, 1000)
            tier.store(77)
            await agrees(reader, tier, output_of(service))
            assert output_of(service).refused == 0
    assert reader.fold.hashes("CPU", 0) == tier.names()


async def test_a_server_that_is_killed_and_comes_again_costs_no_reader_the_truth(server: Server, run) -> None:
    async with run(**settings(server)) as service, reading(server) as reader:
        tier, output = Tier(service, 100_000), output_of(service)
        for family in range(300):
            tier.store(family, 5)
            if family == 100:
                server.kill()
            if family == 150:
                server.start()
            await asyncio.sleep(0.004)
        await agrees(reader, tier, output)
        assert output.disconnects > 0
        assert output.refused == 0, "the queue was long enough"


async def test_too_long_without_a_server_is_a_hole_and_a_snapshot_and_nobody_waits(server: Server, run) -> None:
    async with run(**settings(server, queue_messages=10)) as service, reading(server) as reader:
        tier, output = Tier(service, 100_000), output_of(service)
        tier.store(0)
        await agrees(reader, tier, output)
        server.signal(signal.SIGSTOP)
        began, lag = time.monotonic(), 0.0
        for family in range(1, 200):
            before = time.monotonic()
            tier.store(family, 5)
            await asyncio.sleep(0.002)
            lag = max(lag, time.monotonic() - before)
        assert output.refused >= 100
        assert len(output.queue) <= 10
        assert service.events.outputs[0].sent >= 200, "the other output went on"
        assert time.monotonic() - began < 10
        server.signal(signal.SIGCONT)
        await agrees(reader, tier, output)
        assert reader.snapshots >= 2


async def test_without_a_server_the_sidecar_serves_and_one_that_comes_later_has_it_all(tmp_path: Path, run) -> None:
    server = Server(tmp_path)
    async with run(**settings(server, queue_messages=5)) as service:
        tier, output = Tier(service, 1000), output_of(service)
        for family in range(20):
            tier.store(family, 3)
            await asyncio.sleep(0.002)
        await until(lambda: output.disconnects > 0, lambda: output)
        server.start()
        try:
            async with reading(server) as reader:
                await agrees(reader, tier, output)
        finally:
            server.kill()


async def test_a_broker_with_a_password(tmp_path: Path, run) -> None:
    server = Server(tmp_path, 'authorization { token: "s3cr3t" }')
    server.start()
    password = tmp_path / "password"
    password.write_text("s3cr3t\n")
    password.chmod(0o600)
    try:
        async with run(**settings(server)) as service:
            await until(lambda: output_of(service).disconnects > 0, lambda: output_of(service))
            assert not output_of(service).connected
        async with run(**settings(server, password_file=str(password))) as service:
            Tier(service, 100).store(1, 3)
            await until(lambda: output_of(service).sent > 0, lambda: output_of(service))
    finally:
        server.kill()


async def test_what_is_said_last_is_seen_off_before_the_sidecar_ends(server: Server, run) -> None:
    async with reading(server, silent_s=60.0) as reader:
        async with run(**settings(server)) as service:
            tier, output = Tier(service, 10_000), output_of(service)
            tier.store(0)
            await agrees(reader, tier, output)
            server.signal(signal.SIGSTOP)  # it has to be waited for
            asyncio.get_running_loop().call_later(1.0, server.signal, signal.SIGCONT)
            for family in range(1, 200):
                tier.store(family, 5)
        newest = tier.publisher.journal.next_seq - 1
        await until(lambda: reader.at.upto == newest, lambda: (reader.at, newest, output))
        assert reader.fold.hashes("CPU", 0) == tier.names()
