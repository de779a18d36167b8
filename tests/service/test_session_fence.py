"""EOF is the fence: a session closes only when no copy touches its peer's memory (I9)."""

import asyncio
import threading
from typing import Any

from kvevents_service.service.rota import Rota
from kvevents_service.service.session import MAX_UNREAD_BYTES, EngineSession
from kvevents_service.wire.control import ResetDone


class Books:
    """Stands for the sidecar: only remembers who was dismissed."""

    def __init__(self) -> None:
        self.dismissed: list[object] = []
        self.rota = Rota()

    def dismiss(self, session: object) -> None:
        self.dismissed.append(session)


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, unread: int = 0) -> None:
        super().__init__()
        self.closed = self.aborted = False
        self.unread = unread

    def write(self, data: Any) -> None:
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def connected(copies: int, unread: int = 0) -> tuple[EngineSession, Pipe, Books]:
    books, pipe = Books(), Pipe(unread)
    session = EngineSession(1, books, None, "observer")  # type: ignore[arg-type]
    session.copies = copies
    session.connection_made(pipe)
    return session, pipe, books


async def test_eof_of_the_engine_is_answered_when_its_last_copy_has_ended() -> None:
    session, pipe, books = connected(copies=2)
    assert session.eof_received() is True
    assert books.dismissed == [session]
    assert not pipe.closed
    session.copies = 0
    session.copy_ended()
    assert pipe.closed


async def test_memory_is_let_go_only_after_the_last_copy() -> None:
    session, _, _ = connected(copies=1)
    session.connection_lost(None)
    assert not session.closed.done()
    session.copies = 0
    session.copy_ended()
    assert session.closed.done()


class SlowMemory:
    """Memory that takes until `go` to be closed."""

    def __init__(self) -> None:
        self.go, self.closed = threading.Event(), 0

    def close(self) -> None:
        self.go.wait(10)
        self.closed += 1


async def test_eof_comes_when_the_memory_is_closed_off_the_loop() -> None:
    session, pipe, _ = connected(copies=0)
    session.memory = memory = SlowMemory()  # type: ignore[assignment]
    session.eof_received()
    await asyncio.sleep(0.01)
    assert (pipe.closed, memory.closed) == (False, 0)
    session.copy_ended()
    memory.go.set()
    while not pipe.closed:
        await asyncio.sleep(0.001)
    session.connection_lost(None)
    assert (memory.closed, session.closed.done()) == (1, True)


async def test_a_peer_that_reads_no_answer_is_given_up() -> None:
    session, pipe, books = connected(copies=0, unread=MAX_UNREAD_BYTES)
    session.send(ResetDone(1, 0))
    assert books.dismissed == [session]
    assert pipe.aborted
