"""The client never stalls and never raises into the step loop, whatever the sidecar does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents_service.engine.client import NO_HIT, OffloadClient, PrefixHit, Timeouts
from kvevents_service.engine.courier import MAX_PARCELS
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import GroupSpec, Memory, Offer

BLOCKS, BLOCK_BYTES = 64, 64
QUICK = Timeouts(lookup_s=0.2, send_s=0.05, redial_s=0.02)
LONG_S = 20.0


class Sidecar:
    """`kvevents serve` as a process of its own, ended by its own pid."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "engine.sock")
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        endpoints = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
        words = ["serve", "--engine-socket", self.path, "--host-bytes", "65536", "--log-level", "warning"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvevents_service", *words, *endpoints], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert '"ready":true' in self.process.stdout.readline()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.send(number)
            self.send(signal.SIGCONT)
            self.process.wait(LONG_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path)
    yield made
    made.end()


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[OffloadClient]:
    memory = SharedMemory.create(BLOCKS * BLOCK_BYTES)
    layout = EngineLayout(
        "test",
        "tiny",
        [GroupSpec(0, "full_attention", 4)],
        [Memory(BLOCKS * BLOCK_BYTES)],
        uniform_layers(1, BLOCKS, BLOCK_BYTES),
        [memory.fd],
    )
    made = OffloadClient(sidecar.path, layout, QUICK)
    yield made
    made.close()
    os.close(memory.fd)


def chain(seed: int, blocks: int = 4) -> Chain:
    return make_chain([seed * 31 + i for i in range(blocks * 4)], 4)


def store(client: OffloadClient, seed: int) -> int:
    step_id = client.step([chain(seed).offer(range(4))])
    assert step_id is not None, client
    return step_id


def until_step(client: OffloadClient, step_id: int) -> int:
    """Wait for the end of one step; returns how many blocks it stored."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        for done in client.poll(0.2).steps:
            if done.step_id == step_id:
                return done.stored
    raise TimeoutError


def timed(call: object, *arguments: object) -> float:
    start = time.monotonic()
    call(*arguments)  # type: ignore[operator]
    return time.monotonic() - start


def test_without_a_sidecar_everything_says_no_at_once(client: OffloadClient) -> None:
    assert not client.connected
    assert client.step([chain(1).offer(range(4))]) is None
    assert client.lookup("r", chain(1).packed) == NO_HIT
    assert client.load("r", PrefixHit(1, 7), b"\0\0\0\0") is None
    assert client.poll() == ([], [])
    assert client.reset(0.05) is None
    assert client.inspect(wait_s=0.05) is None
    client.release(PrefixHit(1, 7))
    assert client.counters["steps_dropped"] == 1


def test_it_registers_when_the_sidecar_comes(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    assert client.wait_connected(LONG_S)
    assert until_step(client, store(client, 1)) == 4
    assert client.lookup("r", chain(1).packed).blocks == 4


def test_a_killed_sidecar_ends_what_was_outstanding_and_a_new_one_is_found(
    sidecar: Sidecar, client: OffloadClient
) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    first = client.boot_id
    sidecar.send(signal.SIGSTOP)
    step_id = store(client, 1)
    sidecar.end(signal.SIGKILL)
    assert until_step(client, step_id) == 0  # EOF is the fence: the blocks are the engine's again
    assert client.lookup("r", chain(1).packed) == NO_HIT
    sidecar.start()
    assert client.wait_connected(LONG_S)
    assert client.boot_id != first
    assert client.outstanding == 0
    assert until_step(client, store(client, 2)) == 4
    assert client.lookup("r", chain(2).packed).blocks == 4


def test_a_stopped_sidecar_costs_one_deadline_and_then_nothing(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    sidecar.send(signal.SIGSTOP)
    assert timed(client.lookup, "r", chain(1).packed) >= QUICK.lookup_s
    assert timed(lambda: [client.lookup("r", chain(1).packed) for _ in range(100)]) < QUICK.lookup_s
    assert client.counters["deadlines_missed"] == 1
    sidecar.send(signal.SIGCONT)
    deadline = time.monotonic() + LONG_S
    while client.counters["deadlines_missed"] and time.monotonic() < deadline:
        client.poll(0.1)
        if not client._line.link.suspect:  # type: ignore[union-attr]
            break
    assert until_step(client, store(client, 1)) == 4
    assert client.lookup("r", chain(1).packed).blocks == 4


def test_lookups_begun_before_the_sidecar_stopped_cost_one_deadline(
    sidecar: Sidecar, client: OffloadClient
) -> None:
    sidecar.start()
    assert client.wait_connected(LONG_S)
    until_step(client, store(client, 1))
    sidecar.send(signal.SIGSTOP)
    numbers = [client.begin_lookup(f"r{at}", chain(1).packed) for at in range(20)]
    start = time.monotonic()
    assert [client.end_lookup(number) for number in numbers if number is not None] == [NO_HIT] * 20
    assert time.monotonic() - start < 10 * QUICK.lookup_s
    sidecar.send(signal.SIGCONT)
    deadline = time.monotonic() + LONG_S
    while client.lookup("r", chain(1).packed).blocks != 4:
        assert time.monotonic() < deadline
    numbers = client.begin_lookups([("r", chain(1).packed), ("other", chain(9).packed)])
    assert [client.end_lookup(number).blocks for number in numbers] == [4, 0]
    number = client.begin_lookup("r", chain(1).packed)
    assert number is not None
    client.drop_lookup(number)


def test_a_sidecar_that_stops_reading_costs_a_bounded_wait_and_loses_only_steps(
    sidecar: Sidecar, client: OffloadClient
) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    sidecar.send(signal.SIGSTOP)
    big = Offer("r", 0, b"h" * 32, bytes(1 << 20), b"\0\0\0\0")
    slowest = max(timed(client.step, [big]) for _ in range(30))
    assert slowest < QUICK.send_s + 1.0
    assert client.counters["steps_dropped"] >= 10
    sidecar.send(signal.SIGCONT)
    deadline = time.monotonic() + LONG_S
    while client.outstanding and time.monotonic() < deadline:
        client.poll(0.1)
        client.release(PrefixHit(1, 1))  # any call pushes the rest of the begun frame out
    assert client.outstanding == 0


def test_what_cannot_be_encoded_is_counted_and_dropped(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    assert client.step([Offer("r", 1 << 70, b"", b"", b"")]) is None
    assert client.counters["client_errors"] == 1
    assert until_step(client, store(client, 1)) == 4


def test_closing_waits_for_the_sidecar_to_let_go(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    store(client, 1)
    post(client, 2)
    assert client.close(LONG_S)
    assert not any(thread.name == "kvevents-courier" for thread in threading.enumerate())
    assert client.step([chain(2).offer(range(4))]) is None


def post(client: OffloadClient, seed: int) -> int | None:
    return client.post_step([lambda: chain(seed).offer(range(4))])


def until_none_is_outstanding(client: OffloadClient) -> dict[int, int]:
    """Wait for all ends; returns how many blocks each step stored."""
    stored: dict[int, int] = {}
    deadline = time.monotonic() + LONG_S
    while client.outstanding:
        assert time.monotonic() < deadline
        stored.update((done.step_id, done.stored) for done in client.poll(0.05).steps)
    return stored


def test_what_is_posted_is_stored_and_found_like_what_is_sent(sidecar: Sidecar, client: OffloadClient) -> None:
    assert post(client, 1) is None
    sidecar.start()
    client.wait_connected(LONG_S)
    numbers = [post(client, seed) for seed in range(8)]
    assert until_none_is_outstanding(client) == dict.fromkeys(numbers, 4)
    prompts = [(f"r{seed}", chain(seed).hashes) for seed in (3, 9)]
    asked = client.begin_lookups(prompts, post=True)
    assert [client.end_lookup(number).blocks for number in asked] == [4, 0]
    dropped = client.begin_lookups(prompts[:1], post=True)
    client.drop_lookup(dropped[0])
    assert client.counters["client_errors"] == 0
    assert client.counters["steps_sent"] == 8
    assert client.counters["steps_dropped"] == 1


def test_nothing_that_was_posted_before_a_reset_is_stored_behind_it(
    sidecar: Sidecar, client: OffloadClient
) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    for attempt in range(5):
        numbers = [post(client, 8 * attempt + at) for at in range(8)]
        asked = client.begin_lookups([("r", chain(0).hashes)], post=True)
        assert client.reset(LONG_S) is not None
        inspected = client.inspect(residents=True)
        assert inspected is not None
        assert [each.block_hashes for each in inspected.residents] == [b""]
        assert set(until_none_is_outstanding(client)) == set(numbers)
        assert client.end_lookup(asked[0]) == NO_HIT
    gate = threading.Event()
    slow = client.post_step([lambda: gate.wait(LONG_S) and chain(90).offer(range(4))])
    behind = post(client, 91)
    assert client.reset(LONG_S) is not None
    gate.set()
    assert until_none_is_outstanding(client) == {slow: 0, behind: 0}


def test_what_was_posted_ends_when_its_sidecar_dies(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    sidecar.send(signal.SIGSTOP)
    numbers = [post(client, seed) for seed in range(8)]
    sidecar.end(signal.SIGKILL)
    assert until_none_is_outstanding(client) == dict.fromkeys(numbers, 0)


def test_posting_to_a_sidecar_that_stops_reading_waits_for_nothing(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    sidecar.send(signal.SIGSTOP)
    big = Offer("r", 0, b"h" * 32, bytes(1 << 20), b"\0\0\0\0")
    posted = [client.post_step([lambda: big]) for _ in range(2 * MAX_PARCELS)]
    assert None in posted, "so many are not kept"
    sidecar.send(signal.SIGCONT)
    assert set(until_none_is_outstanding(client)) == {number for number in posted if number is not None}
    assert until_step(client, store(client, 1)) == 4


def test_an_offer_that_cannot_be_made_ends_its_step_and_no_other(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    bad = client.post_step([lambda: Offer("r", 1 << 70, b"", b"", b"")])
    worse = client.post_step([lambda: chain(1).offer(range(-1, 1 << 40))])
    good = post(client, 1)
    assert until_none_is_outstanding(client) == {bad: 0, worse: 0, good: 4}
    assert client.counters["client_errors"] == 2


def test_an_idle_engine_finds_a_new_sidecar(sidecar: Sidecar, client: OffloadClient) -> None:
    sidecar.start()
    client.wait_connected(LONG_S)
    assert until_step(client, post(client, 1) or 0) == 4
    first = client.boot_id
    sidecar.end(signal.SIGKILL)
    sidecar.start()
    deadline = time.monotonic() + LONG_S
    while client.boot_id in (None, first):  # nobody polls
        assert time.monotonic() < deadline
        time.sleep(0.01)
