"""Receiving from ZeroMQ in asyncio without losing a message to a cancelled receive.

The socket's descriptor is edge triggered: readiness may have been reported before we look, and any send may use
up the edge. So a receive first tries, and only waits when there is nothing; and it looks again now and then.
"""

from __future__ import annotations

import asyncio
import os
import socket as unix
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import zmq

from kvevents_service.errors import ConfigError
from kvevents_service.wire.frames import Payload

RECHECK_S = 0.05
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
SHARED_BYTES = 16 * 1024
"""Larger frames are not copied when they are sent."""
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_WILDCARDS = {"*", "0.0.0.0", "[::]"}
_PATHLESS = {"*", "@"}
_LOCAL_NAMES = {"localhost": "127.0.0.1"}
T = TypeVar("T")


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One whose own thread takes the core from no other when it wakes: see `transfer.crew.give_way`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def send_now(socket: zmq.Socket[bytes], frames: Sequence[Payload]) -> zmq.MessageTracker | None:
    """Send a message, or raise zmq.Again: at half the cost of `send_multipart`, which makes an enum for each frame.

    The last frame is shared if it is large; the tracker says when it is not needed any more.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    return send_frame(socket, frames[-1], more=False)


def send_frame(socket: zmq.Socket[bytes], frame: Payload, *, more: bool) -> zmq.MessageTracker | None:
    """One frame of a message, the last one or not. Nothing else may be sent on the socket before the last."""
    shared = len(frame) >= SHARED_BYTES
    return socket.send(frame, _MORE if more else _LAST, copy=not shared, track=shared)


class Receiver:
    """The one reader of a socket. `recv` may be cancelled at any time: a message is taken in one step or not."""

    def __init__(self, socket: zmq.Socket[bytes], wake: Callable[[], None] | None = None) -> None:
        """wake: called when there may be a message, for those who `drain` several sockets."""
        self._socket = socket
        self._ready = asyncio.Event()
        self._ready.set()
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        self._ready.set()
        if self._wake is not None:
            self._wake()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. The socket stays open."""
        self._loop.remove_reader(self._fd)

    def recv_nowait(self) -> list[bytes] | None:
        """One message if there is one."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [frame.bytes]
        while frame.more:  # recv_multipart asks the socket instead, at the price of another frame
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    @property
    def readable(self) -> bool:
        """Whether there may be a message. Now and then look without: see above."""
        return self._ready.is_set()

    def drain(self, limit: int) -> Iterator[list[bytes]]:
        """What there is, up to `limit` messages."""
        self._ready.clear()
        for _ in range(limit):
            if (frames := self.recv_nowait()) is None:
                return
            yield frames
        self._ready.set()

    def recv_from_nowait(self) -> tuple[str, list[bytes]] | None:
        """Who sent it (see `peer_of`), and one message if there is one."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return peer_of(frames[0]), [frame.bytes for frame in frames]

    async def recv(self) -> list[bytes]:
        """The next message. Waits as long as it takes, and one turn of the loop at least: a flood stops nobody."""
        return await self._awaited(self.recv_nowait)

    async def recv_from(self) -> tuple[str, list[bytes]]:
        """The next message and its sender, likewise."""
        return await self._awaited(self.recv_from_nowait)

    async def _awaited(self, take: Callable[[], T | None]) -> T:
        await asyncio.sleep(0)
        while (taken := take()) is None:
            self._ready.clear()
            if (taken := take()) is not None:
                return taken
            with suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S):  # not wait_for: before 3.12 it can swallow a cancellation
                    await self._ready.wait()
        return taken


def peer_of(frame: zmq.Frame) -> str:
    """The host that a message came from: an IP address, "localhost:uid:gid" for ipc, "" if ZeroMQ cannot say.

    Without port or process: a host that connects anew is the same peer.
    """
    try:
        peer = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
    return peer.rpartition(":")[0] if peer.startswith("localhost:") else peer


def bind(socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """Bind and return the endpoint that it became (port 0 resolved). ConfigError names the setting."""
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and path[:1] not in _PATHLESS:
        is_stale(path, setting)  # ZeroMQ would put its socket in the place of anything
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(setting, f"an endpoint that can be bound, not {endpoint} ({error})") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def is_stale(path: str, setting: str) -> bool:
    """Whether a dead process left a socket there. ConfigError if another file is there, or somebody listens.

    A symbolic link is another file, wherever it leads.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(setting, f"a path that can be bound, not {path} ({error.strerror})") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(setting, f"no other file at {path}")
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with suppress(ConnectionRefusedError):
            probe.connect(path)
            raise ConfigError(setting, f"a path that nobody else listens on, not {path}")
    return True


def connect(socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """Connect; a wildcard address means this machine. ConfigError names the setting."""
    target = connectable(endpoint)
    socket.setsockopt(zmq.IPV6, "[" in target)
    try:
        socket.connect(target)
    except zmq.ZMQError as error:
        raise ConfigError(setting, f"an endpoint like tcp://127.0.0.1:5557, not {endpoint} ({error})") from error
    return target


def connectable(endpoint: str) -> str:
    """The endpoint to connect to for one that a publisher binds: *, 0.0.0.0 and [::] become loopback."""
    for wildcard, local in (
        ("//*:", "//127.0.0.1:"),
        ("//0.0.0.0:", "//127.0.0.1:"),
        ("//[::]:", "//[::1]:"),
    ):
        endpoint = endpoint.replace(wildcard, local)
    return endpoint


def is_local(endpoint: str) -> bool:
    """True if only this machine can reach the endpoint."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def port_above(endpoint: str, more: int) -> str | None:
    """The endpoint with a port so much higher; port 0 stays. None if it has none, or there is none so high."""
    start, _, port = endpoint.rpartition(":")
    if more == 0 or (port == "0" and start):
        return endpoint
    if not (endpoint.startswith("tcp://") and port.isascii() and port.isdigit() and int(port) + more < 65536):
        return None
    return f"{start}:{int(port) + more}"


def overlap(endpoint: str, other: str) -> bool:
    """True if both cannot be bound at once: one path, or one port of hosts that may be the same. Port 0 is free."""
    if not (endpoint.startswith("tcp://") and other.startswith("tcp://")):
        return endpoint != "ipc://*" and os.path.normpath(endpoint) == os.path.normpath(other)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    other_host, _, other_port = other.removeprefix("tcp://").rpartition(":")
    if int(port) != int(other_port) or int(port) == 0:
        return False
    hosts = {_LOCAL_NAMES.get(host, host), _LOCAL_NAMES.get(other_host, other_host)}
    return len(hosts) == 1 or bool(hosts & _WILDCARDS)
