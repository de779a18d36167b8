"""A registered connection and what is outstanding on it: every step and load accepted ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvevents_service.engine.connection import Connection
from kvevents_service.errors import SidecarGone, WireError
from kvevents_service.wire.control import (
    Error,
    Inspected,
    Load,
    Loaded,
    ResetDone,
    Step,
    StepDone,
    Welcome,
)
from kvevents_service.wire.control import Hit as HitMessage
from kvevents_service.wire.name_board import NameBoard

Answer = HitMessage | ResetDone | Inspected | Error
Completion = StepDone | Loaded


class Link:
    """Sends and receives on one connection, and keeps the books. Not thread safe."""

    def __init__(self, connection: Connection, welcome: Welcome, board: NameBoard | None = None) -> None:
        self.connection = connection
        self.welcome = welcome
        self.board = board
        self.suspect = False
        self.broken = False
        self._steps: set[int] = set()
        self._loads: set[int] = set()

    def __repr__(self) -> str:
        return f"<Link steps={len(self._steps)} loads={len(self._loads)} suspect={self.suspect}>"

    @property
    def outstanding(self) -> int:
        return len(self._steps) + len(self._loads)

    def send(self, messages: Sequence[msgspec.Struct], wait_s: float) -> bool:
        """Send and remember. False: nothing was sent. SidecarGone: see `abandoned`."""
        if not self.connection.send(messages, wait_s):
            return False
        for message in messages:
            match message:
                case Step():
                    self._steps.add(message.step_id)
                case Load():
                    self._loads.add(message.load_id)
        return True

    def receive(self) -> Iterator[Completion | Answer]:
        """What has arrived; never waits. SidecarGone: see `abandoned` and `broken`."""
        for message in self.connection.receive():
            self.suspect = False
            if isinstance(message, StepDone | Loaded):
                yield from self._ends(message)
            elif not isinstance(message, Welcome):
                yield message
                yield from self._refused(message)

    def _ends(self, end: Completion) -> Iterator[Completion]:
        """Settle the books. What is not in them has ended before, whatever the sidecar says: it ends once."""
        books, number = (self._steps, end.step_id) if isinstance(end, StepDone) else (self._loads, end.load_id)
        if number in books:
            books.discard(number)
            yield end

    def _refused(self, message: Answer) -> Iterator[Completion]:
        """A refused step or load ends here: the sidecar never touched a block of it."""
        match message:
            case Error(call_id=int() as number) if number in self._steps:
                yield from self._ends(StepDone(number, 0, 0, 0))
            case Error(call_id=int() as number) if number in self._loads:
                yield from self._ends(Loaded(number, 0))

    def abandoned(self) -> list[Completion]:
        """After EOF: the ends of everything that was outstanding. No copy of it is running any more."""
        ends: list[Completion] = [StepDone(step_id, 0, 0, 0) for step_id in sorted(self._steps)]
        ends += [Loaded(load_id, 0) for load_id in sorted(self._loads)]
        self._steps.clear()
        self._loads.clear()
        return ends

    def drain(self) -> tuple[list[Completion], bool]:
        """Completions that have arrived, and True once the connection has ended. For a link that was hung up.

        Only EOF ends it: bytes that are no messages do not say that our memory is free.
        """
        ends: list[Completion] = []
        try:
            if not self.broken:
                ends += [message for message in self.receive() if isinstance(message, StepDone | Loaded)]
        except SidecarGone as error:
            self.broken = True
            if not isinstance(error.__cause__, WireError):
                return ends + self._close(), True
        if self.broken and self.connection.at_eof():
            return ends + self._close(), True
        return ends, False

    def _close(self) -> list[Completion]:
        self.connection.close()
        return self.abandoned()
