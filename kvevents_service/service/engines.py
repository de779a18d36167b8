"""The engine plane: a Unix domain socket (0600 in a 0700 directory) and the sessions on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from itertools import count
from pathlib import Path

import msgspec

from kvevents_service.errors import ConfigError, ControlError, WireError
from kvevents_service.service.handshake import Greeting, check_peer, read_greeting
from kvevents_service.service.rarely import is_told
from kvevents_service.service.session import EngineSession
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.sockets import is_stale
from kvevents_service.transfer.memory import SessionMemory, attach
from kvevents_service.wire.control import Error, Welcome
from kvevents_service.wire.framing import encode_message

log = logging.getLogger(__name__)

BACKLOG = 64
MAX_SESSIONS = 256
MAX_HANDSHAKES = 32
ACCEPT_RETRY_S = 0.1


def listen(path: str) -> socket.socket:
    """A listening socket at `path`. A stale socket is replaced; one that answers, or another file, is not.

    Raises ConfigError. Directories that are missing are made with mode 0700.
    """
    try:
        parent = Path(path).parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(parent)
        if is_stale(path, "engine_socket"):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError("engine_socket", f"a path that can be bound, not {path} ({error.strerror})") from error
    return sock


def _check_directory(directory: Path) -> None:
    """Nobody else may put a socket in our socket's place: engines would hand it their memory."""
    status = directory.stat()
    owned = {directory.lstat().st_uid, status.st_uid} <= {0, os.getuid()}  # a link's owner can lead it elsewhere
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if not owned or shared:
        raise ConfigError("engine_socket", f"a directory that only this user can write, not {directory}")


class EnginePlane:
    """Accepts engines, workers and observers until cancelled."""

    def __init__(self, sidecar: Sidecar, path: str) -> None:
        self.sidecar = sidecar
        self.path = path
        self.sessions: set[EngineSession] = set()
        self.refused = 0
        self._socket = listen(path)
        self._inode = os.stat(path).st_ino
        self._ids = count(1)
        self._places = asyncio.Semaphore(MAX_HANDSHAKES)

    def __repr__(self) -> str:
        return f"<EnginePlane {self.path} sessions={len(self.sessions)} refused={self.refused}>"

    async def run(self) -> None:
        """Accept until cancelled."""
        async with asyncio.TaskGroup() as handshakes:
            while True:
                await self._places.acquire()
                sock = await self._accept()
                handshakes.create_task(self._greet(sock)).add_done_callback(lambda _: self._places.release())

    async def _accept(self) -> socket.socket:
        """The next connection. Out of descriptors or memory is waited out: the engines that are here go on."""
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError as error:
                log.warning("no engine can be accepted now: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
            else:
                sock.setblocking(False)
                return sock

    async def _greet(self, sock: socket.socket) -> None:
        try:
            check_peer(sock)
            if len(self.sessions) >= MAX_SESSIONS:
                raise ControlError("too_many_sessions", "hello", f"at most {MAX_SESSIONS} sessions")
            await self._open(sock, await read_greeting(sock))
        except ControlError as error:
            self._turn_away(sock, error.code, error.field, error.expected)
        except WireError as error:
            self._turn_away(sock, "bad_message", error.field, error.expected)
        except TimeoutError:
            self._turn_away(sock, "too_slow", "hello", "a whole hello in time")
        except ConfigError as error:
            self._turn_away(sock, "bad_config", error.setting, error.expected)
        except OSError as error:
            log.info("an engine left during its hello: %s", error)
            sock.close()
        except Exception:  # the border of a handshake: a bug of ours must not end the other sessions
            log.exception("a hello failed")
            self._turn_away(sock, "internal", "hello", "the sidecar to have no bug here")

    async def _open(self, sock: socket.socket, greeting: Greeting) -> None:
        hello, memory = greeting.hello, await self._attach(greeting)
        session = EngineSession(next(self._ids), self.sidecar, memory, hello.role)
        try:
            welcome = self.sidecar.admit(session, hello)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: session, sock)
        except BaseException:
            session.connection_lost(None)
            await session.closed  # so that its place is free when the peer hears of it
            raise
        self.sessions.add(session)
        session.closed.add_done_callback(lambda _: self.sessions.discard(session))
        level = logging.DEBUG if hello.role == "observer" else logging.INFO
        log.log(level, "session %d: %s %r", session.session_id, hello.role, hello.engine_id[:64])
        self._welcome(sock, session, welcome)

    def _welcome(self, sock: socket.socket, session: EngineSession, welcome: Welcome) -> None:
        """Around the transport, which has sent nothing yet, and can send no descriptor."""
        board = self.sidecar.names.fd
        if not welcome.board_bytes or board is None:
            session.send(welcome)
            return
        frame, sent = encode_message(welcome), 0
        try:
            sent = socket.send_fds(sock, [frame], [board])
        except OSError as error:
            log.info("session %d is shown no name board: %s", session.session_id, error)
            session.send(msgspec.structs.replace(welcome, board_bytes=0))
            return
        if sent < len(frame):
            session.abort()  # it reads nothing: a welcome is the first that is sent

    async def _attach(self, greeting: Greeting) -> SessionMemory | None:
        hello, fds = greeting
        bare = not (hello.memories or hello.regions or fds)
        if hello.role == "worker" or (hello.role == "engine" and not bare):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, attach, hello.memories, hello.regions, fds, hello.events)
        for fd in fds:
            os.close(fd)
        return None

    def _turn_away(self, sock: socket.socket, code: str, field: str, expected: str) -> None:
        self.refused += 1
        self.sidecar.errors[code] += 1
        if is_told(self.refused):
            log.warning(
                "a peer was turned away (%d so far): %s: %s: expected %s", self.refused, code, field, expected
            )
        with contextlib.suppress(OSError):
            sock.send(encode_message(Error(None, code, field, expected)))
        sock.close()

    async def close(self) -> None:
        """End every session once its copies are done."""
        for session in tuple(self.sessions):
            session.end()
        await asyncio.gather(*(session.closed for session in tuple(self.sessions)))

    def unlink(self) -> None:
        """Stop listening, cut what is still connected, and remove the socket's file, if it is still ours."""
        self._socket.close()
        for session in tuple(self.sessions):
            session.abort()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
