"""The sidecar's end of a line, played by a test."""

import socket

from kvevents_service.engine.connection import Connection
from kvevents_service.engine.line import Line
from kvevents_service.engine.link import Link
from kvevents_service.wire.control import PROTOCOL_VERSION, Welcome
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message


class Peer:
    """The sidecar's end of a pair of sockets."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection = Connection(ours)
        self.line = Line(send_s=0.01)
        self.line.adopt(Link(self.connection, Welcome(PROTOCOL_VERSION, "boot", 1, 8, 64)))
        self._frames = FrameReader()

    def say(self, *messages: object) -> None:
        for message in messages:
            self.socket.sendall(message if isinstance(message, bytes) else bytes(encode_message(message)))  # type: ignore[arg-type]

    def heard(self, wait_s: float = 0.0) -> list[object]:
        self.socket.settimeout(wait_s or 0.2)
        try:
            return [decode_client(body) for body in self._frames.feed(self.socket.recv(1 << 22))]
        except TimeoutError:
            return []

    def close(self) -> None:
        self.socket.close()
        self.connection.close()
