"""A sidecar with host memory before a file: evictions cascade, disk hits are promoted, and every byte is right."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_engine_plane import chain, fold

from kvevents_service.core.residency import Residency, key64
from kvevents_service.service.app import Service

BLOCK_BYTES = 128
LENGTH = 8
"""Blocks of a chain: the headroom of a tier of 64."""
BOTH = {"CPU", "STORAGE"}


@pytest.fixture
def both(run, tmp_path: Path) -> Callable[..., object]:
    """`async with both() as service:` 64 blocks in front, 256 behind."""

    def make(front: int = 64, back: int = 256, block_bytes: int = BLOCK_BYTES) -> object:
        disk = {"disk_path": str(tmp_path), "disk_bytes": back * block_bytes}
        return run(host_bytes=front * block_bytes, **disk)

    return make


async def quiet(service: Service) -> None:
    """Until nothing is being copied any more."""
    async with asyncio.timeout(30):
        while service.sidecar.stats()["transfers"]:
            await asyncio.sleep(0.01)


async def tick(service: Service) -> None:
    assert service.sidecar.tier is not None
    service.sidecar.perform(service.sidecar.tier.scheduler.tick(service.sidecar.clock()))
    await quiet(service)


async def check(service: Service) -> Residency:
    """The oracle, on each medium."""
    await quiet(service)
    inspected = service.sidecar.inspect(1, residents=True).inspected()
    folded = await fold(service, inspected.next_seq)
    folded.check()
    assert {shelf.medium for shelf in inspected.residents} == BOTH
    for shelf in inspected.residents:
        names = {key64(shelf.block_hashes[i : i + 8]) for i in range(0, len(shelf.block_hashes), 8)}
        assert folded.hashes(shelf.medium, shelf.group) == names
    return folded


async def store(service: Service, mini, seed: int) -> None:
    """A chain whose blocks have bytes of their own, in blocks 0 to 7 of the engine."""
    for block in range(LENGTH):
        mini.fill(block, (seed * LENGTH + block) % 251)
    ended = await asyncio.to_thread(mini.store, chain(seed, LENGTH), list(range(LENGTH)))
    assert ended.steps[0].stored == LENGTH
    await quiet(service)


async def loads(mini, seed: int) -> int:
    """How many blocks of a chain come back; those that do are what was stored."""
    places = list(range(20, 20 + LENGTH))
    for place in places:
        mini.fill(place, 252)
    count = await asyncio.to_thread(mini.load, chain(seed, LENGTH), places)
    assert all(mini.holds(20 + block, (seed * LENGTH + block) % 251) for block in range(count))
    return count


async def test_what_had_to_leave_comes_back_from_the_disk_byte_for_byte(both, engine) -> None:
    async with both() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(24):
            await store(service, mini, seed)
        stats = service.sidecar.stats()
        assert stats["blocks_removed"] == (24 - 8) * LENGTH
        assert (stats["evicted_unsaved"], stats["disk_blocks_resident"] >= (24 - 8) * LENGTH) == (0, True)
        await check(service)
        assert [await loads(mini, seed) for seed in range(24)] == [LENGTH] * 24
        stats = service.sidecar.stats()
        assert stats["blocks_promoted"] >= (24 - 8) * LENGTH
        assert (stats["loads_failed"], stats["copies_failed"]) == (0, 0)
        await check(service)


async def test_a_promoted_block_is_on_both_media(both, engine) -> None:
    async with both() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(9):
            await store(service, mini, seed)
        names = {key64(name) for name in chain(0, LENGTH).hashes}
        folded = await check(service)
        assert names <= folded.hashes("STORAGE", 0)
        assert not names & folded.hashes("CPU", 0)
        assert await loads(mini, 0) == LENGTH
        folded = await check(service)
        assert names <= folded.hashes("STORAGE", 0) & folded.hashes("CPU", 0)
        assert service.sidecar.stats()["blocks_promoted"] == LENGTH


async def test_a_small_disk_evicts_too_and_the_stream_stays_true(both, engine) -> None:
    async with both(back=80) as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(30):
            await store(service, mini, seed)
        assert service.sidecar.stats()["disk_blocks_removed"] > 0
        await check(service)
        assert sum([await loads(mini, seed) for seed in range(30)]) >= 8 * LENGTH
        await check(service)


async def test_a_reset_and_the_end_say_it_of_both_media(both, engine) -> None:
    async with both() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(9):
            await store(service, mini, seed)
        resident = service.sidecar.stats()["blocks_resident"] + service.sidecar.stats()["disk_blocks_resident"]
        assert await asyncio.to_thread(mini.client.reset) == resident > 64
        assert len(await check(service)) == 0
        await store(service, mini, 3)
        await tick(service)
        await service.drain()
        folded = await fold(service, service.publisher.journal.next_seq)
        assert (len(folded), folded.stored) == (0, folded.removed)


async def test_a_file_that_lost_its_bytes_costs_a_miss_and_no_more(both, engine) -> None:
    async with both() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(9):
            await store(service, mini, seed)
        service.sidecar.tier.scheduler.demotions.rest()  # no write is to make the file longer before the load
        os.ftruncate(service.sidecar._tiers.storages[1].fd, 0)
        behind = service.sidecar.stats()["disk_blocks_resident"]
        assert await loads(mini, 0) == 0
        stats = service.sidecar.stats()
        assert (stats["disk_blocks_lost"], stats["disk_blocks_removed"]) == (LENGTH, LENGTH)
        assert (stats["disk_errors_short"], stats["disk_blocks_resident"]) == (LENGTH, behind - LENGTH)
        folded = await check(service)
        assert not {key64(name) for name in chain(0, LENGTH).hashes} & folded.hashes("STORAGE", 0)
        assert folded.removed == stats["blocks_removed"] + LENGTH
        assert await loads(mini, 8) == LENGTH
        await store(service, mini, 40)
        await check(service)


async def test_an_engine_that_dies_leaves_its_blocks_on_both_tiers(both, engine) -> None:
    async with both() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(9):
            await store(service, mini, seed)
        hit = await asyncio.to_thread(mini.client.lookup, "r", list(chain(0, LENGTH).hashes))
        assert hit.blocks == LENGTH
        assert await asyncio.to_thread(mini.client.close, 5.0)
        await tick(service)
        second = await asyncio.to_thread(engine)
        assert [await loads(second, seed) for seed in (0, 8)] == [LENGTH, LENGTH]
        await check(service)
        assert service.sidecar.tier.scheduler.back.pool.pinned() == 0  # type: ignore[union-attr]


async def test_ranks_cascade_together(both) -> None:
    from test_ranks import BLOCK_BYTES as ALL_BYTES
    from test_ranks import Pipeline

    async with both(front=8, back=40, block_bytes=ALL_BYTES) as service:
        pipe = await asyncio.to_thread(Pipeline, service.ready.engine_socket)
        await asyncio.to_thread(pipe.start, 0, 1, 2)
        assert await asyncio.to_thread(pipe.store, chain(1, 4), list(range(4)), 10) == (4, 0)
        assert await asyncio.to_thread(pipe.store, chain(2, 4), list(range(4)), 20) == (4, 0)
        for _ in range(10):  # the headroom of such a tier is one block
            await tick(service)
        assert await asyncio.to_thread(pipe.store, chain(3, 6), list(range(6)), 40) == (6, 0)
        assert await asyncio.to_thread(pipe.load, chain(1, 4), list(range(20, 24))) == 4
        assert pipe.hold([20, 21, 22, 23], 10)
        assert service.sidecar.stats()["blocks_promoted"] > 0
        await check(service)
        await asyncio.to_thread(pipe.close)
