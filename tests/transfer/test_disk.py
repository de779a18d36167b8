"""The disk arena keeps every byte in its place, in pieces of any size, and its errors stay with their transfer."""

import asyncio
import os
import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.errors import ConfigError
from kvevents_service.transfer import disk
from kvevents_service.transfer.arena import Arena
from kvevents_service.transfer.disk import DiskArena, DiskStorage
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.transfer.worker import CopyFailed, CopyWorker
from kvevents_service.wire.control import Memory

BLOCKS, SLOTS, LAYERS, LAYER_BYTES = 32, 48, 2, 40
BLOCK_BYTES = LAYERS * LAYER_BYTES


def engine() -> tuple[SharedMemory, EngineMemory]:
    """Memory with random bytes in it."""
    size = BLOCKS * BLOCK_BYTES
    shared = SharedMemory.create(size)
    shared.map[:] = random.Random(7).randbytes(size)
    return shared, attach([Memory(size)], uniform_layers(LAYERS, BLOCKS, LAYER_BYTES), [os.dup(shared.fd)])


def block_of(shared: SharedMemory, block: int) -> bytes:
    starts = [(layer * BLOCKS + block) * LAYER_BYTES for layer in range(LAYERS)]
    return b"".join(shared.map[start : start + LAYER_BYTES] for start in starts)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[DiskStorage]:
    made = DiskStorage(str(tmp_path), 2 * SLOTS * BLOCK_BYTES)
    yield made
    made.close()


def only(storage: DiskStorage) -> DiskArena:
    (arena,) = storage.arenas(SLOTS, [BLOCK_BYTES])
    assert isinstance(arena, DiskArena)
    return arena


@pytest.mark.parametrize("staging_bytes", [1, 3 * BLOCK_BYTES, 1 << 20], ids=["a block", "three", "all"])
@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
def test_every_byte_comes_back(
    storage: DiskStorage, monkeypatch: pytest.MonkeyPatch, staging_bytes: int, scattered: bool
) -> None:
    monkeypatch.setattr(disk, "STAGING_BYTES", staging_bytes)
    shared, memory = engine()
    arena, rng = only(storage), random.Random(3)
    blocks = rng.sample(range(BLOCKS), 20) if scattered else list(range(3, 23))
    slots = rng.sample(range(SLOTS), 20) if scattered else list(range(7, 27))
    before = [block_of(shared, block) for block in range(BLOCKS)]
    arena.store(memory, array("i", blocks), array("i", slots))
    for block, slot in zip(blocks, slots, strict=True):
        assert os.pread(storage.fd, BLOCK_BYTES, slot * BLOCK_BYTES) == before[block]
    shared.map[:] = bytes(len(shared.map))
    back = [(block + 11) % BLOCKS for block in blocks]
    arena.load(memory, array("i", back), array("i", slots))
    assert [block_of(shared, block) for block in back] == [before[block] for block in blocks]
    untouched = set(range(BLOCKS)) - set(back)
    assert all(block_of(shared, block) == bytes(BLOCK_BYTES) for block in untouched)


def test_ranks_have_parts_of_their_own(storage: DiskStorage) -> None:
    shared, memory = engine()
    first, second = storage.arenas(SLOTS, [BLOCK_BYTES, BLOCK_BYTES])
    every = array("i", range(BLOCKS))
    first.store(memory, every, every)
    shared.map[:] = bytes(reversed(shared.map[:]))
    second.store(memory, every, every)
    turned = bytes(shared.map[:])
    first.load(memory, every, every)
    assert bytes(reversed(shared.map[:])) == turned
    last = SLOTS - 1
    second.store(memory, array("i", [0]), array("i", [last]))
    assert os.pread(storage.fd, BLOCK_BYTES, (SLOTS + last) * BLOCK_BYTES) == block_of(shared, 0)


def test_the_file_is_private_has_no_name_and_its_space_is_taken(storage: DiskStorage, tmp_path: Path) -> None:
    status = os.fstat(storage.fd)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    assert status.st_blocks * 512 >= status.st_size == 2 * SLOTS * BLOCK_BYTES
    assert not list(tmp_path.iterdir())
    assert not os.get_inheritable(storage.fd)


def test_closing_gives_the_descriptor_back_once(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path), 4096)
    storage.close()
    storage.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(storage.fd)


@pytest.mark.parametrize(
    ("directory", "size_bytes", "setting"),
    [("absent", 4096, "disk_path"), ("file", 4096, "disk_path"), ("", 1 << 60, "disk_bytes")],
)
def test_what_cannot_be_had_names_its_setting(
    tmp_path: Path, directory: str, size_bytes: int, setting: str
) -> None:
    (tmp_path / "file").touch()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as error:
        DiskStorage(str(tmp_path / directory), size_bytes)
    assert error.value.setting == setting
    assert "free" in error.value.expected or setting == "disk_path"
    del error
    assert set(os.listdir("/proc/self/fd")) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def ended(arena: Arena, kind: str, *transfers: TransferMeta) -> list[BaseException | None]:
    """How these copies end, one after another, on one worker."""
    _, memory = engine()
    worker = CopyWorker(kind, arena, lambda: 0.0)
    task = asyncio.create_task(worker.run())
    futures = [worker.submit(transfer, memory) for transfer in transfers]
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)
    task.cancel()
    worker.close()
    return results


def transfer(kind: str, slot: int) -> TransferMeta:
    return TransferMeta(1, kind, 1, 1, array("i", [0]), array("i", [slot]), 1.0)


async def test_a_file_that_has_lost_its_end_fails_that_load_and_no_other(storage: DiskStorage) -> None:
    os.ftruncate(storage.fd, 5 * BLOCK_BYTES + 7)
    short, whole = await ended(only(storage), "load", transfer("load", 5), transfer("load", 4))
    assert isinstance(short, CopyFailed)
    assert "ends before" in str(short)
    assert whole is None


async def test_a_disk_that_is_full_fails_that_store_and_no_other(storage: DiskStorage) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    kept = storage.fd
    arena = only(storage)
    storage.fd = full
    (error,) = await ended(arena, "store", transfer("store", 1))
    assert isinstance(error, CopyFailed)
    assert "No space left" in str(error)
    storage.fd = kept
    os.close(full)
    assert await ended(arena, "store", transfer("store", 1)) == [None]


def test_what_the_kernel_does_in_parts_is_finished(storage: DiskStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal or a quota may cut a call short: the real calls, of seven bytes each."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:7]], offset))
    shared, memory = engine()
    before = block_of(shared, 3)
    arena = only(storage)
    arena.store(memory, array("i", [3]), array("i", [9]))
    arena.load(memory, array("i", [8]), array("i", [9]))
    assert block_of(shared, 8) == before
