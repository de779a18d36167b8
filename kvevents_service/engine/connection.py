"""One connection of an engine to a sidecar: blocking socket calls, each with a deadline. Not thread safe.

The socket is non-blocking; what cannot be written at once waits in a bounded outbox. EOF is the fence: the
sidecar closes a connection only when no copy of it touches the engine's memory, and so does its death.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kvevents_service.engine import nowait
from kvevents_service.engine.board import attach
from kvevents_service.errors import SidecarGone, WireError
from kvevents_service.wire.control import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Error,
    Hello,
    SidecarMessage,
    Welcome,
)
from kvevents_service.wire.framing import FrameReader, decode_sidecar, encode_message
from kvevents_service.wire.name_board import NameBoard

READ_BYTES = 32 * 1024
MAX_THROWN_AWAY = 64
MAX_FDS = 4
"""A welcome has one at most."""
SEND_BUFFER_BYTES = 4 * 1024 * 1024
SO_SNDBUFFORCE = 32  # Linux; not in the socket module


class Connection:
    """Frames to and from one sidecar."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        _widen(sock)
        self._socket = sock
        self._reader = FrameReader()
        self._outbox = bytearray()
        self._inbox = nowait.Inbox(READ_BYTES)
        self._poll_out = select.poll()
        self._poll_out.register(sock, select.POLLOUT)

    def __repr__(self) -> str:
        return f"<Connection fd={self._socket.fileno()} unsent={len(self._outbox)}>"

    @property
    def stalled(self) -> bool:
        """The sidecar has not taken everything that was sent."""
        return bool(self._outbox)

    def send(self, messages: Sequence[msgspec.Struct], wait_s: float) -> bool:
        """Send a frame each, at once. False, and nothing sent, if the sidecar still owes reading an earlier one.

        What was begun stays in the outbox when `wait_s` is over, and goes first next time.
        Raises SidecarGone when the connection is broken, ValueError for a frame that no sidecar takes.
        """
        frames = _framed(messages)
        if self._outbox and not self._flush(0.0):
            return False
        sent = self._try_send(frames)
        if sent < len(frames):
            self._outbox += memoryview(frames)[sent:]
            self._flush(wait_s)
        return True

    def _flush(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while self._outbox:
            sent = self._try_send(self._outbox)
            del self._outbox[:sent]
            left = deadline - time.monotonic()
            if self._outbox and (left <= 0 or not self._poll_out.poll(left * 1000)):
                return False
        return True

    def _try_send(self, data: bytearray) -> int:
        try:
            return nowait.send(self._socket.fileno(), data)
        except OSError as error:
            raise SidecarGone(f"the sidecar closed the connection ({error.strerror})") from error

    def receive(self) -> Iterator[SidecarMessage]:
        """Messages that have arrived; never waits. SidecarGone on EOF (the fence), or if they are no messages.

        Also pushes out what an earlier send left: an engine that only polls gets its last step through.
        """
        if self._outbox:
            self._flush(0.0)
        data = self._read()
        if data:
            try:
                yield from map(decode_sidecar, self._reader.feed(data))
            except WireError as error:
                raise SidecarGone(f"the sidecar sent no valid frame ({error})") from error

    def greeted(self) -> tuple[list[SidecarMessage], list[int]]:
        """As `receive`, with the descriptors that ride on what has arrived: the caller's from here on."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return [], []
        if not data:
            raise SidecarGone("the sidecar closed the connection")
        try:
            return [decode_sidecar(frame) for frame in self._reader.feed(data)], fds
        except WireError as error:
            _close_all(fds)
            raise SidecarGone(f"the sidecar sent no valid frame ({error})") from error

    def wait(self, wait_s: float) -> None:
        """Sleep until something may have arrived, or can be sent. Changes nothing, so it needs no lock."""
        poller = select.poll()  # of its own: one poll object serves one thread at a time
        if self.register(poller):
            poller.poll(max(0.0, wait_s) * 1000)

    def register(self, poller: select.poll) -> bool:
        """Let it wait for what `wait` waits for. False: another thread has closed it, and there is no socket."""
        with suppress(ValueError):
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            return True
        return False

    def at_eof(self) -> bool:
        """Read some and throw it away; True once the sidecar has closed the connection."""
        try:
            for _ in range(MAX_THROWN_AWAY):  # one that never stops sending holds nobody up
                if not self._read():
                    break
        except SidecarGone:
            return True
        return False

    def _read(self) -> bytes:
        """What has arrived, at most READ_BYTES; empty if nothing has. SidecarGone on EOF."""
        try:
            data = self._inbox.recv(self._socket.fileno())
        except OSError as error:
            raise SidecarGone(f"the connection broke ({error.strerror})") from error
        if data is None:
            return b""
        if not data:
            raise SidecarGone("the sidecar closed the connection")
        return data

    def hang_up(self) -> None:
        """Ask the sidecar to end: it will close, and EOF arrives, when its copies are done."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone already; the next receive says so
            return

    def close(self) -> None:
        self._socket.close()


def _framed(messages: Sequence[msgspec.Struct]) -> bytearray:
    frames = bytearray()
    for message in messages:
        frame = encode_message(message)
        if len(frame) > LENGTH_BYTES + MAX_FRAME_BYTES:
            raise ValueError(f"a frame of at most {MAX_FRAME_BYTES} bytes, not {len(frame)}")
        if len(messages) == 1:
            return frame
        frames += frame
    return frames


def _widen(sock: socket.socket) -> None:
    """Room in the kernel for large steps: with the default, one of 2k blocks waits for the sidecar to read."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


class Greeted(NamedTuple):
    """A connection that stands. `board`: the names that the sidecar may have, if it shows them."""

    connection: Connection
    welcome: Welcome
    board: NameBoard | None


def dial(path: str, hello: Hello, fds: Sequence[int], wait_s: float) -> Greeted:
    """Connect and say hello, with the memory's descriptors. SidecarGone if nobody answers well within `wait_s`."""
    frame = encode_message(hello)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(wait_s)
        sock.connect(path)
        _check_peer(sock, path)
        with suppress(BrokenPipeError):  # it has closed already: its answer says why
            _send_with_fds(sock, frame, fds)
        connection = Connection(sock)
        return Greeted(connection, *_welcome(connection, wait_s))
    except OSError as error:
        sock.close()
        raise SidecarGone(f"no sidecar at {path} ({error.strerror or error})") from error
    except SidecarGone:
        sock.close()
        raise


def _check_peer(sock: socket.socket, path: str) -> None:
    """Only a sidecar of our own user, or root's, is handed our memory."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] not in (0, os.getuid()):
        raise SidecarGone(f"the socket at {path} belongs to another user")


def _send_with_fds(sock: socket.socket, frame: bytearray, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([frame], rights)
    sock.sendall(frame[sent:])


def _welcome(connection: Connection, wait_s: float) -> tuple[Welcome, NameBoard | None]:
    fds: list[int] = []
    try:
        welcome = _await_welcome(connection, wait_s, fds)
        return welcome, attach(fds, welcome.board_bytes)
    finally:
        _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _await_welcome(connection: Connection, wait_s: float, fds: list[int]) -> Welcome:
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        connection.wait(left)
        messages, more = connection.greeted()
        fds += more
        for message in messages:
            match message:
                case Welcome():
                    return message
                case Error(code=code, field=field, expected=expected):
                    raise SidecarGone(f"the sidecar refused us: {code}: {field}: expected {expected}")
    raise SidecarGone("the sidecar did not answer the hello in time")
