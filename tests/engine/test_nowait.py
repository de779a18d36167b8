"""Calls on a real socket that never wait."""

import socket
from collections.abc import Iterator

import pytest

from kvevents_service.engine import nowait

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_what_is_sent_arrives(pair: Pair) -> None:
    assert nowait.send(pair[0].fileno(), bytearray(b"hello")) == 5
    inbox = nowait.Inbox(4)
    assert [inbox.recv(pair[1].fileno()) for _ in range(3)] == [b"hell", b"o", None]


def test_a_full_socket_takes_nothing(pair: Pair) -> None:
    data = bytearray(1 << 16)
    while nowait.send(pair[0].fileno(), data):
        pass
    data.extend(b"more")  # the buffer is not kept


def test_eof_is_empty(pair: Pair) -> None:
    pair[1].close()
    assert nowait.Inbox(4).recv(pair[0].fileno()) == b""


def test_a_broken_connection_is_an_error(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        nowait.send(pair[0].fileno(), bytearray(b"hello"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        nowait.Inbox(4).recv(-1)
