"""A network that loses messages: forwards an event endpoint, except while it is told to lose them."""

from __future__ import annotations

import threading

import zmq

LINGER_MS = 0
POLL_MS = 50


class LossyNetwork:
    """Subscribe to `endpoint` instead of to the publisher."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], publisher: str) -> None:
        self.lost = 0
        self.passed = 0
        self.subscribed = threading.Event()
        self._losing = threading.Event()
        self._stopping = threading.Event()
        self._front = context.socket(zmq.XPUB)
        self._back = context.socket(zmq.XSUB)
        self.endpoint = self._open(publisher)
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _open(self, publisher: str) -> str:
        for side in (self._front, self._back):
            side.linger, side.rcvhwm, side.sndhwm = LINGER_MS, 0, 0
        self._front.bind("tcp://127.0.0.1:*")
        self._back.connect(publisher)
        return self._front.getsockopt_string(zmq.LAST_ENDPOINT)

    def lose(self, losing: bool) -> None:
        """From now on everything is lost, or nothing is."""
        (self._losing.set if losing else self._losing.clear)()

    def _forward(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._stopping.is_set():
            for side, _ in poller.poll(POLL_MS):
                self._pass_on(side)

    def _pass_on(self, side: zmq.Socket[bytes]) -> None:
        frames = side.recv_multipart()
        if side is self._front:
            self._back.send_multipart(frames)  # a subscription
            self.subscribed.set()
        elif self._losing.is_set():
            self.lost += 1
        else:
            self.passed += 1
            self._front.send_multipart(frames)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._front.close()
        self._back.close()
