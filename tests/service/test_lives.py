"""A sidecar process that is killed and comes again under one `Subscriber`: what that knows is what is resident."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from core.models import UNIT
from core.prompts import Path as Prompt
from core.prompts import block, named_offers, unit_hash

from kvevents_service.core.residency import Residency, key64
from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.items import Batch
from kvevents_service.service.numbering import FILE_NAME
from kvevents_service.subscriber import Item, Restart, Source, Subscriber, Timing
from kvevents_service.wire.control import GroupSpec, Memory

LONG_S = 40.0
BLOCKS, BLOCK_BYTES = 64, 64
WIDE = GroupSpec(0, "full_attention", 2 * UNIT, main=True)
BEATS_BEFORE = 10
"""Without a state directory the new life's first number must be below the last one heard."""
LATE = 1_000_000
MEDIUM = "CPU"


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Machine:
    """Where the sidecar runs, again and again, and the one engine beside it."""

    def __init__(self, directory: Path) -> None:
        self.pub, self.replay = free_endpoint(), free_endpoint()
        self.memory = SharedMemory.create(BLOCKS * BLOCK_BYTES)
        self._config = directory / "serve.toml"
        self._socket = str(directory / "engine.sock")
        self._ids = count()
        self.process: subprocess.Popen[str] | None = None
        layers, memories = uniform_layers(1, BLOCKS, BLOCK_BYTES), [Memory(BLOCKS * BLOCK_BYTES)]
        layout = EngineLayout("e", "n", [WIDE], memories, layers, [self.memory.fd], hash_tokens=UNIT)
        self.client = OffloadClient(self._socket, layout, Timeouts(redial_s=0.02))

    def serve(self, *options: str, retained: int = 10_000) -> None:
        self._config.write_text(f"heartbeat_s = 0.1\nretained_batches = {retained}\n")
        where = ["--engine-socket", self._socket, "--pub", self.pub, "--replay", self.replay]
        settings = ["--config", str(self._config), "--log-level", "warning", *options]
        command = [sys.executable, "-m", "kvevents_service", "serve", *where, *settings]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert '"ready":true' in self.process.stdout.readline().replace(" ", "")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LONG_S)

    def store(self, path: Prompt, ends: set[int]) -> set[int]:
        """A prompt's blocks, with names for what ends inside them; returns every name."""
        offers = named_offers(path, WIDE, 0, ends, self._ids)
        while self.client.step(offers) is None:  # the sidecar that it knew is gone
            assert self.client.wait_connected(LONG_S), self.client
        assert self.client.poll(LONG_S).steps[-1].declined == 0
        whole = range(2, len(path) + 1, 2)
        return {key64(unit_hash(path[:stop])) for stop in {*whole, *ends, len(path)}}

    def close(self) -> None:
        self.client.close(5.0)
        self.memory.map.close()
        os.close(self.memory.fd)
        if self.process is not None:
            self.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


class Router:
    """A subscriber that is read all the time."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.items: list[Item] = []

    async def read(self) -> None:
        async for item in self.subscriber:
            self.items.append(item)

    @property
    def fold(self) -> Residency:
        (fold,) = self.subscriber.state().values()
        return fold

    @property
    def newest(self) -> int:
        return max((item.seq for item in self.items if isinstance(item, Batch) and not item.replayed), default=-1)

    async def until(self, so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LONG_S):
                while not so():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{self.subscriber}, {self.fold}, {self.items[-20:]}") from None


@pytest.mark.parametrize("durable", [True, False])
def test_a_subscriber_outlives_the_sidecar(machine: Machine, tmp_path: Path, durable: bool) -> None:
    options = ("--state-dir", str(tmp_path / "state")) if durable else ()
    items = asyncio.run(outlive(machine, options))
    assert durable != any(isinstance(item, Restart) for item in items)


async def outlive(machine: Machine, options: tuple[str, ...]) -> list[Item]:
    """What the subscriber is told after the first life."""
    await asyncio.to_thread(machine.serve, *options)
    source = Source(machine.pub, machine.replay)
    async with Subscriber(source, track=True, timing=Timing(settle_s=0.3)) as subscriber:
        router = Router(subscriber)
        reading = asyncio.create_task(router.read())
        first = await asyncio.to_thread(machine.store, (0,) * 6, {1, 3})
        await router.until(lambda: router.fold.hashes(MEDIUM, 0) == first and router.newest >= BEATS_BEFORE)
        machine.kill()
        before = len(router.items)
        await asyncio.to_thread(machine.serve, *options)
        second = await asyncio.to_thread(machine.store, (4, 0, 2), {1})
        assert not first & second
        await router.until(lambda: router.fold.hashes(MEDIUM, 0) == second)
        heard = router.newest
        await router.until(lambda: router.newest > heard)  # and it stays so
        assert router.fold.hashes(MEDIUM, 0) == second
        assert len(router.fold) == len(second)
        reading.cancel()
        return router.items[before:]


def test_names_inside_blocks_come_back_in_a_snapshot(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / FILE_NAME).write_text(str(LATE))
    machine.serve("--state-dir", str(tmp_path / "state"), retained=16)
    path: Prompt = (0, 0, 0, 2, 2)
    names = machine.store(path, {1, 3})
    assert len(names) == 5, "two blocks, two names inside them, and the prompt's end"
    events = asyncio.run(joined(machine, names))
    inner = {event.block_hashes[0]: event for event in events if event.block_size == UNIT}
    assert {key64(name) for name in inner} == {key64(unit_hash(path[:stop])) for stop in (1, 3, 5)}
    for stop in (1, 3, 5):
        truth = block(path[:stop])
        (event,) = [event for name, event in inner.items() if key64(name) == key64(truth.block_hash)]
        parent = None if event.parent_block_hash is None else key64(event.parent_block_hash)
        assert (tuple(event.token_ids), parent) == (truth.token_ids, truth.parent and key64(truth.parent))


async def joined(machine: Machine, names: set[int]) -> list[object]:
    """The stores that a late joiner is told of, all of them in its replay."""
    async with Subscriber(Source(machine.pub, machine.replay), track=True) as subscriber:
        router = Router(subscriber)
        reading = asyncio.create_task(router.read())
        await router.until(lambda: router.fold.hashes(MEDIUM, 0) == names)
        reading.cancel()
        batches = [item for item in router.items if isinstance(item, Batch)]
    stores = [(item, event) for item in batches for event in item.batch.events if hasattr(event, "token_ids")]
    assert all(item.replayed for item, _ in stores)
    return [event for _, event in stores]
