"""The readiness probe goes through socket, copies and journal, sees each of them stuck, and leaves no trace."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents_service.config import ServeConfig
from kvevents_service.service.app import Service, started
from kvevents_service.service.probe import Probe
from kvevents_service.testing import make_chain
from kvevents_service.transfer.arena import BlocksLost
from kvevents_service.transfer.memory import EngineMemory

SOON_S = 0.2


def probe_of(service: Service, deadline_s: float = 10.0) -> Probe:
    return Probe(service.sidecar, service.publisher, service.plane.path, deadline_s)


async def test_it_is_ready_before_an_engine_and_with_one(run, engine) -> None:
    async with run() as service:
        probe = probe_of(service)
        before = await probe.ask()
        assert (before.ready, list(before.seconds)) == (True, ["engine_socket", "copy", "journal"])
        mini = await asyncio.to_thread(engine)
        mini.fill(0, 7)
        await asyncio.to_thread(mini.store, make_chain(range(4), 4), [0])
        assert (await probe.ask()).ready


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_it_leaves_no_trace(run, engine, tmp_path: Path, tier: str) -> None:
    """Nothing is numbered, no slot changes hands, and what was stored is what is loaded."""
    disk = {"host_bytes": 0, "disk_path": str(tmp_path), "disk_bytes": 4096}
    async with run(**(disk if tier == "disk" else {})) as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain(range(32), 4)
        for block in range(8):
            mini.fill(block, block + 1)
        await asyncio.to_thread(mini.store, chain, list(range(8)))
        sidecar = service.sidecar
        before = (service.publisher.journal.next_seq, sidecar.tier.scheduler.stats(), dict(sidecar.errors))
        for _ in range(3):
            assert (await probe_of(service).ask()).ready
        after = (service.publisher.journal.next_seq, sidecar.tier.scheduler.stats(), dict(sidecar.errors))
        assert after == before
        sidecar.tier.scheduler.pool.check()
        assert not any(route.medium == "" for route in sidecar.meter.traffic)
        assert await asyncio.to_thread(mini.load, chain, list(range(8, 16))) == 8
        assert all(mini.holds(8 + block, block + 1) for block in range(8))
        while len(service.plane.sessions) > 1:
            await asyncio.sleep(0.01)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("direction", ["store", "load"])
async def test_a_copy_that_hangs_is_seen(run, engine, held: threading.Event, direction: str) -> None:
    async with run() as service:
        await asyncio.to_thread(engine)
        worker = service.sidecar.tier.lanes[0]._workers[direction]
        good = worker._copy
        worker._copy = lambda *_: held.wait(60)
        probed = await probe_of(service, SOON_S).ask()
        assert (probed.ready, probed.failed, list(probed.seconds)) == (False, "copy", ["engine_socket"])
        worker._copy = good
        held.set()
        assert (await probe_of(service).ask()).ready


async def test_probes_do_not_pile_up_behind_a_copy_that_hangs(run, engine, held: threading.Event) -> None:
    async with run() as service:
        await asyncio.to_thread(engine)
        worker = service.sidecar.tier.lanes[0]._workers["load"]
        good, taken = worker._copy, set()

        def hanging(memory: EngineMemory, *_: object) -> None:
            taken.add(memory)
            held.wait(5)

        worker._copy = hanging
        probe = probe_of(service, 0.05)
        for _ in range(5):
            assert (await probe.ask()).failed == "copy"
        assert [future.done() for future in worker._open] == [False]
        waiting = [job.memory.views for job in worker._jobs._queue]  # type: ignore[attr-defined]
        assert (len(taken), waiting) == (1, [[]] * 4)  # nothing of theirs is mapped any more
        worker._copy = good
        held.set()
        assert (await probe_of(service).ask()).ready


async def test_a_copy_that_fails_is_seen_and_a_lost_block_is_not_one(run, engine) -> None:
    async with run() as service:
        await asyncio.to_thread(engine)
        worker = service.sidecar.tier.lanes[0]._workers["load"]

        def failing(memory: object, blocks: array[int], slots: array[int]) -> None:
            if len(blocks):
                raise OSError("the device is gone")

        def losing(memory: object, blocks: array[int], slots: array[int]) -> None:
            raise BlocksLost(slots, "never written")

        worker._copy = failing
        probed = await probe_of(service).ask()
        assert (probed.failed, "device is gone" in str(probed.why)) == ("copy", True)
        worker._copy = losing
        assert (await probe_of(service).ask()).ready


@pytest.mark.parametrize(("missing", "failed"), [("plane", "engine_socket"), ("publisher", "journal")])
async def test_a_part_that_does_not_run_is_seen(tmp_path: Path, missing: str, failed: str) -> None:
    config = ServeConfig(
        engine_socket=str(tmp_path / "e.sock"), pub="tcp://127.0.0.1:0", replay=None, admin="off", host_bytes=4096
    )
    async with started(config) as service:
        parts = {"plane": service.plane.run, "publisher": service.publisher.run}
        tasks = [asyncio.create_task(part()) for name, part in parts.items() if name != missing]
        probed = await probe_of(service, SOON_S).ask()
        assert (probed.ready, probed.failed) == (False, failed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_sidecar_that_drains_is_not_ready(run) -> None:
    async with run() as service:
        service.sidecar.draining = True
        probed = await probe_of(service).ask()
        assert (probed.ready, probed.why) == (False, "the sidecar is draining")


async def test_those_who_ask_together_share_one_probe(run) -> None:
    async with run() as service:
        probe = probe_of(service)
        first, second = await asyncio.gather(probe.ask(), probe.ask())
        assert first is second
        assert (await probe.ask()) is not first
