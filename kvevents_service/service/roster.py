"""Who is connected: engines, and the sessions that hold the memory of their ranks.

An engine that brings its memory itself is its own rank 0. Else its workers do, found by its `engine_id`. They come
and leave in any order; one waits here for an engine that has not come yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvevents_service.errors import ControlError
from kvevents_service.transfer.memory import SessionMemory
from kvevents_service.wire.control import GroupSpec, Hello, SidecarMessage


class Session(Protocol):
    """What the sidecar needs of a connection."""

    session_id: int
    memory: SessionMemory | None
    mark: int | None
    copies: int
    closed: asyncio.Future[None]

    def send(self, message: SidecarMessage) -> None: ...

    def copy_ended(self) -> None: ...


class Head(NamedTuple):
    """What engines say of their blocks before any memory is there. It must agree for them to share a tier."""

    namespace: str
    hash_bytes: int
    groups: tuple[GroupSpec, ...]
    hash_tokens: int
    ranks: int


class Engine(NamedTuple):
    """One connected engine."""

    session: Session
    engine_id: str
    head: Head

    @property
    def session_id(self) -> int:
        return self.session.session_id


class Worker(NamedTuple):
    """One connected worker. `ranks` is how many it says its engine has."""

    session: Session
    engine_id: str
    rank: int
    ranks: int


class Roster:
    """Sessions by what they are. A place is free again when the connection that had it has ended."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        self._workers: dict[int, Worker] = {}
        self._places: dict[tuple[str, int | None], Session] = {}

    def __repr__(self) -> str:
        return f"<Roster engines={len(self.engines)} workers={len(self._workers)}>"

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def places(self) -> int:
        """Names and ranks that are taken, until their last connection has let go of its memory."""
        return len(self._places)

    # come and go

    def add_engine(self, engine: Engine) -> None:
        """ControlError if another engine that has workers is connected under this name."""
        if engine.session.memory is None:
            if any(worker.ranks != engine.head.ranks for worker in self._workers_of(engine.engine_id)):
                raise ControlError("bad_rank", "ranks", "the number that its connected workers say")
            place = (engine.engine_id, None)
            if place in self._places:
                raise ControlError("engine_taken", "engine_id", "a name that no other connection has")
            self._take(place, engine.session)
        self.engines[engine.session_id] = engine

    def add_worker(self, session: Session, hello: Hello) -> None:
        """ControlError if the rank is taken, or its engine or another worker of it has another number of ranks."""
        engine = self.engine_named(hello.engine_id)
        said = [worker.ranks for worker in self._workers_of(hello.engine_id)]
        said += [] if engine is None else [engine.head.ranks]
        if any(ranks != hello.ranks for ranks in said):
            raise ControlError("bad_rank", "ranks", f"{said[0]}, as engine {hello.engine_id[:64]!r} has")
        place = (hello.engine_id, hello.rank)
        if place in self._places:
            raise ControlError("rank_taken", "rank", "a rank whose last worker's connection has ended")
        self._take(place, session)
        self._workers[session.session_id] = Worker(session, hello.engine_id, hello.rank, hello.ranks)

    def _take(self, place: tuple[str, int | None], session: Session) -> None:
        self._places[place] = session
        session.closed.add_done_callback(lambda _: self._places.pop(place))

    def remove(self, session: Session) -> Engine | None:
        """The session leaves. Returns the engine that this touches: itself, or the one whose rank is away now."""
        worker = self._workers.pop(session.session_id, None)
        if worker is not None:
            return self.engine_named(worker.engine_id)
        return self.engines.pop(session.session_id, None)

    # who belongs together

    def engine_named(self, engine_id: str) -> Engine | None:
        """The engine with workers of this name, if it is connected."""
        named = (engine for engine in self.engines.values() if engine.engine_id == engine_id)
        return next((engine for engine in named if engine.session.memory is None), None)

    def _workers_of(self, engine_id: str) -> Iterator[Worker]:
        return (worker for worker in self._workers.values() if worker.engine_id == engine_id)

    def holders(self, engine: Engine) -> dict[int, Session]:
        """The sessions that hold the engine's memory now, by rank."""
        if engine.session.memory is not None:
            return {0: engine.session}
        return {worker.rank: worker.session for worker in self._workers_of(engine.engine_id)}
