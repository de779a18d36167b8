"""The sockets of a subscriber: the subscription and its connection, one replay, and the end of the context.

All sockets have LINGER 0; water marks and size limits are set before they connect.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents_service.sockets import MAX_MESSAGE_BYTES, Receiver, connect
from kvevents_service.wire.frames import replay_request

log = logging.getLogger(__name__)

HIGH_WATER_MARK: Final = 100_000
TERM_S: Final = 2.0
MAX_TOPICS: Final = 64
MAX_TOPIC_BYTES: Final = 256
_MONITOR: Final = "inproc://monitor"

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Timing(NamedTuple):
    """Deadlines, in seconds that the subscriber itself waits: the consumer's time between two items is not counted.

    stall_s: a replay that brings nothing new for so long is given up.
    total_s: one that has not ended after so long is given up as well.
    settle_s: so long after a replay, and with no live message waiting, a number the replay brought is a restart.
    """

    stall_s: float = 2.0
    total_s: float = 60.0
    settle_s: float = 1.0


class TopicFilter:
    """The exact match that follows ZeroMQ's match of prefixes. An empty `wanted` accepts all topics.

    seen: how many messages each topic had, of `MAX_TOPICS` at most, named by up to `MAX_TOPIC_BYTES`.
    """

    def __init__(self, wanted: bytes) -> None:
        self.wanted = wanted
        self.seen: Counter[bytes] = Counter()
        self.refused = 0

    def accepts(self, topic: bytes) -> bool:
        name = topic[:MAX_TOPIC_BYTES]
        if name in self.seen or len(self.seen) < MAX_TOPICS:
            self.seen[name] += 1
        accepted = not self.wanted or topic == self.wanted
        self.refused += not accepted
        return accepted


class Subscription:
    """A SUB socket with a context of its own: connected, or it will be once a publisher is there.

    `endpoint` is what it became: a wildcard is this machine. Raises ConfigError for one that cannot be.
    """

    def __init__(self, endpoint: str, prefix: bytes, high_water_mark: int) -> None:
        self._context: Context = zmq.Context()
        self._connected = False
        try:
            self._socket = _socket(self._context, zmq.SUB, high_water_mark)
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
            self._monitor = _socket(self._context, zmq.PAIR, 0)  # no limit: a full one would stop ZeroMQ's thread
            self._socket.monitor(_MONITOR, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._monitor.connect(_MONITOR)
            self.endpoint = connect(self._socket, endpoint, "endpoint")
            self.receiver = Receiver(self._socket)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def connected(self) -> bool:
        """Whether a publisher answered, and has not gone away since."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._connected

    def replay(self, endpoint: str, start: int) -> Replay:
        """Ask for the batches from `start` on. To be closed by the caller, before this."""
        return Replay(self._context, endpoint, start)

    async def close(self) -> None:
        """Close the sockets at once, then wait for ZeroMQ's thread, `TERM_S` at most."""
        self.receiver.close()
        self._socket.disable_monitor()
        self._socket.close()
        self._monitor.close()
        await _terminate(self._context)


class Replay:
    """One request for the batches from `start` on, and its answer: on a socket of its own, so that nothing of an
    older answer gets in. ConfigError for a bad endpoint."""

    def __init__(self, context: Context, endpoint: str, start: int) -> None:
        self._socket = _socket(context, zmq.DEALER, HIGH_WATER_MARK)
        connect(self._socket, endpoint, "replay")
        self._socket.send_multipart(replay_request(start), zmq.NOBLOCK)
        self._receiver = Receiver(self._socket)
        self._stalled_s = self._spent_s = 0.0

    async def reply(self, tick_s: float) -> list[bytes] | None:
        """The next message; None if there is none within `tick_s`. Cancelling loses neither it nor the time."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(tick_s):
                return await self._receiver.recv()
        except TimeoutError:
            return None
        finally:
            spent_s = time.monotonic() - began
            self._stalled_s += spent_s
            self._spent_s += spent_s

    def progressed(self) -> None:
        """The last message was of use."""
        self._stalled_s = 0.0

    def overdue(self, timing: Timing) -> bool:
        return self._stalled_s > timing.stall_s or self._spent_s > timing.total_s

    def close(self) -> None:
        self._receiver.close()
        self._socket.close()


def _socket(context: Context, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


async def _terminate(context: Context) -> None:
    # ZeroMQ may be resolving a name, which nothing ends early: so never on the loop, and never for ever.
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def destroy() -> None:
        context.destroy(linger=0)
        with suppress(RuntimeError):  # the loop has gone on and closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=destroy, name="zmq-term", daemon=True).start()
    try:
        async with asyncio.timeout(TERM_S):
            await ended.wait()
    except TimeoutError:
        log.warning("ZeroMQ has not stopped within %s s; it is left to a thread of its own", TERM_S)
