"""The snapshot endpoint: a REQ says `snapshot`, the ROUTER answers with the whole state in one message.

    [seq, 8 bytes signed big endian][publisher id, 16 bytes][payload]...

The payloads are batches; folded in order they are the state after number `seq` of this output. -1: nothing was
numbered so far, no payload. Below -1: no snapshot now, ask again later. Source: a proposal to vLLM, not settled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import zmq

from kvevents_service.core.allowance import Allowance
from kvevents_service.core.replay import Reply
from kvevents_service.service.outputs import Output
from kvevents_service.service.renderer import Renderer
from kvevents_service.sockets import Receiver, send_frame
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
FRAMES_A_PIECE: Final = 64
MAX_AT_ONCE: Final = 2 * MAX_WAITING
"""Requests that are dealt with, refused ones among them: others wait in the socket."""


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
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._unread: list[zmq.MessageTracker] = []

    def __repr__(self) -> str:
        return f"<SnapshotEndpoint requests={self.requests} unread={len(self._unread)}>"

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            with Receiver(self._socket) as receiver:
                while True:
                    await self._places.acquire()
                    peer, (identity, *frames) = await receiver.recv_from()
                    self.requests += 1
                    task = tasks.create_task(self._serve(peer, identity, frames))
                    task.add_done_callback(lambda _: self._places.release())

    async def _serve(self, peer: str, identity: bytes, frames: list[bytes]) -> None:
        self._unread = [tracker for tracker in self._unread if not tracker.done]
        busy = self._waiting >= MAX_WAITING or len(self._unread) >= MAX_UNREAD
        delimiter = frames[:1] if frames[:1] == [b""] else []
        busy = busy or not self._allowance.admits(peer, self._clock())
        if busy or frames[len(delimiter) :] != [SNAPSHOT_REQUEST]:
            await self._refuse(identity, delimiter)
        elif self._renderer.is_empty:
            await self._send(identity, delimiter, SNAPSHOT_EMPTY, [])
        else:
            self._waiting += 1
            try:
                await self._answer(peer, identity, delimiter)
            finally:
                self._waiting -= 1

    async def _answer(self, peer: str, identity: bytes, delimiter: list[bytes]) -> None:
        reply = await self._rendered(self._clock() + DEADLINE_S)
        if reply is None:
            await self._refuse(identity, delimiter)
            return
        payloads: list[Payload] | None = None

        def gather() -> None:
            nonlocal payloads
            payloads = reply.payloads()
            if payloads is not None and sum(map(len, payloads)) > MAX_REPLY_BYTES:
                payloads = None

        try:
            await self._renderer.rota.run(gather)
            if payloads is None:
                await self._refuse(identity, delimiter)
            else:
                self.answered += 1
                self._allowance.spend(peer, sum(map(len, payloads)), self._clock())
                await self._send(identity, delimiter, reply.end, payloads)
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

    async def _refuse(self, identity: bytes, delimiter: list[bytes]) -> None:
        self.unavailable += 1
        await self._send(identity, delimiter, SNAPSHOT_UNAVAILABLE, [])

    async def _send(self, identity: bytes, delimiter: list[bytes], seq: int, payloads: Sequence[Payload]) -> None:
        """One message, some frames at a time: engines' lookups come in between, other answers behind it."""
        frames = deque([identity, *delimiter, *snapshot_reply(seq, self._publisher_id, payloads)])
        large: list[zmq.MessageTracker] = []

        def send_some() -> bool:
            for _ in range(min(FRAMES_A_PIECE, len(frames))):
                frame = frames.popleft()
                tracker = send_frame(self._socket, frame, more=bool(frames))
                large.extend([] if tracker is None else [tracker])
            return bool(frames)

        async with self._turn:
            with suppress(zmq.ZMQError):  # the reader has left, or does not read
                await self._renderer.rota.run(send_some)
        if large:
            self._unread.append(zmq.MessageTracker(*large))

    def stats(self) -> dict[str, int]:
        return {
            "snapshot_requests": self.requests,
            "snapshots_answered": self.answered,
            "snapshots_unavailable": self.unavailable,
        }
