"""One connected engine, worker or observer: frames in, core verbs, frames out.

A frame that cannot be understood or may not be done is answered with an `Error` and changes nothing. The
connection ends only by its own peer, by a broken frame border, or by a peer that does not read its answers; and
never while a copy touches the peer's memory: to the engine, EOF means that no copy of ours is running (I9).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvevents_service.core.step_parts import StepParts, step_blocks
from kvevents_service.errors import ControlError, WireError
from kvevents_service.service.rota import Piece
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.transfer.memory import SessionMemory
from kvevents_service.wire.control import (
    ClientMessage,
    Error,
    Hello,
    Inspect,
    Load,
    Lookup,
    Mark,
    Release,
    Reset,
    SidecarMessage,
    Step,
    StepDone,
)
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message, peek_id

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""Answers a peer may leave unread before it is taken for dead."""
CLOSE_S = 5.0


class EngineSession(asyncio.Protocol):
    """The protocol of one session, after its hello."""

    def __init__(self, session_id: int, sidecar: Sidecar, memory: SessionMemory | None, role: str) -> None:
        self.session_id = session_id
        self.memory = memory
        self.mark: int | None = None
        self.copies = 0
        self.errors = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sidecar = sidecar
        self._reader = FrameReader()
        self._arrived: deque[bytes | memoryview | WireError | None] = deque()
        """Frames; a broken frame border; None, the end of what the peer sends."""
        self._under_way: Piece | None = None
        """What is left of the frame before: it is through before the next is taken."""
        self._long: dict[int, StepParts] = {}
        """Steps of which parts have not ended, by the id of those."""
        self._waits = self._paused = False
        self._transport: asyncio.Transport | None = None
        self._ending = self._letting_go = False
        self._verbs: dict[type, Callable[[Any], None]] = {
            Inspect: self._inspect,
            **({Mark: self._mark} if memory is not None else {}),
            **(self._engine_verbs() if role == "engine" else {}),
        }

    def __repr__(self) -> str:
        return f"<EngineSession {self.session_id} copies={self.copies} errors={self.errors}>"

    def _engine_verbs(self) -> dict[type, Callable[[Any], None]]:
        return {
            Step: self._step,
            Lookup: self._lookup,
            Load: self._load,
            Release: self._release,
            Reset: self._reset,
        }

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._arrived.extend(self._reader.feed(data))
        except WireError as error:
            self._arrived.append(error)
        self._await_turn()

    def _await_turn(self) -> None:
        """Each frame is a piece of the rota: no engine keeps the others waiting. What waits here is one read."""
        if self._arrived and not self._waits:
            self._waits = True
            self._sidecar.rota.take(self._take_next)
        if self._waits and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _take_next(self) -> bool:
        try:
            self._take_piece()
        except BaseException:
            self.abort()  # as asyncio does when data_received raises
            raise
        self._waits = bool(self._arrived) or self._under_way is not None
        if self._paused and not self._waits:
            self._paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return self._waits

    def _take_piece(self) -> None:
        if self._under_way is None:
            self._take(self._arrived.popleft())
        elif self._transport is None or self._ending or not self._under_way():
            self._under_way = None

    def eof_received(self) -> bool:
        self._arrived.append(None)
        self._await_turn()
        return True  # keep our side open: we close when no copy touches the peer's memory

    def connection_lost(self, exc: Exception | None) -> None:
        self._sidecar.dismiss(self)
        self._transport = None
        self.copy_ended()

    # frames

    def _take(self, body: bytes | memoryview | WireError | None) -> None:
        if self._ending or self._transport is None:
            return
        if body is None:
            self.end()
        elif isinstance(body, WireError):
            self._refuse(None, "bad_frame", body.field, body.expected)
            self.end()
        else:
            self._take_frame(body)

    def _take_frame(self, body: bytes | memoryview) -> None:
        try:
            message = decode_client(body)
        except WireError as error:
            self._refuse(peek_id(body), "bad_message", error.field, error.expected)
            return
        self._perform(message)

    def _perform(self, message: ClientMessage) -> None:
        verb = self._verbs.get(type(message), self._wrong_verb)
        try:
            verb(message)
        except ControlError as error:
            self._refuse(_call_id(message), error.code, error.field, error.expected)
        except Exception:  # the border of a session: a bug of ours must not take the other engines along
            log.exception("session %d: %s failed", self.session_id, type(message).__name__)
            self._refuse(_call_id(message), "internal", "message", "the sidecar to have no bug here")

    def _refuse(self, call_id: int | None, code: str, field: str, expected: str) -> None:
        self.errors += 1
        self._sidecar.errors[code] += 1
        self.send(Error(call_id, code, field, expected))

    def send(self, message: SidecarMessage) -> None:
        """Write one frame, unless the peer is gone. Never waits; bounded by MAX_UNREAD_BYTES.

        The end of a part of a step is no frame: that of the last part is one for all of them.
        """
        if self._transport is None or self._ending:
            return
        if isinstance(message, StepDone) and message.step_id in self._long:
            done = self._long[message.step_id].ended(message)
            if done is None:
                return
            del self._long[message.step_id]
            message = done
        self._transport.write(encode_message(message))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("session %d does not read its answers: ended", self.session_id)
            self.end()

    # the end

    def end(self) -> None:
        """Take no more frames; close once no copy touches the peer's memory."""
        self._ending = True
        self._sidecar.dismiss(self)
        self.copy_ended()

    def abort(self) -> None:
        """Cut the connection. Only when no worker runs any more."""
        if self._transport is not None:
            self._transport.abort()

    def copy_ended(self) -> None:
        """A copy of this session has ended: if it was the last of an ending session, let go of the memory."""
        if self.copies or not (self._ending or self._transport is None):
            return
        if self.memory is None:
            self._finish()
        elif not self._letting_go:
            self._letting_go = True  # in a thread: to unmap much memory takes long
            gone = asyncio.get_running_loop().run_in_executor(None, self.memory.close)
            gone.add_done_callback(self._let_go)

    def _let_go(self, gone: asyncio.Future[None]) -> None:
        self.memory = None
        if not gone.cancelled() and gone.exception() is not None:
            log.error("session %d: its memory could not be closed", self.session_id, exc_info=gone.exception())
        self._finish()

    def _finish(self) -> None:
        """To the peer, EOF says that its memory is out of use here."""
        if self._transport is not None:
            self._close(self._transport)
        elif not self.closed.done():
            self.closed.set_result(None)

    def _close(self, transport: asyncio.Transport) -> None:
        """Let the peer read its last answers, for CLOSE_S at most."""
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            transport.abort()
        else:
            transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self.abort)

    # verbs

    def _step(self, step: Step) -> None:
        self._sidecar.check_open()
        self._name_mark(step.mark)
        long = self._scheduler.long_step(self.session_id, step)
        if long is None:
            self._store(step)
            return
        self._long[long.part_id] = long
        limits = self._scheduler.tier.limits
        self._under_way = partial(self._store_next, long, long.parts(limits.step_blocks))

    def _store_next(self, long: StepParts, parts: Iterator[Step]) -> bool:
        """Of a step that was found good; what cannot be stored any more is declined."""
        try:
            part = next(parts, None)
            if part is not None:
                self._store_part(long, part)
        except Exception:  # as in `_perform`; but no error may end a step that is being copied: EOF does, in time
            log.exception("session %d: a part of a step failed", self.session_id)
            self._refuse(None, "internal", "message", "the sidecar to have no bug here")
            self.end()
            return False
        return part is not None

    def _store_part(self, long: StepParts, part: Step) -> None:
        try:
            self._sidecar.check_open()
            self._store(part, void=long.void)
        except ControlError:
            self.send(StepDone(part.step_id, 0, 0, step_blocks(part)))

    def _store(self, step: Step, *, void: bool = False) -> None:
        self._sidecar.perform(self._scheduler.step(self.session_id, step, self._sidecar.clock(), void=void))

    def _lookup(self, lookup: Lookup) -> None:
        self.send(self._scheduler.lookup(self.session_id, lookup, self._sidecar.clock()))

    def _load(self, load: Load) -> None:
        self._sidecar.check_open()
        self._name_mark(load.mark)
        self._sidecar.perform(self._scheduler.load(self.session_id, load, self._sidecar.clock()))

    def _name_mark(self, mark: int | None) -> None:
        """Copies from here on wait for it. ControlError for one that cannot come before they are given up."""
        most = self._sidecar.roster.most_mark(self)
        if mark is not None and mark > most:
            raise ControlError("bad_mark", "mark", f"at most {most}: one that is named must be reached soon")
        if mark is not None:
            self.mark = max(mark, -1 if self.mark is None else self.mark)

    def _mark(self, mark: Mark) -> None:
        assert self.memory is not None, "only sessions with memory have this verb"
        self.memory.marks.note(mark.number)

    def _release(self, release: Release) -> None:
        self._scheduler.release(self.session_id, release)

    def _reset(self, reset: Reset) -> None:
        self._sidecar.reset(self.session_id, reset)

    def _inspect(self, inspect: Inspect) -> None:
        inspection = self._sidecar.inspect(inspect.call_id, residents=inspect.residents)

        def go_on() -> bool:
            more = inspection.go_on()
            if not more:
                self.send(inspection.inspected())
            return more

        self._under_way = go_on if go_on() else None

    def _wrong_verb(self, message: ClientMessage) -> None:
        name = type(message).__name__.lower()
        raise ControlError("not_now", "message", f"no {name} from this role, or at this point of a session")

    @property
    def _scheduler(self):  # type: ignore[no-untyped-def]
        tier = self._sidecar.tier
        assert tier is not None, "an engine session has opened the tier"
        return tier.scheduler


def _call_id(message: ClientMessage) -> int | None:
    match message:
        case Hello() | Release() | Mark():
            return None
        case Step(step_id=number) | Load(load_id=number):
            return number
        case _:
            return message.call_id
