"""A kept disk tier is found again as it was, never as something else."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from threading import Event

import msgspec
import pytest
from disk_engine import SECTORS, Engine, instead, ints, lost_of
from kept_blocks import FULL, LAYOUT, WINDOW, chain, facts, hash_of, inner, parents_come_first
from xxhash import xxh3_64_intdigest

from kvevents_service.core.metadata import StoreRun
from kvevents_service.errors import ConfigError
from kvevents_service.transfer import disk_index
from kvevents_service.transfer.arena import BlocksLost
from kvevents_service.transfer.disk import BLOCKS_NAME, INDEX_NAME, DiskStorage
from kvevents_service.transfer.disk_index import HEADER_BYTES, MAGIC, Header, read_index
from kvevents_service.transfer.disk_layout import KeptLayout
from kvevents_service.transfer.disk_record import entry_bytes

SLOTS = 32
SIZE_BYTES = SLOTS * SECTORS


class Tier:
    """One life of a sidecar's kept tier. Slot i takes, and must give, block i of the engine."""

    def __init__(self, directory: Path, layout: KeptLayout = LAYOUT, slots: int = SLOTS) -> None:
        self.storage = DiskStorage(str(directory), SIZE_BYTES, keep=True)
        self.engine = Engine(SECTORS, 2 * SLOTS)
        (self.arena,) = self.storage.arenas(slots, [SECTORS])
        self.found = self.storage.recover(layout)

    def store(self, *runs: StoreRun) -> None:
        for run in runs:
            self.arena.store(self.engine.memory, ints(*run.slots), ints(*run.slots))
        self.storage.keep(runs)

    def lost_of(self, *slots: int) -> list[int]:
        return lost_of(self.arena, self.engine, *slots)

    def end(self) -> None:
        self.storage.close()
        self.engine.close()


def run(meta, *slots: int, inner=()) -> StoreRun:
    return StoreRun(meta, list(slots), tuple(inner))


TRUNK = run(chain("a", 4), 3, 4, 5, 9, inner=[inner("i", hash_of("a", 0))])
BRANCH = run(chain("b", 3, parent=hash_of("a", 1), lora="tuned", extra_keys=[("s",), None, ("t", 1)]), 20, 8, 21)
LOOSE = run(chain("w", 2, WINDOW, parent=hash_of("gone")), 30, 31)
ALL = [TRUNK, BRANCH, LOOSE]
USED = [slot for stored in ALL for slot in stored.slots]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory in which a tier with ALL in it was closed."""
    tier = Tier(tmp_path)
    assert tier.found == []
    tier.store(*ALL)
    tier.end()
    return tmp_path


def test_a_restart_finds_every_block_its_facts_and_its_bytes(kept: Path) -> None:
    tier = Tier(kept)
    assert facts(tier.found) == facts(ALL)
    assert parents_come_first(tier.found)
    assert [slot for slot, flag in enumerate(tier.storage.kept_slots()) if flag] == sorted(USED)
    assert tier.lost_of(*USED) == []
    assert tier.lost_of(0) == [0]
    stats = tier.storage.stats()
    assert (stats["disk_blocks_recovered"], stats["disk_index"], stats["disk_layouts_void"]) == (9, 1, 0)
    tier.end()


def test_what_is_stored_after_a_restart_is_found_too(kept: Path) -> None:
    tier = Tier(kept)
    more = run(chain("c", 2, parent=hash_of("a", 3)), 10, 11)
    tier.store(more)
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts([*ALL, more])
    assert again.lost_of(*USED, 10, 11) == []
    again.end()


def test_the_files_are_private(kept: Path) -> None:
    assert sorted(path.name for path in kept.iterdir()) == [BLOCKS_NAME, INDEX_NAME]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept.iterdir())


def test_without_keep_there_is_no_index_and_nothing_is_found(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path), SIZE_BYTES)
    storage.arenas(SLOTS, [SECTORS])
    assert storage.recover(LAYOUT) == []
    storage.keep(ALL)
    storage.void()
    storage.close()
    assert not list(tmp_path.iterdir())


def test_two_sidecars_do_not_share_one(kept: Path) -> None:
    tier = Tier(kept)
    with pytest.raises(ConfigError, match="in use"):
        DiskStorage(str(kept), SIZE_BYTES, keep=True)
    tier.end()


# what is void


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "another"},
        {"hash_bytes": 16},
        {"groups": (FULL,)},
        {"groups": (msgspec.structs.replace(FULL, sliding_window=8), WINDOW)},
        {"hash_tokens": 8},
        {"sizes": ((16384,),)},
        {"version": 99},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_layout_makes_it_void_for_good(kept: Path, change: dict[str, object]) -> None:
    tier = Tier(kept, msgspec.structs.replace(LAYOUT, **change))
    assert tier.found == []
    assert tier.storage.stats()["disk_layouts_void"] == 1
    assert tier.lost_of(*USED) == sorted(USED)
    tier.end()
    back = Tier(kept)
    assert back.found == []
    back.end()


def test_another_number_of_slots_makes_it_void(kept: Path) -> None:
    tier = Tier(kept, slots=SLOTS - 1)
    assert tier.found == []
    tier.end()


def test_a_layout_that_comes_back_in_one_life_finds_nothing(kept: Path) -> None:
    tier = Tier(kept)
    tier.storage.arenas(SLOTS, [SECTORS])
    assert tier.storage.recover(msgspec.structs.replace(LAYOUT, namespace="another")) == []
    tier.storage.arenas(SLOTS, [SECTORS])
    assert tier.storage.recover(LAYOUT) == []
    tier.end()


def test_a_reset_makes_all_of_it_void_at_once(kept: Path) -> None:
    """What is in the file the moment that `void` returns is what a crash leaves."""
    tier = Tier(kept)
    tier.storage.void()
    with (kept / INDEX_NAME).open("rb") as file:
        left = read_index(file.fileno(), "STORAGE")
    assert left is not None
    assert left.runs == []
    new = run(chain("n", 2), 1, 2)
    tier.store(new)
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts([new])
    again.end()


def test_what_was_queued_before_a_reset_does_not_survive_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    index = tier.storage._index
    assert index is not None
    gate = Event()
    index._writer.submit(gate.wait)
    tier.store(*ALL)
    tier.storage.void()
    gate.set()
    tier.end()
    again = Tier(tmp_path)
    assert again.found == []
    again.end()


def test_a_reset_before_any_engine_came_counts(kept: Path) -> None:
    storage = DiskStorage(str(kept), SIZE_BYTES, keep=True)
    storage.void()
    storage.close()
    tier = Tier(kept)
    assert tier.found == []
    tier.end()


# files that others had their hands on


@pytest.mark.parametrize("size", [0, SIZE_BYTES - 1, SIZE_BYTES + 4096])
def test_blocks_that_are_not_as_they_were_left_are_void(kept: Path, size: int) -> None:
    os.truncate(kept / BLOCKS_NAME, size)
    tier = Tier(kept)
    assert tier.found == []
    tier.end()


@pytest.mark.parametrize("name", [BLOCKS_NAME, INDEX_NAME])
def test_a_file_that_is_gone_makes_the_other_void(kept: Path, name: str) -> None:
    (kept / name).unlink()
    tier = Tier(kept)
    assert tier.found == []
    tier.store(*ALL)
    assert tier.lost_of(*USED) == []
    tier.end()


def test_files_that_are_deleted_meanwhile_serve_to_the_end(kept: Path) -> None:
    tier = Tier(kept)
    for path in kept.iterdir():
        path.unlink()
    tier.store(run(chain("c", 1), 15))
    assert tier.lost_of(*USED, 15) == []
    tier.end()
    again = Tier(kept)
    assert again.found == []
    again.end()


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"x" * (HEADER_BYTES + 5000), struct.pack("<8sQI", b"KVEVIDX\n", 1, 9)]
)
def test_an_index_that_is_none_is_begun_anew(kept: Path, content: bytes) -> None:
    (kept / INDEX_NAME).write_bytes(content)
    tier = Tier(kept)
    assert tier.found == []
    tier.store(*ALL)
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts(ALL)
    again.end()


def test_an_entry_that_is_torn_costs_its_block_and_what_is_behind_it(kept: Path) -> None:
    size = entry_bytes(LAYOUT)
    with (kept / INDEX_NAME).open("r+b") as file:
        file.seek(HEADER_BYTES + 5 * size + 40)  # block 2 of the trunk
        file.write(b"torn")
    tier = Tier(kept)
    expected = [run(TRUNK.meta.part(0, 2), 3, 4, inner=TRUNK.inner), BRANCH, LOOSE]
    assert facts(tier.found) == facts(expected)
    tier.end()


def test_an_index_that_has_lost_its_end_is_read_as_far_as_it_goes(kept: Path) -> None:
    os.truncate(kept / INDEX_NAME, HEADER_BYTES + 12 * entry_bytes(LAYOUT))
    tier = Tier(kept)
    assert facts(tier.found) == facts([TRUNK])
    tier.store(run(chain("c", 1), 30))
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts([TRUNK, run(chain("c", 1), 30)])
    again.end()


@pytest.mark.parametrize(
    "change",
    [{"cut": (1 << 40, SECTORS)}, {"cut": (-1, SECTORS)}, {"cut": ()}, {"hash_tokens": 0}, {"groups": ()}],
    ids=["too many slots", "fewer than none", "no cut", "no hash unit", "no groups"],
)
def test_a_header_is_believed_no_more_than_its_file_holds(kept: Path, change: dict[str, object]) -> None:
    layout = msgspec.structs.replace(LAYOUT, **{"cut": (SLOTS, SECTORS), **change})
    body = msgspec.msgpack.encode(Header(7, entry_bytes(LAYOUT), layout))
    head = struct.pack("<8sQI", MAGIC, xxh3_64_intdigest(body), len(body))
    with (kept / INDEX_NAME).open("r+b") as file:
        file.write(head + body)
    tier = Tier(kept)
    assert tier.found == []
    tier.store(*ALL)
    assert tier.lost_of(*USED) == []
    tier.end()


# an index older than the bytes


def test_bytes_that_were_overwritten_are_never_given_out_for_what_was_there(kept: Path) -> None:
    """The machine died between a store into a slot and the end of its old entry."""
    tier, index = Tier(kept), (kept / INDEX_NAME).read_bytes()
    tier.arena.store(tier.engine.memory, ints(40), ints(5))
    tier.end()
    (kept / INDEX_NAME).write_bytes(index)
    again = Tier(kept)
    assert facts(again.found) == facts(ALL)
    assert again.lost_of(*USED) == [5]
    again.end()
    third = Tier(kept)  # what was lost is not announced a second time
    assert 5 not in [slot for stored in third.found for slot in stored.slots]
    assert third.lost_of(3, 4, 8, 20, 21, 30, 31) == []
    third.end()


def test_a_block_whose_slot_is_taken_is_not_found_nor_what_is_behind_it(kept: Path) -> None:
    """Whether the copy into the slot goes well or not, and whatever it is of."""
    tier = Tier(kept)
    tier.arena.store(tier.engine.memory, ints(40), ints(4))
    with instead(tier.storage, "/dev/full"), pytest.raises(OSError, match="No space"):
        tier.arena.store(tier.engine.memory, ints(41), ints(30))
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts([run(TRUNK.meta.part(0, 1), 3), run(LOOSE.meta.part(1, 2), 31)])
    again.end()


def test_a_slot_that_is_taken_before_its_entry_is_written_does_not_lend_it_its_bytes(tmp_path: Path) -> None:
    tier, gate = Tier(tmp_path), Event()
    assert tier.storage._index is not None
    tier.storage._index._writer.submit(gate.wait)
    tier.store(*ALL)
    tier.arena.store(tier.engine.memory, ints(40), ints(5))
    gate.set()
    tier.end()
    again = Tier(tmp_path)
    found = [slot for stored in again.found for slot in stored.slots]
    assert set(USED) - set(found) == {5, 9}
    assert again.lost_of(*found) == []
    again.end()


def test_a_block_that_moved_is_found_where_it_was_stored_last(kept: Path) -> None:
    tier = Tier(kept)
    moved = run(TRUNK.meta, 0, 1, 2, 7)
    tier.store(run(TRUNK.meta, 10, 11, 12, 13))
    tier.store(moved)
    tier.end()
    again = Tier(kept)
    assert facts(again.found) == facts([moved, BRANCH, LOOSE])
    again.end()


# bounds


def test_a_block_whose_entry_has_no_room_is_served_and_not_kept(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    long = run(chain("l", 2, extra_keys=[None, ("k" * 5000,)]), 1, 2)
    tier.store(long)
    assert tier.lost_of(1, 2) == []
    tier.end()
    assert tier.storage.stats()["disk_blocks_not_kept"] == 1
    again = Tier(tmp_path)
    assert facts(again.found) == facts([run(long.meta.part(0, 1), 1)])
    again.end()


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_index, "MAX_QUEUED_BLOCKS", 5)
    tier = Tier(tmp_path)
    gate = Event()
    assert tier.storage._index is not None
    tier.storage._index._writer.submit(gate.wait)
    tier.store(TRUNK, BRANCH)
    gate.set()
    tier.storage._index._settle()
    assert tier.storage.stats()["disk_blocks_not_kept"] == 3
    tier.store(LOOSE)
    tier.end()
    again = Tier(tmp_path)
    assert facts(again.found) == facts([TRUNK, LOOSE])
    again.end()


def test_an_index_that_cannot_be_written_costs_only_the_next_start(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    index = tier.storage._index
    assert index is not None
    kept, full = os.dup(index._file.fd), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, index._file.fd)
    tier.store(*ALL)
    index._settle()
    os.dup2(kept, index._file.fd)
    os.close(full)
    os.close(kept)
    assert tier.storage.stats()["disk_errors_enospc"] == 6  # one a run of consecutive slots
    assert tier.lost_of(*USED) == []
    tier.end()
    again = Tier(tmp_path)
    assert again.found == []
    again.end()


def test_a_failed_store_of_kept_blocks_is_not_found(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    with instead(tier.storage, "/dev/full"), pytest.raises(OSError, match="No space"):
        tier.arena.store(tier.engine.memory, ints(3), ints(3))
    tier.end()
    again = Tier(tmp_path)
    assert again.found == []
    again.end()


# several ranks


def test_a_block_is_found_with_the_bytes_of_every_rank(tmp_path: Path) -> None:
    layout = msgspec.structs.replace(LAYOUT, sizes=((8192, 8192), (40, 40)))
    engines, every = (Engine(SECTORS, SLOTS), Engine(80, SLOTS)), ints(*TRUNK.slots)
    for life in range(2):
        storage = DiskStorage(str(tmp_path), 2 * SIZE_BYTES, keep=True)
        arenas = storage.arenas(SLOTS, [SECTORS, 80])
        found = storage.recover(layout)
        for arena, engine in zip(arenas, engines, strict=True):
            if life == 0:
                arena.store(engine.memory, every, every)
            else:
                arena.load(engine.memory, ints(20, 21, 22, 23), every)
                assert [engine[place] for place in range(20, 24)] == [engine[slot] for slot in every]
        storage.keep([TRUNK])
        storage.close()
        assert facts(found) == (facts([TRUNK]) if life else {})


# a crash

CRASHING = textwrap.dedent("""
    import itertools, os, random, sys
    sys.path.insert(0, sys.argv[2])
    from pathlib import Path
    from test_disk_index import *
    tier, rng = Tier(Path(sys.argv[1])), random.Random(1)
    print("ready", flush=True)
    for number in itertools.count():
        name, slots = f"crash {number}", rng.sample(range(SLOTS), 4)
        meta = chain(name, 4)
        for place, slot in enumerate(slots):
            tier.engine[slot] = content_of(meta.hash_at(place))
        tier.store(run(meta, *slots))
        if number == 40: print("going", flush=True)
""")


def content_of(block_hash: bytes) -> bytes:
    return block_hash * (SECTORS // len(block_hash))


def test_after_a_kill_every_block_that_is_found_has_its_own_bytes_or_none(tmp_path: Path) -> None:
    for _ in range(2):
        words = [sys.executable, "-c", CRASHING, str(tmp_path), str(Path(__file__).parent)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(2)] == ["ready", "going"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tier = Tier(tmp_path)
        assert tier.found
        good = sum(
            gives_its_own_bytes(tier, found, place) for found in tier.found for place in range(len(found.slots))
        )
        assert good
        tier.end()


def gives_its_own_bytes(tier: Tier, found: StoreRun, place: int) -> bool:
    try:
        tier.arena.load(tier.engine.memory, ints(0), ints(found.slots[place]))
    except BlocksLost:
        return False
    assert tier.engine[0] == content_of(found.meta.hash_at(place))
    return True


def test_a_file_system_without_room_for_an_index_has_none(tmp_path: Path, monkeypatch) -> None:
    def no_room(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    tier = Tier(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert tier.storage.recover(msgspec.structs.replace(LAYOUT, namespace="other")) == []
    tier.store(*ALL)
    assert tier.storage.stats()["disk_index"] == 0
    assert tier.lost_of(*USED) == []
    tier.end()
