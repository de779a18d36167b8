"""How many readers an output has: the connections of its PUB socket, as its monitor reports them."""

from __future__ import annotations

from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents_service.sockets import Receiver

_GONE: Final = zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_FAILED: Final = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Connections:
    """Counts the peers that are connected to one socket. `close` it before the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.refused = 0
        self._socket = socket
        self._open: set[int] = set()
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.Event.ACCEPTED | _GONE | _FAILED)

    def __repr__(self) -> str:
        return f"<Connections {len(self)} refused={self.refused}>"

    def __len__(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Count until cancelled."""
        with Receiver(self._monitor) as receiver:
            while True:
                self._take(await receiver.recv())

    def _take(self, frames: list[bytes]) -> None:
        """`value` is the connection's descriptor. One that was closed and taken again comes in that order."""
        happened = parse_monitor_message(frames)
        if happened["event"] & _FAILED:
            self.refused += 1
        elif happened["event"] == zmq.Event.ACCEPTED:
            self._open.add(happened["value"])
        else:
            self._open.discard(happened["value"])

    def close(self) -> None:
        self._socket.disable_monitor()
