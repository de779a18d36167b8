"""Handshakes that fail, as ZeroMQ's socket monitor tells them, in words for the two sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
HANGUPS: Final = 3
"""A publisher that stops may end one handshake; one that ends so many in a row does not want us."""


class Handshake(NamedTuple):
    """One event of a monitor; `value` is ZeroMQ's code of what went wrong."""

    event: int
    value: int

    @property
    def failed(self) -> bool:
        return bool(self.event & FAILURES)


class Monitor:
    """What happens to the connections of one socket. Made before it binds or connects, closed after the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://monitor.{id(socket)}"
        self.reader = context.socket(zmq.PAIR)
        self.reader.setsockopt(zmq.LINGER, 0)
        self.reader.setsockopt(zmq.RCVHWM, 0)  # a full one would stop ZeroMQ's thread
        socket.monitor(address, events)
        self.reader.connect(address)

    def taken(self) -> Iterator[Handshake]:
        """What has come since the last time."""
        with suppress(zmq.Again):
            while True:
                yield parsed(self.reader.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        self.reader.close()


def parsed(frames: list[bytes]) -> Handshake:
    told = parse_monitor_message(frames)
    return Handshake(told["event"], told["value"])


def refusal_of_publisher(told: Handshake, public: bytes | None) -> str:
    """What a reader says of a publisher that did not take it; public: its own key, None if it has none."""
    if public is None:
        return "it ends every handshake: it wants CURVE keys (--curve-server-key, --curve-secret-file)"
    if told.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"it does not allow our key, {public.decode()}: add that to its curve_allowed_keys_file"
    if told.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it does not speak CURVE: it needs a curve_secret_file"
    return "it ends every handshake: does it speak CURVE, and is the server key that of its curve_secret_file?"


def refusal_of_reader(told: Handshake) -> str:
    """What a publisher says of a reader whose handshake failed before its key was seen."""
    if told.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it does not speak CURVE"
    if told.value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it was given another key than ours (--curve-server-key)"
    if told.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it hung up: it may not speak CURVE"
    return f"code {told.value:#x}"


class Door:
    """Whether a publisher lets us in, from the events of a connecting socket."""

    def __init__(self, public: bytes | None) -> None:
        self.open = False
        self.refusal = ""
        self.final = False
        """ZeroMQ does not try again by itself after some refusals."""
        self._public = public
        self._hangups = 0

    def __repr__(self) -> str:
        return f"<Door {self.refusal or ('open' if self.open else 'closed')}>"

    def saw(self, told: Handshake) -> None:
        """One event more."""
        if told.event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.open, self.refusal, self.final, self._hangups = True, "", False, 0
            return
        self.open = False
        if told.failed:
            self._hangups += 1
            self.final = told.event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if self.final or self._hangups >= HANGUPS:
                self.refusal = refusal_of_publisher(told, self._public)
