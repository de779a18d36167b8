"""The first frame of a session, read with the descriptors that ride on it (SCM_RIGHTS).

asyncio transports cannot receive descriptors, so the hello is read from the bare socket; the session's protocol
takes the socket over afterwards. The engine sends nothing after its hello before it has the answer.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from typing import NamedTuple

from kvevents_service.errors import ControlError, WireError
from kvevents_service.wire.control import LENGTH_BYTES, MAX_HELLO_BYTES, PROTOCOL_VERSION, Hello
from kvevents_service.wire.framing import decode_client

HELLO_DEADLINE_S = 5.0
MAX_FDS = 64
MAX_RANKS = 128
ROLES = ("engine", "worker", "observer")
_ANCILLARY_BYTES = socket.CMSG_LEN((MAX_FDS + 1) * array.array("i").itemsize)
"""One more than may come: less than all that fits was cut off for want of room in this process."""


class Greeting(NamedTuple):
    """A hello and its descriptors, which the receiver owns now."""

    hello: Hello
    fds: list[int]


def check_peer(sock: socket.socket) -> None:
    """ControlError unless the peer runs as our user or as root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.getuid()):
        raise ControlError("not_allowed", "peer", "the sidecar's own user")


async def read_greeting(sock: socket.socket) -> Greeting:
    """Read one hello frame. WireError, ControlError or TimeoutError; descriptors are closed in that case."""
    fds: list[int] = []
    try:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            body = await _read_frame(sock, fds)
        return Greeting(_check(decode_client(body)), fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _check(message: object) -> Hello:
    if not isinstance(message, Hello):
        raise ControlError("no_hello", "message", "a hello first")
    if message.protocol != PROTOCOL_VERSION:
        raise ControlError("bad_protocol", "protocol", f"version {PROTOCOL_VERSION}")
    if message.role not in ROLES:
        raise ControlError("bad_role", "role", f"one of {', '.join(ROLES)}")
    _check_ranks(message)
    return message


def _check_ranks(hello: Hello) -> None:
    if not 1 <= hello.ranks <= MAX_RANKS:
        raise ControlError("bad_rank", "ranks", f"1 to {MAX_RANKS}")
    if hello.role == "worker" and not 0 <= hello.rank < hello.ranks:
        raise ControlError("bad_rank", "rank", f"0 to {hello.ranks - 1}, below ranks")
    if hello.role == "worker" and not hello.engine_id:
        raise ControlError("bad_hello", "engine_id", "the name of the worker's engine")
    if hello.role == "engine" and hello.ranks > 1 and (hello.memories or hello.regions):
        raise ControlError("bad_rank", "regions", "no memory from an engine of several ranks: its workers bring it")


async def _read_frame(sock: socket.socket, fds: list[int]) -> bytes:
    head = await _read_exactly(sock, LENGTH_BYTES, fds)
    length = int.from_bytes(head, "little")
    if length > MAX_HELLO_BYTES:
        raise WireError("length", f"at most {MAX_HELLO_BYTES} bytes in a hello")
    return await _read_exactly(sock, length, fds)


async def _read_exactly(sock: socket.socket, count: int, fds: list[int]) -> bytes:
    data = bytearray()
    while len(data) < count:
        await _readable(sock)
        part, ancillary, flags, _ = sock.recvmsg(
            count - len(data), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array.array("i", payload[: len(payload) // 4 * 4]))
        if len(fds) > MAX_FDS:
            raise ControlError("bad_memory", "memories", f"at most {MAX_FDS} descriptors")
        if flags & socket.MSG_CTRUNC:
            raise ControlError("bad_memory", "memories", "a sidecar whose limit of open files has room for them")
        if not part:
            raise WireError("hello", "a whole frame before the end of the stream")
        data += part
    return bytes(data)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
