"""A rank's client keeps its memory registered with whatever sidecar is there, and knows when it is free."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_client import LONG_S, Sidecar, chain, store, timed, until_step

from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.wire.control import PROTOCOL_VERSION, GroupSpec, Mark, Memory, Welcome
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message

QUICK = Timeouts(lookup_s=5.0, send_s=0.5, redial_s=0.02)
BLOCKS, BLOCK_BYTES = 64, 64


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path)
    yield made
    made.end()


@pytest.fixture
def rank(sidecar: Sidecar) -> Iterator[RankClient]:
    memory = SharedMemory.create(BLOCKS * BLOCK_BYTES)
    regions = uniform_layers(1, BLOCKS, BLOCK_BYTES)
    made = RankClient(
        sidecar.path, RankLayout("run-1", 0, 1, [Memory(len(memory.map))], regions, [memory.fd]), QUICK
    )
    yield made
    made.close()
    os.close(memory.fd)


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[OffloadClient]:
    made = OffloadClient(sidecar.path, EngineLayout("run-1", "tiny", [GroupSpec(0, "full_attention", 4)]), QUICK)
    yield made
    made.close()


def registered(client: RankClient | OffloadClient, times: int) -> None:
    deadline = time.monotonic() + LONG_S
    while client.counters["registrations"] < times:
        assert time.monotonic() < deadline, client
        time.sleep(0.005)


def test_engine_and_rank_find_a_new_sidecar_without_a_call_of_the_rank(
    sidecar: Sidecar, rank: RankClient, client: OffloadClient
) -> None:
    for times in (1, 2):
        sidecar.start()
        registered(rank, times)
        client.poll()  # the engine's step loop sees the EOF
        registered(client, times)
        assert until_step(client, store(client, times)) == 4
        assert client.lookup("r", chain(times).packed).blocks == 4
        sidecar.end(signal.SIGKILL)
        client.poll(LONG_S)
    assert rank.boot_id is None or not rank.connected


def test_closing_says_that_the_sidecar_has_let_go(sidecar: Sidecar, rank: RankClient) -> None:
    sidecar.start()
    assert rank.wait_connected(LONG_S)
    assert rank.close(LONG_S)
    assert not rank.connected
    assert not rank._keeper.is_alive()


def test_a_sidecar_that_does_not_let_go_in_time_is_not_called_gone(sidecar: Sidecar, rank: RankClient) -> None:
    sidecar.start()
    assert rank.wait_connected(LONG_S)
    sidecar.send(signal.SIGSTOP)
    assert not rank.close(0.05)
    sidecar.send(signal.SIGCONT)
    assert rank.close(LONG_S)


def test_without_a_sidecar_it_waits_and_closes_at_once(rank: RankClient) -> None:
    assert not rank.connected
    assert rank.close()


def test_nobody_waits_at_a_start_without_a_sidecar(rank: RankClient) -> None:
    assert timed(rank.wait_dialled, LONG_S) < LONG_S / 2
    assert not rank.wait_dialled(LONG_S)
    assert "no sidecar at" in rank.last_error


def test_a_start_waits_for_a_sidecar_that_is_slow_and_for_no_other(sidecar: Sidecar, rank: RankClient) -> None:
    sidecar.start()
    assert rank.wait_connected(LONG_S)
    assert rank.close(LONG_S)
    sidecar.send(signal.SIGSTOP)
    second = RankClient(sidecar.path, rank.layout)
    assert not second.wait_dialled(0.1)
    sidecar.send(signal.SIGCONT)
    assert second.wait_dialled(LONG_S)
    third = RankClient(sidecar.path, rank.layout, QUICK)
    assert not third.wait_dialled(LONG_S)
    assert "rank_taken" in third.last_error
    assert second.close(LONG_S)
    assert third.close(LONG_S)


def test_a_refusal_is_told(sidecar: Sidecar, rank: RankClient) -> None:
    sidecar.start()
    assert rank.wait_connected(LONG_S)
    second = RankClient(sidecar.path, rank.layout, QUICK)
    deadline = time.monotonic() + LONG_S
    while "rank_taken" not in second.last_error:
        assert time.monotonic() < deadline, second
        time.sleep(0.005)
    assert rank.close(LONG_S)
    assert second.wait_connected(LONG_S)
    assert second.close(LONG_S)


def test_a_sidecar_that_answers_nonsense_is_dialled_again(tmp_path: Path, rank: RankClient) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(rank.socket_path)
        listener.listen()
        listener.settimeout(LONG_S)
        for _ in range(2):
            peer, _ = listener.accept()
            peer.sendall(b"\x01\0\0\0\xc1")
            peer.close()
    os.unlink(rank.socket_path)


def test_a_mark_that_was_not_read_is_told_again_without_another_step(tmp_path: Path) -> None:
    """An engine that has gone idle says no further marks, and copies may wait for this one."""
    welcome = encode_message(Welcome(PROTOCOL_VERSION, "boot", 1, 0, 0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "engine.sock"))
        listener.listen()
        listener.settimeout(LONG_S)
        client = RankClient(str(tmp_path / "engine.sock"), RankLayout("run-1", 0, 1, [], []), QUICK)
        peer, _ = listener.accept()
        peer.recv(1 << 16)
        peer.sendall(welcome)
        assert client.wait_connected(LONG_S)
        last = next(number for number in range(1 << 20) if not client.mark(number))
        reader, seen = FrameReader(), -1
        peer.settimeout(LONG_S)
        while seen < last:
            marks = [decode_client(body) for body in reader.feed(peer.recv(1 << 20))]
            seen = max([seen, *(mark.number for mark in marks if isinstance(mark, Mark))])
        peer.close()
        assert client.close(LONG_S)
