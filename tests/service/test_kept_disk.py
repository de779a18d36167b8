"""A sidecar process whose disk tier is kept: its blocks are there after a stop and a kill, never as another."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_engine_plane import chain, fold

from kvevents_service.core.residency import Residency, key64
from kvevents_service.transfer.disk import BLOCKS_NAME, INDEX_NAME
from kvevents_service.transfer.disk_index import read_index

LONG_S = 30
BLOCK_BYTES, LENGTH, SLOTS = 128, 8, 32
"""Of a block; blocks of a chain; slots of the tier."""
LOCAL = ("--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--admin", "off", "--log-level", "warning")
SETTINGS = {"KVEVENTS_DISK_PAGE_CACHE": "true", "KVEVENTS_HEARTBEAT_S": "0.1"}
ENDS = [signal.SIGTERM, signal.SIGKILL]


HELD = """
import sys, time
from pathlib import Path
from kvevents_service.cli import main
from kvevents_service.transfer.disk_index import DiskIndex
put, hold = DiskIndex._put, Path(sys.argv.pop(1))
def late(self, *entries):
    while hold.exists():
        time.sleep(0.01)
    put(self, *entries)
DiskIndex._put = late
main()
"""
"""A sidecar that writes no entries while the file `hold` is there."""


class Life:
    """One process of the sidecar."""

    def __init__(
        self, directory: Path, *options: str, name: str = "run", slots: int = SLOTS, hold: Path | None = None
    ) -> None:
        program = ("-m", "kvevents_service") if hold is None else ("-c", HELD, str(hold))
        words = (sys.executable, *program, "serve", *LOCAL, "--host-bytes", "0")
        disk = ("--disk-path", str(directory), "--disk-bytes", str(slots * BLOCK_BYTES), "--disk-keep")
        socket = ("--engine-socket", str(directory / name / "engine.sock"))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **SETTINGS}
        self.process = subprocess.Popen(
            [*words, *disk, *socket, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    @property
    def ready(self) -> SimpleNamespace:
        assert self.process.stdout is not None
        return SimpleNamespace(**json.loads(self.process.stdout.readline()))

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Exit code and stderr."""
        if number is not None:
            self.process.send_signal(number)
        _, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, err


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    made: list[Life] = []

    def start(*options: str, **settings: object) -> Life:
        made.append(Life(tmp_path, *options, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        if one.process.returncode is None:
            one.process.kill()
            one.process.communicate(timeout=LONG_S)


def value(seed: int, block: int) -> int:
    return (seed * LENGTH + block) % 251


def store(mini, *seeds: int) -> None:
    """Chains whose blocks have bytes of their own."""
    for seed in seeds:
        for block in range(LENGTH):
            mini.fill(block, value(seed, block))
        assert mini.store(chain(seed, LENGTH), list(range(LENGTH))).steps[0].stored == LENGTH


def loads(mini, seed: int) -> int:
    """How many blocks of a chain come back; those that do are what was stored."""
    places = list(range(20, 20 + LENGTH))
    for place in places:
        mini.fill(place, 252)
    count = mini.load(chain(seed, LENGTH), places)
    assert all(mini.holds(20 + block, value(seed, block)) for block in range(count))
    return count


def names(*seeds: int) -> set[int]:
    return {key64(name) for seed in seeds for name in chain(seed, LENGTH).hashes}


def check(ready: SimpleNamespace, mini, *media: str) -> Residency:
    """The oracle, for a router that comes now."""
    inspected = mini.client.inspect(residents=True)
    folded = asyncio.run(fold(SimpleNamespace(ready=ready), max(inspected.next_seq, 1)))  # or the first heartbeat
    folded.check()
    assert {shelf.medium for shelf in inspected.residents} == set(media or ("STORAGE",))
    for shelf in inspected.residents:
        packed = shelf.block_hashes
        resident = {key64(packed[i : i + 8]) for i in range(0, len(packed), 8)}
        assert folded.hashes(shelf.medium, shelf.group) == resident
    return folded


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kept(directory: Path) -> int:
    """Blocks that a start would find now."""
    with (directory / INDEX_NAME).open("rb") as file:
        found = read_index(file.fileno(), "STORAGE")
    return 0 if found is None else len(found.sums)


@pytest.fixture
def filled(live, engine, tmp_path: Path) -> Path:
    """A directory that a sidecar left in good order, with chains 1, 2 and 3."""
    life = live()
    assert life.ready.ready
    store(engine(), 1, 2, 3)
    assert life.end(signal.SIGTERM) == (0, "")
    return tmp_path


# what is there again


@pytest.mark.parametrize("end", ENDS)
def test_blocks_are_announced_and_loaded_in_the_next_life(
    live, engine, tmp_path: Path, end: signal.Signals
) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    life = live(*state)
    assert life.ready.ready
    store(engine(), 1, 2, 3)
    until(lambda: kept(tmp_path) == 3 * LENGTH)
    life.end(end)
    ready = live(*state).ready
    mini = engine()
    folded = check(ready, mini)
    assert folded.hashes("STORAGE", 0) == names(1, 2, 3)
    assert (folded.stored, folded.removed) == (3 * LENGTH, 0)
    stats = mini.client.inspect().stats
    assert (stats["disk_blocks_recovered"], stats["blocks_stored"]) == (3 * LENGTH, 3 * LENGTH)
    assert [loads(mini, seed) for seed in (1, 2, 3, 4)] == [LENGTH] * 3 + [0]
    store(mini, 4, 5)
    assert mini.client.inspect().stats["blocks_removed"] == LENGTH
    check(ready, mini)


def test_nothing_is_announced_before_an_engine_of_the_layout_is_there(live, engine, filled: Path) -> None:
    ready = live().ready
    assert len(asyncio.run(fold(SimpleNamespace(ready=ready), 2))) == 0
    assert len(check(ready, engine())) == 3 * LENGTH


def test_behind_host_memory_too_what_is_on_the_disk_is_promoted_in_the_next_life(
    live, engine, tmp_path: Path
) -> None:
    both = ("--host-bytes", str(64 * BLOCK_BYTES))
    life = live(*both, slots=256)
    assert life.ready.ready
    mini = engine()
    store(mini, *range(16))
    until(lambda: not mini.client.inspect().stats["transfers"])
    behind = mini.client.inspect().stats["disk_blocks_resident"]
    assert behind >= LENGTH  # how many of those that left host memory were saved is a matter of time
    assert life.end(signal.SIGTERM) == (0, "")
    ready = live(*both, slots=256).ready
    mini = engine()
    folded = check(ready, mini, "CPU", "STORAGE")
    assert (len(folded.hashes("STORAGE", 0)), len(folded.hashes("CPU", 0))) == (behind, 0)
    assert sum(loads(mini, seed) for seed in range(16)) == behind
    assert mini.client.inspect().stats["blocks_promoted"] == behind
    check(ready, mini, "CPU", "STORAGE")


# what is void


def test_another_layout_makes_it_void_for_good_and_the_log_says_it(live, engine, filled: Path) -> None:
    life = live()
    ready = life.ready
    mini = engine(namespace="other")
    assert len(check(ready, mini)) == 0
    assert mini.client.inspect().stats["disk_layouts_void"] == 1
    code, err = life.end(signal.SIGTERM)
    assert (code, err.count("disk_path: what was kept is of another layout and is void (1 so far)")) == (0, 1)
    ready = live().ready
    assert len(check(ready, engine())) == 0


def test_a_reset_is_for_good_even_if_the_process_is_killed_at_once(live, engine, filled: Path) -> None:
    life = live()
    assert life.ready.ready
    assert engine().client.reset() == 3 * LENGTH
    life.end(signal.SIGKILL)
    ready = live().ready
    assert len(check(ready, engine())) == 0


def test_a_second_sidecar_on_the_same_directory_is_refused(live, filled: Path) -> None:
    assert live().ready.ready
    code, err = live(name="second").end()
    expected = f"{filled / BLOCKS_NAME} not to be in use by another sidecar"
    assert (code, err) == (2, f"kvevents serve: disk_path: expected {expected}\n")


def test_a_block_that_was_changed_meanwhile_is_a_miss_and_removed_with_what_is_behind_it(
    live, engine, filled: Path
) -> None:
    content = (filled / BLOCKS_NAME).read_bytes()
    layers = (bytes([value(2, 3) ^ layer]) * (BLOCK_BYTES // 2) for layer in range(2))
    place = content.index(b"".join(layers))
    with (filled / BLOCKS_NAME).open("r+b") as file:
        file.seek(place + 5)
        file.write(b"\0")
    life = live()
    ready, mini = life.ready, engine()
    assert len(check(ready, mini)) == 3 * LENGTH
    assert loads(mini, 2) == 0
    stats = mini.client.inspect().stats
    assert (stats["blocks_lost"], stats["blocks_removed"], stats["disk_errors_checksum"]) == (1, LENGTH - 3, 1)
    folded = check(ready, mini)
    assert folded.removed == LENGTH - 3
    assert folded.hashes("STORAGE", 0) == names(1, 3) | {key64(name) for name in chain(2, 3).hashes}
    assert [loads(mini, seed) for seed in (1, 2, 3)] == [LENGTH, 3, LENGTH]
    code, err = life.end(signal.SIGTERM)
    assert (code, err.count("disk_path: an error (checksum) (1 so far)")) == (0, 1)
    ready = live().ready
    assert len(check(ready, engine())) == 3 * LENGTH - (LENGTH - 3)  # and not announced a second time


# a kill while slots are evicted and written anew


def test_after_a_kill_before_any_entry_was_written_old_names_do_not_get_new_bytes(
    live, engine, tmp_path: Path
) -> None:
    """The worst that a crash can leave: every slot was evicted and rewritten, and the index knows nothing of it."""
    hold = tmp_path / "hold"
    life = live(hold=hold)
    assert life.ready.ready
    mini = engine()
    store(mini, 1, 2, 3, 4)
    until(lambda: kept(tmp_path) == SLOTS)
    hold.touch()
    store(mini, 5, 6, 7, 8)
    life.end(signal.SIGKILL)
    ready, mini = live().ready, engine()
    assert check(ready, mini).hashes("STORAGE", 0) == names(1, 2, 3, 4)
    assert [loads(mini, seed) for seed in range(1, 9)] == [0] * 8
    stats = mini.client.inspect().stats
    assert (stats["blocks_lost"], stats["blocks_removed"], stats["disk_errors_checksum"]) == (SLOTS,) * 3
    folded = check(ready, mini)
    assert (len(folded), folded.removed) == (0, SLOTS)


def test_after_a_kill_among_evictions_no_name_has_the_bytes_of_another(live, engine, tmp_path: Path) -> None:
    good = 0
    for number in range(3):
        life = live()
        assert life.ready.ready
        mini, first = engine(), 8 * number
        good += sum(loads(mini, seed) for seed in range(first))
        store(mini, *range(first, first + 2))
        flood(mini, range(first, first + 8), ended=number)
        life.end(signal.SIGKILL)
    ready, mini = live().ready, engine()
    announced = len(check(ready, mini))
    good += (came := sum(loads(mini, seed) for seed in range(3 * 8)))
    lost = mini.client.inspect().stats["blocks_lost"]
    check(ready, mini)
    assert good
    assert announced >= came + lost


def flood(mini, seeds: range, ended: int) -> None:
    """Offer more chains than the tier has room for, and return while they are copied, `ended` of them done."""
    for place, seed in enumerate(seeds):
        for block in range(LENGTH):
            mini.fill(place * LENGTH + block, value(seed, block))
    for place, seed in enumerate(seeds):
        offer = chain(seed, LENGTH).offer(range(place * LENGTH, (place + 1) * LENGTH))
        assert mini.client.step([offer]) is not None
    done = 0
    while done < ended:
        done += len(mini.client.poll(1.0).steps)
