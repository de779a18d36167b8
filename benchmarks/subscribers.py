"""64 subscribers, one of them stopped: does the 99th percentile of the others' delay change?

A publisher coroutine sends batches of 64 blocks at a steady rate to 63 subscriber sockets in three processes, and
to one in a process of its own, which is stopped (SIGSTOP) in one of every two rounds, by lot in the first or the
second. Queues and buffers are short, so that its own are full for half of such a round. Delay: from `publish` to
the batch in the subscriber's hands, by the clock that all processes of a machine share (CLOCK_MONOTONIC); it stands
in the place of the batch's time.

Rounds are short and many, and each is compared with its neighbour only: what the machine does otherwise meets both.
The value is the median of the pairs' ratios; `interval` holds the true median with 95 % certainty, whatever the
distribution (order statistics), and the answer is `conclusive` when all of it is on one side of the target. The
stopped one must lose something, or it was not stopped for long enough; the others nothing (`meets_lost`).
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import comb
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from statistics import median, quantiles
from typing import NamedTuple

import uvloop
import zmq

from benchmarks.harness import Spread, note, report
from benchmarks.publish import BLOCKS, snapshots
from kvevents_service.cli.tuning import GC_THRESHOLD
from kvevents_service.core.journal import Journal
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher

PROCESSES, SOCKETS = 3, 21
"""And one socket more, to be stopped."""
PAIRS = 30
"""Of a round with one stopped and one with all of them running."""
ROUNDS = 1 + 2 * PAIRS
"""The first warms up."""
BATCHES, INTERVAL_S = 300, 0.005
CERTAINTY = 0.95
SEND_HIGH_WATER_MARK, RECEIVE_HIGH_WATER_MARK = 120, 20
SEND_BUFFER_BYTES = RECEIVE_BUFFER_BYTES = 64 * 1024
"""Of the kernel, which would grow them to megabytes."""
SETTLE_S = 0.25
TARGET_RATIO = 1.25
"""Unchanged, as far as this can tell."""
DEADLINE_MS = 20_000
_TIME = struct.Struct(">d")
_TIME_AT = 2
"""A batch begins with the byte of its array and the one of a float64."""


class Heard(NamedTuple):
    """Delays in seconds of each round, of all sockets of a process, and how many batches they lost."""

    delays: list[list[float]]
    lost: int


def listen(endpoint: str, sockets: int, batches: int, high_water_mark: int, answers: Connection) -> None:
    """Receive on so many sockets until each has had the last number; answer with what was heard."""
    gc.set_threshold(GC_THRESHOLD)
    with zmq.Context() as context:
        ears = [_ear(context, endpoint, high_water_mark) for _ in range(sockets)]
        answers.send(_listened(ears, batches))
        for ear in ears:
            ear.close()


def _ear(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, high_water_mark: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket


def _listened(ears: list[zmq.Socket[bytes]], batches: int) -> Heard:
    poller = zmq.Poller()
    for ear in ears:
        poller.register(ear, zmq.POLLIN)
    heard = Heard([[] for _ in range(batches // BATCHES)], 0)
    received, open_ears = 0, len(ears)
    while open_ears and (ready := poller.poll(DEADLINE_MS)):
        for ear, _ in ready:
            _, seq_frame, payload = ear.recv_multipart()
            delay = time.monotonic() - _TIME.unpack_from(payload, _TIME_AT)[0]
            seq = int.from_bytes(seq_frame, "big")
            heard.delays[seq // BATCHES].append(delay)
            received += 1
            if seq == batches - 1:
                poller.unregister(ear)
                open_ears -= 1
    return heard._replace(lost=len(ears) * batches - received)


class Listener(NamedTuple):
    """A process of subscribers."""

    process: BaseProcess
    answers: Connection

    def heard(self) -> Heard:
        assert self.answers.poll(DEADLINE_MS / 1000), "no answer"
        answer: Heard = self.answers.recv()
        self.process.join()
        return answer


def start_listener(endpoint: str, sockets: int, batches: int, high_water_mark: int) -> Listener:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=listen, args=(endpoint, sockets, batches, high_water_mark, theirs), daemon=True)
    process.start()
    return Listener(process, ours)


@contextmanager
def stopped(listener: Listener) -> Iterator[None]:
    assert listener.process.pid is not None
    os.kill(listener.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(listener.process.pid, signal.SIGCONT)


async def publish_round(publisher: Publisher, metas: list[BlockStoreMeta]) -> None:
    """One batch every INTERVAL_S; after a stall of ours the later ones come later, not all at once."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    for number in range(BATCHES):
        publisher.publish((metas[number % len(metas)],))
        due = max(due + INTERVAL_S, loop.time())
        await asyncio.sleep(due - loop.time())


async def publish_all(publisher: Publisher, metas: list[BlockStoreMeta], victim: Listener) -> None:
    """Every round; after each, queues may empty."""
    running = asyncio.create_task(publisher.run())
    for number in range(ROUNDS):
        with stopped(victim) if is_stopped(number) else nullcontext():
            await publish_round(publisher, metas)
        await asyncio.sleep(SETTLE_S)
    running.cancel()


def is_stopped(number: int) -> bool:
    """Whether the one is stopped in this round: the first or the second of its pair."""
    pair, place = divmod(number - 1, 2)
    return number > 0 and place == Random(pair).getrandbits(1)


@contextmanager
def bound() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A socket as the event plane binds it, but that it tells of every subscription; and its endpoint."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
        socket.bind("tcp://127.0.0.1:0")
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Measured(NamedTuple):
    """Delays of the 63, by round, without the first; how many batches they lost, and the stopped one."""

    rounds: list[list[float]]
    lost: int
    lost_by_stopped: int


def measure() -> Measured:
    batches = ROUNDS * BATCHES
    with bound() as (socket, endpoint):
        others = [start_listener(endpoint, SOCKETS, batches, 0) for _ in range(PROCESSES)]
        victim = start_listener(endpoint, 1, batches, RECEIVE_HIGH_WATER_MARK)
        for _ in range(PROCESSES * SOCKETS + 1):
            assert socket.poll(DEADLINE_MS), "a subscriber is missing"
            socket.recv()
        publisher = Publisher(Journal(), [Output(socket)], numbers=None, wall_clock=time.monotonic)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(publish_all(publisher, snapshots(), victim))
        heard = [listener.heard() for listener in others]
        lost_by_stopped = victim.heard().lost
    assert lost_by_stopped, "the stopped one missed nothing"
    rounds = [[delay for one in heard for delay in one.delays[number]] for number in range(1, ROUNDS)]
    return Measured(rounds, sum(one.lost for one in heard), lost_by_stopped)


def p99_ms(delays: list[float]) -> float:
    return quantiles(delays, n=100)[98] * 1e3


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Holds the median of what these are drawn from with CERTAINTY: how many of them are below it is a matter of so
    many tosses of a coin. Six at least."""
    ordered, count = sorted(values), len(values)
    tail, outside = 0.0, -1
    while (tail := tail + comb(count, outside + 1) / 2**count) <= (1 - CERTAINTY) / 2:
        outside += 1
    return ordered[outside], ordered[-1 - outside]


def pairs(p99s: list[float]) -> list[tuple[float, float]]:
    """Of each pair of rounds: running, one stopped. The first of `p99s` is of round 1."""
    both = list(zip(p99s[::2], p99s[1::2], strict=True))
    return [
        (second, first) if is_stopped(1 + 2 * pair) else (first, second)
        for pair, (first, second) in enumerate(both)
    ]


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    rounds, lost, lost_by_stopped = measure()
    p99s = pairs([p99_ms(delays) for delays in rounds])
    p50s = pairs([median(delays) * 1e3 for delays in rounds])
    ratios = [during / usual for usual, during in p99s]
    low, high = interval_of_median(ratios)
    running, during = Spread.of([usual for usual, _ in p99s]), Spread.of([during for _, during in p99s])
    noise = interval_of_median([later / before for (before, _), (later, _) in pairwise(p99s)])
    note(f"p99 {running} ms, one stopped {during} ms; ratio {Spread.of(ratios)}, median in {low:.3g} to {high:.3g}")
    report(
        "subscribers",
        Spread.of(ratios),
        "p99 delay with one of 64 stopped / with none",
        TARGET_RATIO,
        interval=[low, high],
        conclusive=high <= TARGET_RATIO or low > TARGET_RATIO,
        noise_interval=list(noise),
        p99_ms=running.median,
        p99_stopped_ms=during.median,
        p50_ms=median(usual for usual, _ in p50s),
        p50_stopped_ms=median(during for _, during in p50s),
        subscribers=PROCESSES * SOCKETS + 1,
        blocks_per_s=BLOCKS / INTERVAL_S,
        delays=sum(map(len, rounds)),
        lost_by_stopped=lost_by_stopped,
        lost_by_others=lost,
        meets_lost=not lost,
    )


if __name__ == "__main__":
    main()
