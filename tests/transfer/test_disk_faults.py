"""What a disk can do to a copy, on real files: that copy fails and no other, and no wrong byte is ever loaded."""

import asyncio
import os
import resource
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_engine import SECTORS, Engine, instead, ints, lost_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.transfer.arena import Arena, BlocksLost
from kvevents_service.transfer.disk import DiskStorage
from kvevents_service.transfer.disk_arena import DiskArena
from kvevents_service.transfer.worker import CopyFailed, CopyWorker

SLOTS = 16
EVERY = ints(*range(SLOTS))


@pytest.fixture(params=[False, True], ids=["direct", "cached"])
def storage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DiskStorage]:
    made = DiskStorage(str(tmp_path), SLOTS * SECTORS, page_cache=request.param)
    yield made
    made.close()


@pytest.fixture(params=[1, 2], ids=["in place", "staged"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(SECTORS, layers=request.param)
    yield made
    made.close()


@pytest.fixture
def arena(storage: DiskStorage, engine: Engine) -> DiskArena:
    """Every slot has the engine's block of its number."""
    (made,) = storage.arenas(SLOTS, [SECTORS])
    made.store(engine.memory, EVERY, EVERY)
    return made


def errors(storage: DiskStorage) -> dict[str, int]:
    """What was counted, by kind."""
    return {key[12:]: count for key, count in storage.stats().items() if count and key.startswith("disk_errors_")}


# bytes that are gone


def test_a_truncated_file_has_lost_what_was_behind_its_end_and_nothing_else(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    os.ftruncate(storage.fd, 5 * SECTORS + 4096 + 7)
    assert lost_of(arena, engine, *range(3, 9)) == [5, 6, 7, 8]
    assert errors(storage) == {"short": 4}
    assert lost_of(arena, engine, 0, 1, 2, 3, 4) == []
    arena.store(engine.memory, ints(5, 6), ints(5, 6))  # a write makes the file grow again
    assert lost_of(arena, engine, 4, 5, 6) == []
    assert lost_of(arena, engine, 15) == [15]


@pytest.mark.parametrize("place", [0, 1, SECTORS // 2, SECTORS - 1])
def test_a_changed_byte_is_found(storage: DiskStorage, arena: DiskArena, engine: Engine, place: int) -> None:
    offset = 4 * SECTORS + place
    os.pwrite(storage.fd, bytes([os.pread(storage.fd, 1, offset)[0] ^ 1]), offset)
    assert lost_of(arena, engine, *range(SLOTS)) == [4]
    assert errors(storage) == {"checksum": 1}
    assert lost_of(arena, engine, *range(4), *range(5, SLOTS)) == []


def test_what_was_lost_stays_lost_until_it_is_stored_again(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    """The byte is put back: that nobody may rely on, because the block was said to be gone."""
    was = os.pread(storage.fd, 1, 4 * SECTORS)
    os.pwrite(storage.fd, bytes([was[0] ^ 1]), 4 * SECTORS)
    assert lost_of(arena, engine, 4) == [4]
    os.pwrite(storage.fd, was, 4 * SECTORS)
    assert lost_of(arena, engine, 4) == [4]
    arena.store(engine.memory, ints(4), ints(4))
    assert lost_of(arena, engine, 4) == []


def test_slots_whose_bytes_changed_places_are_found(storage: DiskStorage, arena: DiskArena, engine: Engine) -> None:
    one, other = (os.pread(storage.fd, SECTORS, slot * SECTORS) for slot in (2, 9))
    os.pwrite(storage.fd, other, 2 * SECTORS)
    os.pwrite(storage.fd, one, 9 * SECTORS)
    assert lost_of(arena, engine, *range(SLOTS)) == [2, 9]


def test_a_write_that_the_disk_has_lost_is_found(storage: DiskStorage, arena: DiskArena, engine: Engine) -> None:
    """The slot has the whole block that was there before."""
    before = os.pread(storage.fd, SECTORS, 7 * SECTORS)
    arena.store(engine.memory, ints(30), ints(7))
    os.pwrite(storage.fd, before, 7 * SECTORS)
    assert lost_of(arena, engine, 7) == [7]


def test_a_slot_that_was_never_stored_is_lost(storage: DiskStorage, engine: Engine) -> None:
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    arena.store(engine.memory, ints(0), ints(0))
    assert lost_of(arena, engine, 0, 1) == [1]


# errors of the disk


def test_a_disk_that_cannot_read_loses_what_was_asked_for(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    """EIO from the kernel: addresses of this process that are not there."""
    with instead(storage, "/proc/self/mem"):
        assert lost_of(arena, engine, 3, 4, 9) == [3, 4, 9]
    assert errors(storage) == {"eio": 3}
    assert lost_of(arena, engine, 0, 1, 2) == []


def test_a_disk_that_cannot_write_fails_the_store(storage: DiskStorage, arena: DiskArena, engine: Engine) -> None:
    with instead(storage, "/proc/self/mem"), pytest.raises(OSError, match="Input/output"):
        arena.store(engine.memory, ints(20, 21), ints(3, 9))
    assert errors(storage) == {"eio": 1}
    assert lost_of(arena, engine, 3, 9, 1) == [3, 9]
    arena.store(engine.memory, ints(3, 9), ints(3, 9))
    assert lost_of(arena, engine, 3, 9, 1) == []


def test_an_error_that_may_pass_loses_nothing(storage: DiskStorage, arena: DiskArena, engine: Engine) -> None:
    """EBADF: a descriptor that is for writing only."""
    with instead(storage, "/dev/null", os.O_WRONLY), pytest.raises(OSError, match="Bad file descriptor"):
        arena.load(engine.memory, ints(20, 21), ints(3, 4))
    assert errors(storage) == {"ebadf": 1}
    assert lost_of(arena, engine, 3, 4) == []


def test_a_file_that_may_not_be_as_large_fails_the_store(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    """RLIMIT_FSIZE cuts a write short, then refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * SECTORS + 4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            arena.store(engine.memory, ints(20, 21, 22, 23), ints(2, 3, 4, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert errors(storage) == {"efbig": 1}
    assert lost_of(arena, engine, *range(8)) == [2, 3, 4, 5]
    arena.store(engine.memory, EVERY, EVERY)
    assert lost_of(arena, engine, *range(8)) == []


def test_memory_that_cannot_be_read_fails_the_copy_alone(arena: DiskArena, engine: Engine) -> None:
    with pytest.raises((IndexError, ValueError)):
        arena.store(engine.memory, ints(1, 5000, 3), ints(3, 9, 4))
    with pytest.raises((IndexError, ValueError)):
        arena.load(engine.memory, ints(20, 5000, 21), ints(0, 1, 2))
    assert lost_of(arena, engine, 0, 1, 2, 5) == []


# a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte of our own."""
    place = tmp_path / "small"
    place.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", "size=1m", "kvevents-test", str(place))
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no leave to mount a file system")
    yield place
    subprocess.run(("umount", "--lazy", str(place)), check=True)


@pytest.mark.parametrize("page_cache", [False, True])
def test_a_full_disk_fails_the_store_and_when_there_is_room_again_stores_go_on(
    small_disk: Path, engine: Engine, page_cache: bool
) -> None:
    storage = DiskStorage(str(small_disk), SLOTS * SECTORS, page_cache=page_cache)
    (arena,) = storage.arenas(SLOTS, [SECTORS])
    arena.store(engine.memory, EVERY, EVERY)
    os.ftruncate(storage.fd, 4 * SECTORS)  # its space is given back, and somebody else takes it
    filler = small_disk / "filler"
    filler.touch()
    free = os.statvfs(small_disk)
    os.posix_fallocate((file := filler.open("r+b")).fileno(), 0, free.f_bavail * free.f_frsize)
    file.close()
    with pytest.raises(OSError, match="No space"):
        arena.store(engine.memory, ints(20, 21), ints(8, 9))
    assert errors(storage) == {"enospc": 1}
    assert lost_of(arena, engine, 0, 1, 8, 9) == [8, 9]
    filler.unlink()
    arena.store(engine.memory, ints(8, 9), ints(8, 9))
    assert lost_of(arena, engine, 0, 1, 8, 9) == []
    storage.close()


# the worker lives


async def ended(arena: Arena, engine: Engine, kind: str, *slots: int) -> list[BaseException | None]:
    """How copies of single slots end, one after another, on one worker."""
    worker = CopyWorker(kind, arena, lambda: 0.0)
    task = asyncio.create_task(worker.run())
    transfers = [TransferMeta(1, kind, 1, 1, array("i", [0]), array("i", [slot]), 1.0) for slot in slots]
    futures = [worker.submit(transfer, engine.memory) for transfer in transfers]
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)
    task.cancel()
    worker.close()
    return results


async def test_a_load_of_lost_bytes_names_its_slot_and_the_next_one_works(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    os.ftruncate(storage.fd, 5 * SECTORS + 7)
    short, whole = await ended(arena, engine, "load", 5, 4)
    assert isinstance(short, CopyFailed)
    assert short.lost == ints(5)
    assert "ends before" in str(short)
    assert whole is None


async def test_a_store_to_a_full_disk_fails_and_the_next_one_works(
    storage: DiskStorage, arena: DiskArena, engine: Engine
) -> None:
    with instead(storage, "/dev/full"):
        (error,) = await ended(arena, engine, "store", 1)
    assert isinstance(error, CopyFailed)
    assert "No space left" in str(error)
    assert not error.lost
    assert await ended(arena, engine, "store", 1) == [None]


# all of it in any order


class FaultyDisk(RuleBasedStateMachine):
    """Stores, loads and faults in any order. The model knows what each slot must give, or that it has lost it."""

    slots = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(SECTORS)
        self.storage = DiskStorage(tempfile.gettempdir(), SLOTS * SECTORS)
        (self.arena,) = self.storage.arenas(SLOTS, [SECTORS])
        self.content: dict[int, bytes] = {}
        self.version = 0

    def write(self, slots: list[int]) -> dict[int, bytes]:
        """New content in as many engine blocks."""
        self.version += 1
        for place, slot in enumerate(slots):
            self.engine[place] = bytes([self.version % 256, slot]) * (SECTORS // 2)
        return {slot: self.engine[place] for place, slot in enumerate(slots)}

    @initialize(layers=st.sampled_from([1, 2]))
    def choose(self, layers: int) -> None:
        """In place, or staged."""
        self.engine.close()
        self.engine = Engine(SECTORS, layers=layers)

    @rule(slots=slots)
    def store(self, slots: list[int]) -> None:
        content = self.write(slots)
        self.arena.store(self.engine.memory, ints(*range(len(slots))), ints(*slots))
        self.content |= content

    @rule(slots=slots, disk=st.sampled_from(["/dev/full", "/proc/self/mem"]))
    def store_badly(self, slots: list[int], disk: str) -> None:
        self.write(slots)
        with instead(self.storage, disk), pytest.raises(OSError):
            self.arena.store(self.engine.memory, ints(*range(len(slots))), ints(*slots))
        for slot in slots:
            self.content.pop(slot, None)

    @rule(slot=st.integers(0, SLOTS - 1), place=st.integers(0, SECTORS - 1))
    def change_a_byte(self, slot: int, place: int) -> None:
        offset = slot * SECTORS + place
        was = os.pread(self.storage.fd, 1, offset) or b"\0"
        os.pwrite(self.storage.fd, bytes([was[0] ^ 0x80]), offset)
        self.content.pop(slot, None)

    @rule(slots=st.integers(0, SLOTS))
    def truncate(self, slots: int) -> None:
        os.ftruncate(self.storage.fd, slots * SECTORS)
        self.content = {slot: content for slot, content in self.content.items() if slot < slots}

    @rule(slots=slots)
    def load(self, slots: list[int]) -> None:
        self.engine.wipe()
        gone = sorted(set(slots) - set(self.content))
        lost: list[int] = []
        try:
            self.arena.load(self.engine.memory, ints(*range(len(slots))), ints(*slots))
        except BlocksLost as error:
            lost = error.slots.tolist()
        assert lost == gone
        if not gone:
            assert [self.engine[place] for place in range(len(slots))] == [self.content[slot] for slot in slots]

    @invariant()
    def what_is_there_can_be_loaded(self) -> None:
        if self.content:
            self.load(sorted(self.content))

    def teardown(self) -> None:
        self.storage.close()
        self.engine.close()


FaultyDisk.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestFaultyDisk = FaultyDisk.TestCase
