"""One output: a PUB socket with a topic and an encoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq

from kvevents_service.sockets import send_now
from kvevents_service.wire.frames import live_frames

HELD_S: Final = 0.05
"""A send takes microseconds. It takes longer while ZeroMQ forgets many readers, or many subscriptions."""


class Sink(Protocol):
    """What the publisher sends to. encoding, exact: as of an `Output`; refused: batches that it did not take."""

    encoding: int
    exact: bool

    @property
    def sent(self) -> int: ...

    @property
    def refused(self) -> int: ...

    def send(self, seq: int, payloads: Sequence[bytes]) -> None:
        """Send number `seq` of the journal now or never; nobody waits."""


class Output:
    """Sends batches of the journal. A subscriber that is too slow loses some and sees a gap; nobody waits.

    encoding: the place of its payload among those of a batch. exact: its readers ask once, and take only replies
    that start at the number they asked for.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        topic: str = "",
        encoding: int = 0,
        exact: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = topic.encode()
        self.encoding = encoding
        self.exact = exact
        self.sent = self.refused = self.held = 0
        """held: sends that took more than HELD_S; nothing else happened meanwhile."""
        self.socket = socket
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Output {self.topic!r} sent={self.sent}>"

    def send(self, seq: int, payloads: Sequence[bytes]) -> None:
        """Send number `seq` of the journal now or never."""
        began = self._clock()
        try:
            send_now(self.socket, live_frames(self.topic, seq, payloads[self.encoding]))
        except zmq.Again:
            self.refused += 1  # the number is spent and retained: consumers see a gap and can replay it
        else:
            self.sent += 1
        self.held += self._clock() - began > HELD_S
