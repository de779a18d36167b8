"""The name board between a running sidecar and its engines."""

import asyncio
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path

import pytest
from conftest import LAYER_BYTES, LAYERS

from kvevents_service.engine.board import attach
from kvevents_service.engine.connection import dial
from kvevents_service.errors import SidecarGone
from kvevents_service.service.shared_board import SharedBoard
from kvevents_service.testing import make_chain
from kvevents_service.wire.control import PROTOCOL_VERSION, Hello, Welcome
from kvevents_service.wire.framing import encode_message
from kvevents_service.wire.name_board import BOARD_BYTES

SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory(size_bytes: int, seals: int = SEALED) -> int:
    fd = os.memfd_create("board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_an_engine_sees_what_is_stored_evicted_and_reset(run, engine) -> None:
    def live() -> None:
        mini = engine()
        sees = mini.client.may_have
        first, second = make_chain(range(8), 4), make_chain(range(100, 116), 4)
        assert not any(map(sees, first.hashes))
        mini.store(first, [0, 1])
        assert all(map(sees, first.hashes))
        mini.store(second, [2, 3, 4, 5])
        assert all(map(sees, second.hashes))
        assert not any(map(sees, first.hashes)), "they left to make room"
        assert mini.load(second, [6, 7, 8, 9]) == 4
        mini.client.reset(5.0)
        assert not any(map(sees, second.hashes))

    async with run(host_bytes=4 * LAYERS * LAYER_BYTES):
        await asyncio.to_thread(live)


def asks_and_loads(mini) -> None:
    """It knows of no board."""
    chain = make_chain(range(8), 4)
    assert all(map(mini.client.may_have, chain.hashes))
    mini.store(chain, [0, 1])
    assert mini.load(chain, [4, 5]) == 2


async def test_without_a_board_an_engine_may_ask_for_everything(
    run, engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedBoard, "_make", lambda _: None)

    def live() -> None:
        asks_and_loads(engine())

    async with run():
        await asyncio.to_thread(live)


async def test_a_board_that_cannot_be_sent_is_not_missed(run, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(109, "Too many references")

    def live() -> None:
        asks_and_loads(engine())

    async with run():
        monkeypatch.setattr("kvevents_service.service.engines.socket.send_fds", fail)
        await asyncio.to_thread(live)


async def test_engines_of_other_layouts_one_after_the_other_see_their_own(run, engine) -> None:
    def live() -> None:
        first, chain = engine(), make_chain(range(8), 4)
        first.store(chain, [0, 1])
        first.client.close(5.0)
        second = engine(namespace="another")
        assert not any(map(second.client.may_have, chain.hashes))
        second.store(chain, [0, 1])
        assert all(map(second.client.may_have, chain.hashes))

    async with run():
        await asyncio.to_thread(live)


def test_nobody_else_can_write_it() -> None:
    shared = SharedBoard()
    assert shared.fd is not None
    with pytest.raises(OSError):
        mmap.mmap(shared.fd, BOARD_BYTES)
    with pytest.raises(OSError):
        os.ftruncate(shared.fd, 1)
    with pytest.raises(OSError):
        os.write(shared.fd, b"x")
    assert shared.board is not None
    shared.board.add([bytes(32)])
    seen = attach([shared.fd], shared.size_bytes)
    assert seen is not None
    assert seen.may_have(bytes(32))
    with pytest.raises(TypeError):
        seen.add([bytes(32)])
    shared.close()


def test_without_memory_to_share_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    shared = SharedBoard()
    assert (shared.fd, shared.board, shared.size_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    ("size_bytes", "said", "seals"),
    [(4096, 4096, 0), (4096, 8192, SEALED), (4096, 0, SEALED), (4096, -1, SEALED), (12288, 12288, SEALED)],
    ids=["not sealed", "smaller than said", "of nothing", "negative", "odd"],
)
def test_a_board_that_cannot_be_trusted_is_none(size_bytes: int, said: int, seals: int) -> None:
    fd = memory(size_bytes, seals)
    assert attach([fd], said) is None
    os.close(fd)


def test_two_descriptors_or_what_is_no_memory_are_none(tmp_path: Path) -> None:
    fd, file = memory(4096), os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4096)
    assert attach([fd, fd], 4096) is None
    assert attach([file], 4096) is None
    assert attach([], 4096) is None
    os.close(fd)
    os.close(file)


WELCOME = bytes(encode_message(Welcome(1, "boot", 1, 2, 3, 4096)))


@pytest.mark.parametrize(
    ("frame", "welcome"), [(WELCOME, True), (b"\4\0\0\0junk", False)], ids=["well", "not well"]
)
def test_no_descriptor_is_left_of_a_welcome(frame: bytes, welcome: bool, tmp_path: Path) -> None:
    path, fd = str(tmp_path / "engine.sock"), memory(4096)
    hello = Hello(PROTOCOL_VERSION, "observer", "o", "n", 32, [], [], [])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        before = open_files()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                socket.send_fds(peer, [frame], [fd])

        thread = threading.Thread(target=answer)
        thread.start()
        assert sees_a_board(path, hello) is welcome
        thread.join()
        assert open_files() == before
    os.close(fd)


def sees_a_board(path: str, hello: Hello) -> bool:
    try:
        found = dial(path, hello, [], 5.0)
    except SidecarGone:
        return False
    found.connection.close()
    return found.board is not None
