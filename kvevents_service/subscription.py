"""The sockets of a subscriber: the subscription and its connection, one request, and the end of the context.

All sockets have LINGER 0; water marks and size limits are set before they connect.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

import zmq

from kvevents_service.core.sequence import HoldLimits
from kvevents_service.curve import ClientKeys
from kvevents_service.handshakes import FAILURES, Door, Monitor
from kvevents_service.sockets import MAX_MESSAGE_BYTES, Receiver, connect
from kvevents_service.wire.frames import replay_request
from kvevents_service.wire.peek import SNAPSHOT_REQUEST

log = logging.getLogger(__name__)

HIGH_WATER_MARK: Final = 100_000
TERM_S: Final = 2.0
TURN: Final = 64
"""Of so many messages of one socket, those of the others get a turn."""
MAX_TOPICS: Final = 64
MAX_TOPIC_BYTES: Final = 256
KNOCK_S: Final = 1.0
"""So long after a refusal that ZeroMQ takes for the last word, the publisher is asked again."""

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Timing(NamedTuple):
    """Deadlines in seconds. What a consumer spends on an item counts as `feed.STEP_S` at most.

    stall_s: a replay that brings nothing new for so long is given up.
    total_s: one that has not ended after so long is given up as well.
    settle_s: so long after a replay, and with no live message waiting, a number the replay brought is a restart.
    refresh_s: so long after a loss the whole state is asked for; twice as long after the next, and so on, up to
        refresh_max_s, as long as losses come no further apart than that.
    """

    stall_s: float = 2.0
    total_s: float = 60.0
    settle_s: float = 1.0
    refresh_s: float = 1.0
    refresh_max_s: float = 60.0


class TopicFilter:
    """The exact match that follows ZeroMQ's match of prefixes. An empty `wanted` accepts all topics.

    seen: how many messages each topic had, of `MAX_TOPICS` at most, named by up to `MAX_TOPIC_BYTES`.
    """

    def __init__(self, wanted: bytes) -> None:
        self.wanted = wanted
        self.seen: Counter[bytes] = Counter()
        self.refused = 0

    def accepts(self, topic: bytes) -> bool:
        name, seen = topic[:MAX_TOPIC_BYTES], self.seen
        if name in seen or len(seen) < MAX_TOPICS:
            seen[name] += 1
        if not self.wanted or topic == self.wanted:
            return True
        self.refused += 1
        return False


class Inbox:
    """Live messages, taken off their socket as they come; of too many the oldest are dropped, and counted.

    To the numbers a dropped message is one that was lost on the way: a replay brings it, or a `Gap` says so.
    """

    def __init__(self, receiver: Receiver, limits: HoldLimits, wake: Callable[[], None]) -> None:
        self.limits = limits
        self.dropped = 0
        self._receiver = receiver
        self._wake = wake
        self._messages: deque[list[bytes]] = deque()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Inbox {len(self._messages)} messages, {self.dropped} dropped>"

    @property
    def readable(self) -> bool:
        return bool(self._messages)

    def drain(self, limit: int) -> Iterator[list[bytes]]:
        for _ in range(min(limit, len(self._messages))):
            yield self._take()

    async def run(self) -> None:
        """Fill it until cancelled."""
        while True:
            self._put(await self._receiver.recv())
            for frames in self._receiver.drain(TURN):
                self._put(frames)
            self._wake()
            await asyncio.sleep(0)

    def _put(self, frames: list[bytes]) -> None:
        self._messages.append(frames)
        self._bytes += sum(map(len, frames))
        while len(self._messages) > 1 and self._over_limit():
            self._take()
            self.dropped += 1

    def _over_limit(self) -> bool:
        return len(self._messages) > self.limits.batches or self._bytes > self.limits.payload_bytes

    def _take(self) -> list[bytes]:
        frames = self._messages.popleft()
        self._bytes -= sum(map(len, frames))
        return frames


class Subscription:
    """A SUB socket with a context of its own: connected, or it will be once a publisher is there.

    inbox: bounds of what waits in memory; None: everything waits in the socket. wake: called when there may be
    something to read. keys: of a publisher behind CURVE. A context each, so that a name that does not resolve
    delays no other source.
    `endpoint` is what it became: a wildcard is this machine. Raises ConfigError for one that cannot be.
    """

    def __init__(
        self,
        endpoint: str,
        prefix: bytes,
        high_water_mark: int,
        wake: Callable[[], None],
        inbox: HoldLimits | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._context: Context = zmq.Context()
        self._keys = keys
        self._door = Door(keys.public if keys else None)
        self._knock_at = 0.0
        self._told = ""
        self._wake = wake
        try:
            self._socket = _socket(self._context, zmq.SUB, high_water_mark, keys)
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILURES
            self._monitor = Monitor(self._context, self._socket, events)
            self.endpoint = connect(self._socket, endpoint, "endpoint")
            self._receiver = Receiver(self._socket, None if inbox else wake)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._inbox = Inbox(self._receiver, inbox, wake) if inbox else None
        self._filling = asyncio.create_task(self._inbox.run()) if self._inbox else None

    @property
    def incoming(self) -> Receiver | Inbox:
        """Where to read what came."""
        return self._inbox or self._receiver

    @property
    def dropped(self) -> int:
        """Messages that the inbox had no room for."""
        return self._inbox.dropped if self._inbox else 0

    @property
    def connected(self) -> bool:
        """Whether a publisher answered, and has not gone away since."""
        for told in self._monitor.taken():
            self._door.saw(told)
        return self._door.open

    @property
    def refusal(self) -> str:
        """Why the publisher does not let us in, for people; "" as long as nothing says so."""
        return "" if self.connected else self._door.refusal

    def new_refusal(self, now: float) -> str:
        """The refusal, once, when it is another than the last time. To be called now and then: it knocks again."""
        refusal, before = self.refusal, self._told
        self._told = refusal
        if not (refusal and self._door.final):
            self._knock_at = now + KNOCK_S
        elif now >= self._knock_at:
            self._knock_at = now + KNOCK_S
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self.endpoint)
            self._socket.connect(self.endpoint)
        return refusal if refusal != before else ""

    def replay(self, endpoint: str, start: int) -> Request:
        """Ask for the batches from `start` on. To be closed by the caller, before this."""
        return Request(self._context, endpoint, "replay", replay_request(start), self._wake, self._keys)

    def snapshot(self, endpoint: str) -> Request:
        """Ask for the whole state in one message. Likewise."""
        return Request(self._context, endpoint, "snapshot", SNAPSHOT_REQUEST, self._wake, self._keys)

    async def close(self) -> None:
        """Close the sockets at once, then wait for ZeroMQ's thread, `TERM_S` at most."""
        if self._filling is not None:
            self._filling.cancel()
        self._receiver.close()
        self._socket.disable_monitor()
        self._socket.close()
        self._monitor.close()
        await _terminate(self._context)


class Request:
    """One request and its answer: on a socket of its own, so that nothing of an older answer gets in.

    Raises ConfigError for a bad endpoint. kind: the setting that names it, "replay" or "snapshot".
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        kind: str,
        frames: Sequence[bytes],
        wake: Callable[[], None],
        keys: ClientKeys | None = None,
    ) -> None:
        self.kind = kind
        self._socket = _socket(context, zmq.DEALER, HIGH_WATER_MARK, keys)
        connect(self._socket, endpoint, kind)
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._receiver = Receiver(self._socket, wake)
        self._stalled_s = self._spent_s = 0.0
        self._fresh = True

    def __repr__(self) -> str:
        return f"<Request {self.kind} for {self._spent_s:.1f} s>"

    @property
    def readable(self) -> bool:
        return self._receiver.readable

    def drain(self, limit: int) -> Iterator[list[bytes]]:
        return self._receiver.drain(limit)

    def waited(self, seconds: float) -> None:
        """So much time has passed since it was last said; the first time, since before it was made."""
        if self._fresh:
            self._fresh = False
            return
        self._stalled_s += seconds
        self._spent_s += seconds

    def progressed(self) -> None:
        """The last message was of use."""
        self._stalled_s = 0.0

    def overdue(self, timing: Timing) -> bool:
        return self._stalled_s > timing.stall_s or self._spent_s > timing.total_s

    def close(self) -> None:
        self._receiver.close()
        self._socket.close()


def _socket(context: Context, kind: int, high_water_mark: int, keys: ClientKeys | None) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if keys is not None:
        keys.guard(socket)
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
