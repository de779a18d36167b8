"""The engine's side of `events_cost`: offers with metadata and without, to a process that reads and answers."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.events_cases import WARM_UP, Case, Costs, Identity, Requests, bare, block_ids, described
from kvevents_service.engine.connection import Connection
from kvevents_service.wire.control import Step, StepDone
from kvevents_service.wire.framing import FrameReader, encode_message

ROUNDS = 60


def answer(sock: socket.socket) -> None:
    """Read frames and answer each one, until the other end is closed."""
    reader, steps = FrameReader(), 0
    while data := sock.recv(1 << 20):
        for _ in reader.feed(data):
            steps += 1
            sock.sendall(encode_message(StepDone(steps, 0, 0, 0)))


@contextmanager
def connected() -> Iterator[Connection]:
    """A connection whose other end is in another process."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs,))
    process.start()
    theirs.close()
    connection = Connection(ours)
    yield connection
    connection.close()
    process.join()


class EngineSide:
    """An engine that offers its blocks with metadata or without."""

    def __init__(self, case: Case, connection: Connection) -> None:
        self.connection = connection
        self.requests, self.identity, self.block_ids = Requests(case), Identity.of(case), block_ids(case)
        self._steps = 0

    def seconds(self, *, metadata: bool) -> float:
        """CPU seconds of the thread for one step of new blocks."""
        chains = self.requests.chains()
        parents = self.requests.parents(chains)
        self._steps += 1
        started = time.thread_time()
        if metadata:
            offers = [
                described(chain, ids, parent, self.identity)
                for chain, ids, parent in zip(chains, self.block_ids, parents, strict=True)
            ]
        else:
            offers = [bare(chain, ids) for chain, ids in zip(chains, self.block_ids, strict=True)]
        sent = self.connection.send(Step(self._steps, offers), 1.0)
        del offers
        ended = time.thread_time()
        assert sent
        self._wait_answer()
        return ended - started

    def _wait_answer(self) -> None:
        while not list(self.connection.receive()):
            self.connection.wait(1.0)


def engine_costs(case: Case) -> Costs:
    with connected() as connection:
        side = EngineSide(case, connection)
        rounds = [
            (side.seconds(metadata=False), side.seconds(metadata=True), side.seconds(metadata=False))
            for _ in range(ROUNDS + WARM_UP)
        ]
    return Costs.of(rounds[WARM_UP:], case.step_blocks)
