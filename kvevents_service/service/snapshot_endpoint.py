"""The snapshot endpoint: a REQ says `snapshot`, the ROUTER answers with the whole state in one message.

    [seq, 8 bytes signed big endian][publisher id, 16 bytes][payload]...

The payloads are batches; folded in order they are the state after number `seq` of this output. -1: nothing was
numbered so far, no payload. Below -1: no snapshot now, ask again later. Source: a proposal to vLLM, not settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import zmq

from kvevents_service.core.allowance import Allowance
from kvevents_service.core.replay import Reply
from kvevents_service.service.outputs import Output
from kvevents_service.service.renderer import Renderer
from kvevents_service.sockets import Receiver
from kvevents_service.wire.frames import (
    SNAPSHOT_EMPTY,
    SNAPSHOT_REQUEST,
    SNAPSHOT_UNAVAILABLE,
    Payload,
    snapshot_reply,
)

MAX_WAITING: Final = 64
MAX_UNREAD: Final = 8
"""Answers that their readers have not taken yet."""
MAX_REPLY_BYTES: Final = 1 << 30
DEADLINE_S: Final = 30.0
RETRY_S: Final = 0.005


class SnapshotEndpoint:
    """Answers snapshot requests of one output."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        output: Output,
        renderer: Renderer,
        *,
        publisher_id: bytes,
        clock: Callable[[], float],
        allowance: Allowance | None = None,
    ) -> None:
        """allowance: what each host may ask; several endpoints may share it."""
        self.requests = self.answered = self.unavailable = 0
        self._socket = socket
        self._output = output
        self._renderer = renderer
        self._publisher_id = publisher_id
        self._clock = clock
        self._allowance = allowance or Allowance()
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._unread: list[zmq.MessageTracker] = []

    def __repr__(self) -> str:
        return f"<SnapshotEndpoint requests={self.requests} unread={len(self._unread)}>"

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            with Receiver(self._socket) as receiver:
                while True:
                    peer, (identity, *frames) = await receiver.recv_from()
                    self.requests += 1
                    tasks.create_task(self._serve(peer, identity, frames))

    async def _serve(self, peer: str, identity: bytes, frames: list[bytes]) -> None:
        self._unread = [tracker for tracker in self._unread if not tracker.done]
        busy = self._waiting >= MAX_WAITING or len(self._unread) >= MAX_UNREAD
        delimiter = frames[:1] if frames[:1] == [b""] else []
        busy = busy or not self._allowance.admits(peer, self._clock())
        if busy or frames[len(delimiter) :] != [SNAPSHOT_REQUEST]:
            self._refuse(identity, delimiter)
        elif self._renderer.is_empty:
            self._send(identity, delimiter, SNAPSHOT_EMPTY, [])
        else:
            self._waiting += 1
            try:
                await self._answer(peer, identity, delimiter)
            finally:
                self._waiting -= 1

    async def _answer(self, peer: str, identity: bytes, delimiter: list[bytes]) -> None:
        reply = await self._rendered(self._clock() + DEADLINE_S)
        if reply is None:
            self._refuse(identity, delimiter)
            return
        try:
            async with self._turn:  # one answer a turn of the loop: engines' lookups come in between
                await asyncio.sleep(0)
            payloads = reply.payloads()
            if payloads is None or sum(map(len, payloads)) > MAX_REPLY_BYTES:
                self._refuse(identity, delimiter)
            else:
                self.answered += 1
                self._allowance.spend(peer, sum(map(len, payloads)), self._clock())
                self._send(identity, delimiter, reply.end, payloads)
        finally:
            reply.close()

    async def _rendered(self, deadline: float) -> Reply | None:
        """A reply whose snapshot is done, as of when it was asked for."""
        reply = None
        while self._clock() < deadline:
            reply = reply or self._renderer.whole(self._output)
            if reply is not None and reply.ready:
                return reply
            await asyncio.sleep(RETRY_S)
        if reply is not None:
            reply.close()
        return None

    def _refuse(self, identity: bytes, delimiter: list[bytes]) -> None:
        self.unavailable += 1
        self._send(identity, delimiter, SNAPSHOT_UNAVAILABLE, [])

    def _send(self, identity: bytes, delimiter: list[bytes], seq: int, payloads: Sequence[Payload]) -> None:
        frames = [identity, *delimiter, *snapshot_reply(seq, self._publisher_id, payloads)]
        with suppress(zmq.ZMQError):  # the reader has left, or does not read
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
            assert tracker is not None, "it was asked for"
            self._unread.append(tracker)

    def stats(self) -> dict[str, int]:
        return {
            "snapshot_requests": self.requests,
            "snapshots_answered": self.answered,
            "snapshots_unavailable": self.unavailable,
        }
