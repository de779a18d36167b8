"""A replay endpoint, as vLLM speaks it: a DEALER asks for a number, the ROUTER sends that number and all after it.

Every request is answered: a bad one and one that asks for the future get just the end marker. A client that does
not read delays nobody: it has a cursor of its own, and is dropped at its deadline. It gets an end marker then, but
not in the middle of a state, which it would take for the whole. A reader of exact replies that got no whole one in
time is told the state live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

from kvevents_service.core.allowance import Allowance
from kvevents_service.core.replay import Reply
from kvevents_service.errors import WireError
from kvevents_service.service.cursor import Cursor
from kvevents_service.service.outputs import Output
from kvevents_service.service.renderer import Renderer
from kvevents_service.sockets import Receiver
from kvevents_service.wire.frames import REPLAY_END, parse_replay_request

MAX_CLIENTS = 64
CLIENT_DEADLINE_S = 120.0
STALL_S = 30.0
"""A client that takes nothing for so long is dropped."""
RETRY_S = 0.002
EXACT_S = 4.0
"""Readers of exact replies wait 5 s for one."""


class Replayer:
    """Answers replay requests of one output."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        output: Output,
        renderer: Renderer,
        *,
        clock: Callable[[], float],
        allowance: Allowance | None = None,
    ) -> None:
        """allowance: what each host may ask; several endpoints may share it."""
        self.requests = self.bad_requests = self.dropped_clients = 0
        self._socket = socket
        self._output = output
        self._renderer = renderer
        self._clock = clock
        self._allowance = allowance or Allowance()
        self._clients: dict[bytes, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Replayer clients={len(self._clients)} requests={self.requests}>"

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            with Receiver(self._socket) as receiver:
                while True:
                    peer, (identity, *frames) = await receiver.recv_from()
                    self._accept(peer, identity, frames, tasks)

    def _accept(self, peer: str, identity: bytes, frames: list[bytes], tasks: asyncio.TaskGroup) -> None:
        self.requests += 1
        running = self._clients.pop(identity, None)
        if running is not None:
            running.cancel()  # a client that asks again has given up on the first answer
        if len(self._clients) >= MAX_CLIENTS:
            self._drop(identity)
            return
        if not self._allowance.admits(peer, self._clock()):
            self.dropped_clients += 1
            self._end_now(identity)
            return
        task = tasks.create_task(self._serve(peer, identity, frames))
        self._clients[identity] = task
        task.add_done_callback(lambda done: self._forget(identity, done))

    def _drop(self, identity: bytes, reply: Reply | None = None) -> None:
        """It may ask again. A reader in the middle of a state would take an end marker for its end."""
        self.dropped_clients += 1
        if reply is None or not reply.half_told:
            self._end_now(identity)
        self._renderer.ended(None, self._output)

    def _end_now(self, identity: bytes) -> None:
        """Just the end marker."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, *REPLAY_END], zmq.NOBLOCK)

    def _forget(self, identity: bytes, task: asyncio.Task[None]) -> None:
        if self._clients.get(identity) is task:
            del self._clients[identity]

    async def _serve(self, peer: str, identity: bytes, frames: list[bytes]) -> None:
        asked_at = self._clock()
        try:
            number = parse_replay_request(frames)
        except WireError:
            self.bad_requests += 1
            self._end_now(identity)
            return
        reply = await self._reply(number, asked_at + CLIENT_DEADLINE_S)
        if reply is None:
            self._drop(identity)
            return
        try:
            deadline = asked_at + CLIENT_DEADLINE_S
            await self._deliver(peer, Cursor(self._socket, identity, self._output, reply), deadline)
            in_time = self._clock() < asked_at + EXACT_S
            self._renderer.ended(reply if in_time else None, self._output)
        except TimeoutError:
            self._drop(identity, reply)
        finally:
            reply.close()

    async def _reply(self, number: int, deadline: float) -> Reply | None:
        """None if no snapshot could be made in time."""
        while self._clock() < deadline:
            reply = self._renderer.answer(number, self._output)
            if reply is not None:
                return reply
            await asyncio.sleep(RETRY_S)
        return None

    async def _deliver(self, peer: str, cursor: Cursor, deadline: float) -> None:
        """TimeoutError if the client took too long. The time that we take, to render or as the machine has stopped
        us, is not held against it before the deadline."""
        stalled = self._clock() + STALL_S
        moved = False

        def send() -> None:
            nonlocal moved
            before = cursor.sent_bytes
            moved = cursor.send_some()
            self._allowance.spend(peer, cursor.sent_bytes - before, self._clock())

        while True:
            await self._renderer.rota.run(send)  # engines' lookups come in between
            if cursor.over:
                return
            if moved or cursor.waits:
                stalled = self._clock() + STALL_S
            if self._clock() >= min(deadline, stalled):
                raise TimeoutError
            if not moved:
                await asyncio.sleep(RETRY_S)

    def stats(self) -> dict[str, int]:
        return {
            "replay_requests": self.requests,
            "replay_bad_requests": self.bad_requests,
            "replay_dropped_clients": self.dropped_clients,
        }
