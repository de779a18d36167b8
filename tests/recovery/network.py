"""What lies between a publisher and its readers: in-order channels that lose, delay and break, without a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import zmq

from kvevents_service.subscription import Request as FeedRequest

Frames = list[bytes]

LIVE_HIGH_WATER_MARK = 6


class Link:
    """One subscription of one output. What comes while its queue is full is lost."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.losing = False
        self.high_water_mark = LIVE_HIGH_WATER_MARK
        self.allowed = 0
        self._queue: deque[Frames] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, frames: Frames, *, surely: bool) -> None:
        if surely or not (self.losing or len(self._queue) >= self.high_water_mark):
            self._queue.append(frames)

    def cut(self, last: int) -> None:
        """The newest are lost with the process that sent them."""
        for _ in range(min(last, len(self._queue))):
            self._queue.pop()

    # as a subscriber's `Receiver`

    @property
    def readable(self) -> bool:
        return bool(self._queue) and self.allowed > 0

    def drain(self, limit: int) -> Iterator[Frames]:
        """What may arrive now."""
        count = min(limit, self.allowed, len(self._queue))
        self.allowed -= count
        for _ in range(count):
            yield self._queue.popleft()


class Request(FeedRequest):
    """A request on its way, and the messages of its answer. `dead`: nothing more will come, no end marker."""

    def __init__(self, kind: str, output: int, number: int = 0) -> None:
        self.kind = kind
        self.output = output
        self.number = number
        self.dead = self.closed = False
        self.allowed = 0
        self.inbox: deque[Frames] = deque()
        self._stalled_s = self._spent_s = 0.0
        self._fresh = True

    @property
    def readable(self) -> bool:
        return bool(self.inbox) and self.allowed > 0

    def drain(self, limit: int) -> Iterator[Frames]:
        while self.readable and limit:
            self.allowed, limit = self.allowed - 1, limit - 1
            yield self.inbox.popleft()

    def close(self) -> None:
        self.closed = True


class Network:
    """Every link, and the requests that no process has taken yet."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.waiting: deque[Request] = deque()
        self.surely = False
        """What is sent now arrives."""
        self.most_bytes = 1 << 20
        """A strict reader takes no larger message."""

    def subscribe(self, output: int) -> Link:
        self.links.append(Link(output))
        return self.links[-1]

    def unsubscribe(self, link: Link) -> None:
        self.links.remove(link)

    def ask(self, kind: str, output: int, number: int = 0) -> Request:
        self.waiting.append(Request(kind, output, number))
        return self.waiting[-1]


class Socket:
    """Frames come one by one, none of them large."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []

    def send(self, frame: bytes, flags: int, copy: bool = True, track: bool = False) -> None:
        assert flags & zmq.NOBLOCK
        assert copy, "no payload here is so large"
        assert not track
        self._frames.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            frames, self._frames = self._frames, []
            self.send_message(frames)

    def send_message(self, frames: list[bytes]) -> None:
        raise NotImplementedError


class PubSocket(Socket):
    """The PUB socket of one output. `sent`: all its numbers."""

    def __init__(self, network: Network, output: int) -> None:
        super().__init__()
        self._network = network
        self._output = output
        self.sent: list[int] = []

    def send_message(self, frames: list[bytes]) -> None:
        self.sent.append(int.from_bytes(frames[1], "big"))
        for link in self._network.links:
            if link.output == self._output:
                link.put(list(frames), surely=self._network.surely)


class RouterSocket(Socket):
    """The ROUTER socket of one process. A client's queue is short; one that has left has no route."""

    def __init__(self, high_water_mark: int) -> None:
        super().__init__()
        self.clients: dict[bytes, Request] = {}
        self._high_water_mark = high_water_mark

    def send_message(self, frames: list[bytes]) -> None:
        request = self.clients[frames[0]]
        if request.closed:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if len(request.inbox) >= self._high_water_mark:
            raise zmq.Again
        request.inbox.append(frames[1:])


class Subscription:
    """What a `Feed` reads from: one link, and requests to the same output's endpoints."""

    dropped = 0
    connected = True

    def __init__(self, network: Network, link: Link) -> None:
        self.incoming = link
        self.request: Request | None = None
        self._network = network

    def new_refusal(self, now: float) -> str:
        return ""

    def replay(self, endpoint: str, start: int) -> Request:
        self.request = self._network.ask("replay", self.incoming.output, start)
        return self.request

    def snapshot(self, endpoint: str) -> Request:
        self.request = self._network.ask("snapshot", self.incoming.output)
        return self.request
