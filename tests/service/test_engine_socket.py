"""The engine socket against other users of the machine: who may own the way to it, and who may connect."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvevents_service.engine.connection import _check_peer
from kvevents_service.errors import ConfigError, ControlError, SidecarGone
from kvevents_service.service.engines import MAX_SESSIONS, listen
from kvevents_service.service.handshake import check_peer
from kvevents_service.sockets import is_stale
from kvevents_service.wire.control import PROTOCOL_VERSION, Error, Hello, Welcome
from kvevents_service.wire.framing import FrameReader, decode_sidecar, encode_message

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
STRANGER = 65_534
CONNECT = """
import os, socket, sys
os.setgid({uid}), os.setuid({uid})
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.recv(1)
os._exit(0)
"""


def test_a_link_in_the_sockets_place_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(target))
    link = tmp_path / "engine.sock"
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="no other file at"):
        listen(str(link))
    assert link.is_symlink()
    assert target.is_socket()


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "engine.sock"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no other file at"):
        is_stale(str(link), "pub")
    with pytest.raises(ConfigError):
        listen(str(link))


@AS_ROOT
def test_a_directory_behind_a_strangers_link_is_refused(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    listen(str(link / "mine.sock")).close()
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="a directory that only this user can write"):
        listen(str(link / "engine.sock"))


@AS_ROOT
def test_a_strangers_directory_is_refused(tmp_path: Path) -> None:
    """As one that was put into /tmp before us."""
    taken = tmp_path / "kvevents-0"
    taken.mkdir(mode=0o700)
    os.chown(taken, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="a directory that only this user can write"):
        listen(str(taken / "engine.sock"))


@AS_ROOT
def test_a_stranger_who_gets_as_far_as_the_socket_is_turned_away(tmp_path: Path) -> None:
    """Both ends look at the other's user: an engine hands its memory to nobody else, either."""
    everybodys = Path(tempfile.gettempdir())
    for above in (tmp_path, *tmp_path.parents):
        if above.is_relative_to(everybodys) and above != everybodys:
            above.chmod(0o711)
    path = tmp_path / "engine.sock"
    with listen(str(path)) as listening:
        path.chmod(0o777)
        listening.setblocking(True)
        process = subprocess.Popen([sys.executable, "-c", CONNECT.format(uid=STRANGER), str(path)])
        try:
            peer, _ = listening.accept()
            with peer:
                with pytest.raises(ControlError) as refused:
                    check_peer(peer)
                assert refused.value.code == "not_allowed"
                with pytest.raises(SidecarGone, match="belongs to another user"):
                    _check_peer(peer, str(path))
        finally:
            assert process.wait(30) == 0


async def greeted(path: str, held: list[socket.socket]) -> object:
    """The answer to one more observer, which stays connected."""
    loop, sock = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    held.append(sock)
    await loop.sock_connect(sock, path)
    await loop.sock_sendall(sock, encode_message(Hello(PROTOCOL_VERSION, "observer", "many")))
    return decode_sidecar(next(iter(FrameReader().feed(await loop.sock_recv(sock, 65536)))))


async def test_sessions_are_counted_and_there_is_an_end_of_them(run) -> None:
    held: list[socket.socket] = []
    try:
        async with run() as service:
            for _ in range(MAX_SESSIONS):
                assert isinstance(await greeted(service.ready.engine_socket, held), Welcome)
            answer = await greeted(service.ready.engine_socket, held)
            assert isinstance(answer, Error)
            assert answer.code == "too_many_sessions"
    finally:
        for sock in held:
            sock.close()


def test_our_own_user_is_let_in(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_peer(ours)
        _check_peer(theirs, "engine.sock")
