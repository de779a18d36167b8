"""Bad input on the sockets of readers and operators: requests for replays and snapshots, subscriptions, HTTP."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import suppress
from random import Random

import zmq

from kvevents_service.errors import WireError
from kvevents_service.wire.frames import SNAPSHOT_REQUEST, parse_replay_reply
from tools.fuzz.engine_socket import ANSWER_S, Fault
from tools.fuzz.mutate import INTS, mutate_bytes

MOST_FRAME_BYTES = 200
"""A request of more than 1024 bytes ends its connection, and ZeroMQ does not tell."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PATHS = (b"/", b"/metrics", b"/healthz", b"/state", b"/nothing", b"/../x", b"/%00", b"*", b"/" + b"x" * 9000)
HTTP_S = 15.0


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition("://")[2].partition("/")[0].rpartition(":")
    return host, int(port)


class Requests:
    """Requests through ZeroMQ, each answered before the next one."""

    def __init__(self, replay: str, snapshot: str, random: Random) -> None:
        self.counts: Counter[str] = Counter()
        self._random = random
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay, self._snapshot = self._dealer(replay), self._dealer(snapshot)

    def _dealer(self, endpoint: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(ANSWER_S * 1000))
        dealer.connect(endpoint)
        return dealer

    def replays(self, inputs: int) -> int:
        """An end marker each."""
        for _ in range(inputs):
            frames = self._frames(self._start())
            self._replay.send_multipart(frames)
            self.counts["replay requests"] += 1
            try:
                while parse_replay_reply(self._replay.recv_multipart()) is not None:
                    self.counts["replayed batches"] += 1
            except (zmq.Again, WireError) as error:
                raise Fault(f"a replay request had no end marker: {frames}: {error!r}") from None
        return inputs

    def snapshots(self, inputs: int) -> int:
        """An answer each."""
        for _ in range(inputs):
            frames = self._frames(SNAPSHOT_REQUEST)
            self._snapshot.send_multipart(frames)
            self.counts["snapshot requests"] += 1
            try:
                self._snapshot.recv_multipart()
            except zmq.Again:
                raise Fault(f"a snapshot request had no answer: {frames}") from None
        return inputs

    def _start(self) -> bytes:
        number: int = self._random.choice((*INTS, self._random.getrandbits(40)))
        return (number % 2**64).to_bytes(8, "big")

    def _frames(self, good: bytes) -> list[bytes]:
        random = self._random
        body = good if random.randrange(3) == 0 else mutate_bytes(good, random)
        frames = [b"", body, *(random.randbytes(random.randrange(MOST_FRAME_BYTES)) for _ in range(3))]
        first = random.randrange(2)
        return frames[first : first + random.choice((1, 1, 2, 2, 3, 4))]

    def close(self) -> None:
        self._context.destroy(linger=0)


class RawSockets:
    """Bytes on a port, and nothing of ZeroMQ or an HTTP client between."""

    def __init__(self, zeromq: list[str], admin: str, random: Random) -> None:
        self.counts: Counter[str] = Counter()
        self._zeromq = [address(endpoint) for endpoint in zeromq]
        self._admin = address(admin)
        self._random = random

    def subscriptions(self, inputs: int) -> int:
        """Subscriptions, good and bad, in one connection to a PUB or ROUTER socket. No answer is due."""
        random, kind = self._random, self._random.choice((b"SUB", b"XSUB", b"DEALER", b"REQ", b"\0" * 3))
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        data = GREETING + b"\x04" + bytes((len(ready),)) + ready
        if random.randrange(4) == 0:
            data = mutate_bytes(data, random)
        data += b"".join(self._message() for _ in range(inputs))
        with suppress(ConnectionError), socket.create_connection(random.choice(self._zeromq), ANSWER_S) as raw:
            raw.sendall(data)
        self.counts["raw ZMTP messages"] += inputs
        return inputs

    def _message(self) -> bytes:
        random = self._random
        topic = random.choice((b"\x01", b"\x00", b"")) + random.randbytes(random.choice((0, 1, 20, 200)))
        frame = bytes((random.choice((0, 0, 0, 1)), len(topic))) + topic
        match random.randrange(12):
            case 0:
                return mutate_bytes(frame, random)
            case 1:
                return b"\x02" + random.getrandbits(64).to_bytes(8, "big") + topic
            case 2:
                return b"\x04" + bytes((len(topic),)) + topic
        return frame

    def http(self, inputs: int) -> int:
        """A status each, or the end of the connection."""
        for _ in range(inputs):
            request = self._request()
            with socket.create_connection(self._admin, HTTP_S) as raw:
                self.counts[f"http {self._status(raw, request)}"] += 1
        return inputs

    def _status(self, raw: socket.socket, request: bytes) -> str:
        try:
            raw.sendall(request)
            raw.shutdown(socket.SHUT_WR)
            first = raw.recv(4096)
        except TimeoutError:
            raise Fault(f"a request had no answer in {HTTP_S:.0f} s: {request[:300]!r}") from None
        except OSError:
            return "closed"
        if first and not first.startswith(b"HTTP/1.1 "):
            raise Fault(f"no HTTP answer to {request[:300]!r}: {first[:100]!r}")
        return first[9:12].decode() or "closed"

    def _request(self) -> bytes:
        random = self._random
        method = random.choice((b"GET", b"HEAD", b"POST", b"\x16\x03\x01", b"GET" * 50))
        headers = b"".join(
            random.choice(
                (b"Host: x\r\n", b"Content-Length: 99\r\n", b"Content-Length: -1\r\n", b"a" * 300 + b": b\r\n")
            )
            for _ in range(random.randrange(6))
        )
        request = method + b" " + random.choice(PATHS) + b" HTTP/1.1\r\n" + headers + b"\r\n"
        return mutate_bytes(request, random) if random.randrange(3) else request
