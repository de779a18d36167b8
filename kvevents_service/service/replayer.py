"""The replay endpoint, as vLLM speaks it: a DEALER asks for a number, the ROUTER sends what is retained.

Every request is answered: a bad one and one that asks for the future get just the end marker. A client that does
not read delays nobody: it has a cursor of its own, and is dropped at its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

from kvevents_service.core.journal import Journal
from kvevents_service.errors import WireError
from kvevents_service.sockets import Receiver
from kvevents_service.wire.frames import REPLAY_END, parse_replay_request, replay_reply

MAX_CLIENTS = 64
CLIENT_DEADLINE_S = 30.0
RETRY_S = 0.005
CHUNK = 64
CHUNK_BYTES = 256 * 1024


class Replayer:
    """Answers replay requests from the journal's retained batches."""

    def __init__(
        self,
        journal: Journal,
        socket: zmq.Socket[bytes],
        *,
        topic: str,
        clock: Callable[[], float],
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self.journal = journal
        self.requests = self.bad_requests = self.dropped_clients = 0
        self._socket = socket
        self._topic = topic.encode()
        self._clock = clock
        self._flush = flush
        self._clients: dict[bytes, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Replayer clients={len(self._clients)} requests={self.requests}>"

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            with Receiver(self._socket) as receiver:
                while True:
                    identity, *frames = await receiver.recv()
                    await self._accept(identity, frames, tasks)

    async def _accept(self, identity: bytes, frames: list[bytes], tasks: asyncio.TaskGroup) -> None:
        self.requests += 1
        running = self._clients.pop(identity, None)
        if running is not None:
            running.cancel()  # a client that asks again has given up on the first answer
        if len(self._clients) >= MAX_CLIENTS:
            self.dropped_clients += 1
            self._end_now(identity)
            return
        task = tasks.create_task(self._serve(identity, frames))
        self._clients[identity] = task
        task.add_done_callback(lambda done: self._forget(identity, done))

    def _end_now(self, identity: bytes) -> None:
        """Too many clients: this one gets its end marker and may ask again."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, *REPLAY_END], zmq.NOBLOCK)

    def _forget(self, identity: bytes, task: asyncio.Task[None]) -> None:
        if self._clients.get(identity) is task:
            del self._clients[identity]

    async def _serve(self, identity: bytes, frames: list[bytes]) -> None:
        deadline = self._clock() + CLIENT_DEADLINE_S
        self._flush()  # what is numbered is part of the answer, though its turn to be sent has not come
        try:
            start = parse_replay_request(frames)
        except WireError:
            self.bad_requests += 1
            start = self.journal.next_seq
        while self._clock() < deadline:
            async with self._turn:  # one client a turn of the loop: engines' lookups come in between
                sent = self._send_some(identity, start)
                await asyncio.sleep(0)
            if sent is None:
                return
            if sent == start:
                await asyncio.sleep(RETRY_S)
            start = sent
        self.dropped_clients += 1

    def _send_some(self, identity: bytes, start: int) -> int | None:
        """Send up to CHUNK_BYTES from number `start` on; returns the number to go on with, None at the end."""
        left = CHUNK_BYTES
        for seq, payload in self.journal.retained_from(start, CHUNK):
            if left < 0:
                return start
            sent = self._send([identity, *replay_reply(self._topic, seq, payload)])
            if not sent:
                return start if sent is False else None
            start, left = seq + 1, left - len(payload)
        if self.journal.retained_from(start, 1):
            return start
        return start if self._send([identity, *REPLAY_END]) is False else None

    def _send(self, frames: list[bytes]) -> bool | None:
        """Send one message. False: no room now; None: the client has left."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH
            return None
        return True

    def stats(self) -> dict[str, int]:
        return {
            "replay_requests": self.requests,
            "replay_bad_requests": self.bad_requests,
            "replay_dropped_clients": self.dropped_clients,
        }
