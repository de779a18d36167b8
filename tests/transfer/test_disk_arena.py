"""The disk arena keeps every byte in its place, in parts of any size, several at once."""

import errno
import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
from disk_engine import ODD, PADDED, SECTORS, Engine, ints

from kvevents_service.transfer import disk_arena
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.disk import DiskStorage
from kvevents_service.transfer.disk_arena import Part, overlapped

SLOTS = 48


@pytest.mark.parametrize("page_cache", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize("block_bytes", [SECTORS, PADDED, ODD])
@pytest.mark.parametrize("part_blocks", [1, 3, 100])
@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize("layers", [1, 2], ids=["in place", "staged"])
def test_every_byte_comes_back(
    tmp_path: Path,
    monkeypatch,
    block_bytes: int,
    part_blocks: int,
    scattered: bool,
    page_cache: bool,
    layers: int,
) -> None:
    monkeypatch.setattr(disk_arena, "PART_BYTES", part_blocks * 20480)
    monkeypatch.setattr(disk_arena, "STAGING_BYTES", 3 * part_blocks * 20480)
    storage = DiskStorage(str(tmp_path), SLOTS * 20480, page_cache=page_cache)
    (arena,), engine, rng = (
        storage.arenas(SLOTS, [block_bytes]),
        Engine(block_bytes, layers=layers),
        random.Random(3),
    )
    blocks = rng.sample(range(32), 20) if scattered else list(range(3, 23))
    slots = rng.sample(range(SLOTS), 20) if scattered else list(range(7, 27))
    before = [engine[block] for block in range(32)]
    arena.store(engine.memory, ints(*blocks), ints(*slots))
    for block, slot in zip(blocks, slots, strict=True):
        assert os.pread(storage.fd, block_bytes, slot * arena.stride) == before[block]
    engine.wipe()
    back = [(block + 11) % 32 for block in blocks]
    arena.load(engine.memory, ints(*back), ints(*slots))
    assert [engine[block] for block in back] == [before[block] for block in blocks]
    assert all(engine[block] == bytes(block_bytes) for block in set(range(32)) - set(back))
    storage.close()


def test_what_is_staged_is_bounded(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path), 1 << 20)
    for block_bytes, slots in ((64, 1 << 14), (SECTORS, 64), (PADDED, 48), (1 << 19, 2)):
        (arena,) = storage.arenas(slots, [block_bytes])
        staged = (arena._outgoing.slots + arena._incoming.slots) * arena.stride
        two_parts = 4 * max(arena.stride, disk_arena.PART_BYTES)
        assert staged <= max(2 * disk_arena.STAGING_BYTES, two_parts)
        assert arena._parts >= 2
    storage.close()


def test_parts_are_read_and_written_at_the_same_time(tmp_path: Path, monkeypatch) -> None:
    """Both parts of a copy must have been begun before one of them ends."""
    monkeypatch.setattr(disk_arena, "PART_BYTES", SECTORS)
    storage, engine = DiskStorage(str(tmp_path), SLOTS * SECTORS), Engine(SECTORS)
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    for name in ("pwrite", "preadv"):
        barrier, really = Barrier(2), getattr(os, name)

        def together(*args: object, barrier: Barrier = barrier, really=really) -> int:
            barrier.wait(10)
            return really(*args)

        monkeypatch.setattr(os, name, together)
    arena.store(engine.memory, ints(1, 2), ints(3, 9))
    arena.load(engine.memory, ints(5, 6), ints(3, 9))
    assert (engine[5], engine[6]) == (engine[1], engine[2])
    storage.close()


def test_a_host_arena_can_stand_where_an_engine_does(tmp_path: Path) -> None:
    """What a tier in front of this one hands over: memory in which a block is one region."""
    storage, host = DiskStorage(str(tmp_path), SLOTS * SECTORS), HostArena(32, SECTORS)
    engine = Engine(SECTORS)
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    host.store(engine.memory, ints(1, 2, 3), ints(8, 9, 4))
    memory = host.as_memory()
    arena.store(memory, ints(8, 9, 4), ints(20, 21, 22))
    arena.load(memory, ints(0, 1, 2), ints(20, 21, 22))
    assert [bytes(host.bytes_of(slot, 1)) for slot in range(3)] == [engine[1], engine[2], engine[3]]
    storage.close()


@pytest.mark.parametrize(("page_cache", "told"), [(True, 7), (False, 4096), (False, 5000)])
def test_what_the_kernel_does_in_parts_is_finished(
    tmp_path: Path, monkeypatch, page_cache: bool, told: int
) -> None:
    """A signal or a quota may cut a call short, for direct I/O within a sector: the real calls say they were."""
    storage, engine = DiskStorage(str(tmp_path), SLOTS * SECTORS, page_cache=page_cache), Engine(SECTORS)
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    calls = []

    def short(really):
        def call(fd: int, data: object, offset: int) -> int:
            calls.append(offset)
            return min(told, really(fd, data, offset))

        return call

    monkeypatch.setattr(os, "pwrite", short(os.pwrite))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    arena.store(engine.memory, ints(3), ints(9))
    arena.load(engine.memory, ints(8), ints(9))
    assert engine[8] == engine[3]
    assert len(calls) >= 8
    storage.close()


# overlapped


def parts(count: int) -> list[Part]:
    return [Part(ints(number), ints(), []) for number in range(count)]


def test_no_more_than_depth_parts_are_under_way_and_they_come_in_order() -> None:
    begun: list[Future[int]] = []

    def begin(part: Part) -> Future[int]:
        begun.append(Future())
        begun[-1].set_result(part.blocks[0] * 10)
        return begun[-1]

    seen = []
    for part, result in overlapped(iter(parts(7)), 3, begin):
        seen.append((part.blocks[0], result))
        assert len(begun) - len(seen) < 3
    assert seen == [(number, number * 10) for number in range(7)]


def test_a_failed_part_is_raised_when_no_other_is_under_way() -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise OSError(errno.EIO, "bad")
        ended.append(number)

    with ThreadPoolExecutor(2) as threads:
        begun: list[Future[None]] = []

        def begin(part: Part) -> Future[None]:
            begun.append(threads.submit(work, part.blocks[0]))
            return begun[-1]

        with pytest.raises(OSError, match="bad"):
            list(overlapped(iter(parts(9)), 4, begin))
        assert all(future.done() for future in begun)
        assert len(begun) < 9


def test_a_reader_that_stops_waits_for_what_was_begun() -> None:
    with ThreadPoolExecutor(2) as threads:
        begun: list[Future[None]] = []

        def begin(part: Part) -> Future[None]:
            begun.append(threads.submit(lambda: None))
            return begun[-1]

        reading = overlapped(iter(parts(9)), 4, begin)
        next(reading)
        reading.close()
        assert len(begun) == 4
        assert all(future.done() for future in begun)


# memory that a device copies from by itself


class Device(HostArena):
    """Staging that a device fills and empties, each time when it is waited for and not before."""

    def store(self, *copy):
        return partial(HostArena.store, self, *copy)

    def load(self, *copy):
        return partial(HostArena.load, self, *copy)


def test_bytes_that_a_device_brings_are_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_arena, "HostArena", Device)
    monkeypatch.setattr(disk_arena, "PART_BYTES", SECTORS)
    storage, engine = DiskStorage(str(tmp_path), SLOTS * SECTORS), Engine(SECTORS)
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    arena.store(engine.memory, ints(1, 2, 3), ints(3, 9, 4))
    arena.load(engine.memory, ints(5, 6, 7), ints(3, 9, 4))
    assert [engine[block] for block in (5, 6, 7)] == [engine[block] for block in (1, 2, 3)]
    storage.close()
