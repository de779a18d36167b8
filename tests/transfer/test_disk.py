"""The storage of the disk tier: its file is private, its space is taken, ranks have parts of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_engine import ODD, PADDED, SECTORS, Engine, ints

from kvevents_service.errors import ConfigError
from kvevents_service.transfer.disk import DiskStorage
from kvevents_service.transfer.disk_io import SECTOR_BYTES

SLOTS = 48
SIZE_BYTES = 4 * SLOTS * SECTORS


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[DiskStorage]:
    made = DiskStorage(str(tmp_path), SIZE_BYTES)
    yield made
    made.close()


def takes_direct_io(directory: Path) -> bool:
    path = directory / "probe"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def test_copies_go_around_the_page_cache_where_they_can_and_may(tmp_path: Path, storage: DiskStorage) -> None:
    assert storage.direct == bool(storage.stats()["disk_direct"]) == takes_direct_io(tmp_path)
    cached = DiskStorage(str(tmp_path), SIZE_BYTES, page_cache=True)
    assert (cached.direct, repr(cached)) == (False, f"<DiskStorage {SIZE_BYTES} bytes, page cache>")
    cached.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(tmp_path: Path, monkeypatch) -> None:
    """The real open, on a path whose file system says no to this flag: what tmpfs did before Linux 6.6."""
    really, engine = os.open, Engine(SECTORS)

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    storage = DiskStorage(str(tmp_path), SIZE_BYTES)
    arena = storage.arenas(SLOTS, [SECTORS])[0]
    assert (storage.direct, arena.direct, storage.stats()["disk_direct"]) == (False, False, 0)
    arena.store(engine.memory, ints(3), ints(9))
    arena.load(engine.memory, ints(4), ints(9))
    assert engine[3] == engine[4]
    storage.close()


def test_a_slot_is_whole_sectors_where_that_costs_little(storage: DiskStorage) -> None:
    expected = (16384, 20480) if storage.direct else (16384, 20000)
    assert tuple(storage.slot_bytes([size]) for size in (SECTORS, PADDED)) == expected
    assert storage.slot_bytes([ODD]) == ODD
    assert storage.slot_bytes([SECTORS, PADDED, ODD]) == sum(expected) + ODD
    for arena in storage.arenas(SLOTS, [SECTORS, PADDED]):
        assert arena.direct == storage.direct
        assert not arena._start % SECTOR_BYTES
    assert not storage.arenas(SLOTS, [ODD, SECTORS])[0].direct


@pytest.mark.parametrize("sizes", [(SECTORS, SECTORS), (ODD, SECTORS), (PADDED, ODD)])
def test_ranks_have_parts_of_their_own(storage: DiskStorage, sizes: tuple[int, int]) -> None:
    engines = [Engine(size, SLOTS, seed) for seed, size in enumerate(sizes)]
    arenas = storage.arenas(SLOTS, sizes)
    every = ints(*range(SLOTS))
    for arena, engine in zip(arenas, engines, strict=True):
        arena.store(engine.memory, every, every)
    for arena, engine in zip(arenas, engines, strict=True):
        before = bytes(engine.shared.map[:])
        engine.wipe()
        arena.load(engine.memory, every, every)
        assert bytes(engine.shared.map[:]) == before
    last = SLOTS * storage.slot_bytes(sizes[:1]) + (SLOTS - 1) * storage.slot_bytes(sizes[1:])
    assert os.pread(storage.fd, sizes[1], last) == engines[1][SLOTS - 1]


@pytest.mark.parametrize("page_cache", [False, True])
def test_the_file_is_private_has_no_name_and_its_space_is_taken(tmp_path: Path, page_cache: bool) -> None:
    storage = DiskStorage(str(tmp_path), SIZE_BYTES, page_cache=page_cache)
    status = os.fstat(storage.fd)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    assert status.st_blocks * 512 >= status.st_size == SIZE_BYTES
    assert not list(tmp_path.iterdir())
    assert not os.get_inheritable(storage.fd)
    storage.close()


def test_closing_gives_the_descriptors_and_threads_back_once(tmp_path: Path) -> None:
    engine = Engine(SECTORS)
    before = set(os.listdir("/proc/self/fd"))
    storage = DiskStorage(str(tmp_path), SIZE_BYTES)
    storage.arenas(SLOTS, [SECTORS])[0].store(engine.memory, ints(1), ints(1))
    fd, threads = storage.fd, [*storage._readers._threads, *storage._writers._threads]
    storage.close()
    storage.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert set(os.listdir("/proc/self/fd")) == before
    engine.close()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("directory", "size_bytes", "setting"),
    [("absent", 4096, "disk_path"), ("file", 4096, "disk_path"), ("", 1 << 60, "disk_bytes")],
)
def test_what_cannot_be_had_names_its_setting(
    tmp_path: Path, directory: str, size_bytes: int, setting: str, keep: bool
) -> None:
    (tmp_path / "file").touch()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as error:
        DiskStorage(str(tmp_path / directory), size_bytes, keep=keep)
    assert error.value.setting == setting
    assert "free" in error.value.expected or setting == "disk_path"
    del error
    assert set(os.listdir("/proc/self/fd")) <= before
    assert all(path.name == "file" or (keep and path.stat().st_size == 0) for path in tmp_path.iterdir())


def test_its_threads_take_no_core_from_the_loop(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path), SIZE_BYTES)
    try:
        for threads in (storage._readers, storage._writers):
            assert threads.submit(os.sched_getscheduler, 0).result(60.0) == os.SCHED_BATCH
    finally:
        storage.close()
