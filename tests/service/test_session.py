"""What a session takes when: frame by frame, in turns with all others."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import pytest

from kvevents_service.service import sidecar
from kvevents_service.service.app import Service
from kvevents_service.service.inspection import Inspection
from kvevents_service.service.rota import Rota
from kvevents_service.service.session import EngineSession
from kvevents_service.wire.control import Inspect, Inspected
from kvevents_service.wire.framing import encode_message


class CountingTransport(asyncio.Transport):
    """A transport that counts, and notes in `log` whose answer was written."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.writes = self.paused = self.resumed = 0
        self.closed = False
        self._name = name
        self._log = log

    def write(self, data: object) -> None:
        self.writes += 1
        self._log.append(self._name)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.paused += 1

    def resume_reading(self) -> None:
        self.resumed += 1


def two_pieces_a_turn(service: Service) -> None:
    """Each look at the clock takes 0.4 ms."""
    looks = count()
    service.sidecar.rota = Rota(lambda: next(looks) * 0.0006, 0.001)


def observer(
    service: Service, name: str = "", log: list[str] | None = None
) -> tuple[EngineSession, CountingTransport]:
    session = EngineSession(99, service.sidecar, None, "observer")
    transport = CountingTransport(name, [] if log is None else log)
    session.connection_made(transport)
    return session, transport


def frames(numbers: Iterable[int]) -> bytes:
    return b"".join(bytes(encode_message(Inspect(n))) for n in numbers)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0)


async def test_a_flood_from_one_engine_leaves_the_turns_to_the_others(run) -> None:
    async with run() as service:
        two_pieces_a_turn(service)
        log: list[str] = []
        (one, flood), (two, other) = observer(service, "flood", log), observer(service, "other", log)
        one.data_received(frames(range(5)))
        assert (flood.writes, flood.paused) == (2, 1)
        two.data_received(frames(range(2)))
        assert (other.writes, other.paused) == (0, 1), "the turn is over"
        await until(lambda: flood.resumed == other.resumed == 1)
        assert log == ["flood", "flood", "flood", "other", "flood", "other", "flood"]


async def test_what_is_there_alone_is_taken_at_once(run) -> None:
    async with run() as service:
        session, transport = observer(service)
        session.data_received(frames([1]))
        assert (transport.writes, transport.paused) == (1, 0)


async def test_what_came_before_a_broken_border_is_taken_first(run) -> None:
    async with run() as service:
        two_pieces_a_turn(service)
        session, transport = observer(service)
        session.data_received(frames(range(5)) + b"\xff" * 8)
        assert (transport.writes, session.errors, transport.closed) == (2, 0, False)
        await until(lambda: transport.closed)
        assert (transport.writes, session.errors, transport.resumed) == (6, 1, 0)


async def test_what_came_before_the_end_is_taken_first(run) -> None:
    async with run() as service:
        two_pieces_a_turn(service)
        session, transport = observer(service)
        session.data_received(frames(range(5)))
        assert session.eof_received()
        assert not transport.closed
        await until(lambda: transport.closed)
        assert (transport.writes, session.errors) == (5, 0)


async def test_of_a_connection_that_is_lost_nothing_is_taken_any_more(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run() as service:
        two_pieces_a_turn(service)
        session, transport = observer(service)
        session.data_received(frames(range(5)))
        monkeypatch.setattr(service.sidecar, "inspect", None)
        session.connection_lost(None)
        await until(lambda: "waiting=0" in repr(service.sidecar.rota))
        assert (transport.writes, session.errors) == (2, 0)
        assert session.closed.done()


class Counting(Inspection):
    """Of three pieces."""

    pieces = 0

    def go_on(self) -> bool:
        Counting.pieces += 1
        return Counting.pieces % 3 > 0

    def inspected(self) -> Inspected:
        return Inspected(0, 0, 8, {})


async def test_a_frame_of_several_pieces_is_through_before_the_next_and_others_come_in_between(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "Inspection", Counting)
    monkeypatch.setattr(Counting, "pieces", 0)
    async with run() as service:
        two_pieces_a_turn(service)
        log: list[str] = []
        (one, slow), (two, other) = observer(service, "slow", log), observer(service, "other", log)
        one.data_received(frames(range(2)))
        two.data_received(frames(range(1)))
        assert (log, slow.paused, other.paused) == ([], 1, 1)
        await until(lambda: slow.resumed == other.resumed == 1)
        assert log == ["slow", "other", "slow"]


async def test_what_is_left_of_a_frame_ends_with_its_connection(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "pieces", 0)
    monkeypatch.setattr(sidecar, "Inspection", Counting)
    async with run() as service:
        two_pieces_a_turn(service)
        session, transport = observer(service)
        session.data_received(frames(range(2)))
        session.connection_lost(None)
        await until(lambda: "waiting=0" in repr(service.sidecar.rota))
        assert (transport.writes, Counting.pieces) == (0, 2)


async def test_a_bug_of_ours_costs_the_session_and_is_told(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run() as service:
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        session, transport = observer(service)
        monkeypatch.setattr(session, "send", lambda message: 1 / 0)
        session.data_received(b"\xff" * 8)
        assert transport.closed
        assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
