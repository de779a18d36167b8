"""One replay client: where its reply stands, and how much of it is on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from kvevents_service.core.replay import WAIT, Reply
from kvevents_service.service.outputs import Output
from kvevents_service.sockets import send_now
from kvevents_service.wire.frames import REPLAY_END, Payload, replay_reply

CHUNK_BYTES = 256 * 1024
CHUNK = 32
"""Bytes and messages of one piece of work: half a millisecond at most."""
IN_FLIGHT_BYTES = 8 * 1024 * 1024
"""Not yet taken by the client's connection, of large payloads; of small ones the high-water mark is the bound."""


class _Sent(NamedTuple):
    tracker: zmq.MessageTracker
    size: int


class Cursor:
    """Sends one reply to one client as there is room. `over` once its end marker is out, the client has left,
    or the state cannot be told to its end: that has no end marker."""

    def __init__(self, socket: zmq.Socket[bytes], identity: bytes, output: Output, reply: Reply) -> None:
        self.over = False
        self.sent_bytes = 0
        self.reply = reply
        self._socket = socket
        self._identity = identity
        self._output = output
        self._in_flight: deque[_Sent] = deque()
        self._in_flight_bytes = 0

    def __repr__(self) -> str:
        return f"<Cursor {self.reply!r} in_flight={self._in_flight_bytes}>"

    @property
    def waits(self) -> bool:
        """It is not the client that its next message waits for."""
        return self.reply.payload() is WAIT

    def send_some(self) -> bool:
        """One piece; False if nothing could be sent."""
        before, left = self.reply.seq, CHUNK_BYTES
        while left > 0 and self.reply.seq - before < CHUNK and self._room() and not self.over:
            payload = self.reply.payload()
            if payload is None and self.reply.half_told:
                self.over = True
                break
            if payload is None:
                self.over = self._send(REPLAY_END) or self.over
                break
            if not isinstance(payload, Payload) or not self._send_payload(payload):
                break
            self.reply.advance()
            left -= len(payload)
        return self.over or self.reply.seq > before

    def _room(self) -> bool:
        while self._in_flight and self._in_flight[0].tracker.done:
            self._in_flight_bytes -= self._in_flight.popleft().size
        return self._in_flight_bytes < IN_FLIGHT_BYTES

    def _send_payload(self, payload: Payload) -> bool:
        return self._send(replay_reply(self._output.topic, self.reply.seq, payload), len(payload))

    def _send(self, frames: Sequence[Payload], size: int = 0) -> bool:
        """One message, now. False: no room, or the client has left, and it is `over`."""
        try:
            tracker = send_now(self._socket, [self._identity, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH
            self.over = True
            return False
        self.sent_bytes += size
        if tracker is not None:
            self._in_flight.append(_Sent(tracker, size))
            self._in_flight_bytes += size
        return True
