"""A new joiner is told 1 M resident blocks: the rate of a snapshot-backed replay as a share of raw sending.

One process has the event plane of `kvevents serve` (`bind_events`) and a pool of runs of 64 blocks, whose stores
it has published and mostly forgotten; another asks for number 0 on the replay endpoint and receives up to the end
marker, undecoded. "first": nobody asked before, so the state is cut and rendered meanwhile. "second": a joiner
within seconds, who shares what was rendered. Raw: the very messages of that reply from a ROUTER of the same options
to the same kind of process, in a plain loop. Stall: the longest time that the publisher's loop did not look at its
timers, as it passes and as CPU time of its thread; the first counts what neighbours take as well.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import uvloop
import zmq

from benchmarks.harness import Spread, note, report
from benchmarks.index_memory import BLOCKS, CHAIN_BLOCKS, RUN_BLOCKS, make_scheduler, steps
from kvevents_service.cli.tuning import GC_THRESHOLD
from kvevents_service.config import ServeConfig
from kvevents_service.core.commands import Copy, Publish
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.service.cursor import SHARED_BYTES
from kvevents_service.service.event_plane import ANSWER_HIGH_WATER_MARK, EventPlane, bind_events
from kvevents_service.wire.frames import REPLAY_END, Payload, parse_replay_reply, replay_reply, replay_request

RUNS = 5
TARGET_RATIO = 0.5
DEADLINE_S = 60.0
TICK_S = 0.001
ANYWHERE = "tcp://127.0.0.1:0"
RETAINED_BATCHES = 16
JOINER_HIGH_WATER_MARK = 100_000
"""As `Subscriber` sets it."""


class Heard(NamedTuple):
    """A reply as its reader has it, from the request to the end marker."""

    seconds: float
    messages: int
    payload_bytes: int


def join(asked: Connection) -> None:
    """Ask every endpoint that is named for number 0; answer with what was heard."""
    while (endpoint := asked.recv()) is not None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set_hwm(JOINER_HIGH_WATER_MARK)
            socket.connect(endpoint)
            asked.send(_heard(socket))


def _heard(socket: zmq.Socket[bytes]) -> Heard:
    started, messages, size = time.perf_counter(), 0, 0
    socket.send_multipart(replay_request(0))
    while socket.poll(int(DEADLINE_S * 1000)):
        reply = parse_replay_reply(socket.recv_multipart())
        if reply is None:
            return Heard(time.perf_counter() - started, messages, size)
        assert reply.seq == messages, "a number is missing"
        messages += 1
        size += len(reply.payload)
    raise AssertionError("the reply did not end")


class Cost(NamedTuple):
    """MB of payload a second, CPU of the sender's process in ms, its loop's worst stall in ms and in ms of CPU."""

    mb_per_s: float
    cpu_ms: float
    stall_ms: float
    stall_cpu_ms: float


class Joiner:
    """A process that joins when it is told."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    async def joined(self, endpoint: str) -> Heard:
        self.pipe.send(endpoint)
        return await self.answer()

    async def answer(self) -> Heard:
        there = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), there.set)
        async with asyncio.timeout(DEADLINE_S):
            await there.wait()
        asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        heard: Heard = self.pipe.recv()
        return heard


@contextmanager
def joiner() -> Iterator[Joiner]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=join, args=(theirs,))
    process.start()
    try:
        yield Joiner(ours)
    finally:
        ours.send(None)
        process.join(DEADLINE_S)


def fill(scheduler: OffloadScheduler, plane: EventPlane) -> None:
    """Store a million blocks and publish them; nobody hears it."""
    for step in steps(RUN_BLOCKS):
        for copy in scheduler.step(1, step, 0.0):
            done = scheduler.complete(copy.transfer) if isinstance(copy, Copy) else []
            for command in done:
                if isinstance(command, Publish):
                    plane.publisher.publish(command.announcements)
        plane.publisher.send_pending()


class Meter:
    """What a reply costs: the worst stall of this loop, and CPU time of this process. All in ms."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._worst = self._worst_cpu = 0.0
        self._started_cpu = time.process_time()

    async def watch(self) -> None:
        while True:
            started, started_cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self._worst = max(self._worst, time.perf_counter() - started - TICK_S)
            self._worst_cpu = max(self._worst_cpu, time.thread_time() - started_cpu)

    def read(self, heard: Heard) -> Cost:
        cpu = time.process_time() - self._started_cpu
        cost = Cost(
            heard.payload_bytes / heard.seconds / 1e6, *(ms * 1e3 for ms in (cpu, self._worst, self._worst_cpu))
        )
        self.restart()
        return cost


def messages_of(plane: EventPlane) -> list[list[Payload]]:
    """The reply to a request for number 0, once its snapshot is rendered."""
    reply = plane.renderer.recovery.answer(0, 0)
    assert reply is not None
    made = []
    while isinstance(payload := reply.payload(), Payload):
        made.append(replay_reply(b"", reply.seq, payload))
        reply.advance()
    reply.close()
    return made


async def raw(joiner: Joiner, messages: list[list[Payload]]) -> Heard:
    """The same messages from a socket of the same kind, as fast as it takes them."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, ANSWER_HIGH_WATER_MARK)
        socket.copy_threshold = SHARED_BYTES
        socket.bind(ANYWHERE)
        joiner.pipe.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        identity, *_ = socket.recv_multipart()
        for frames in messages:
            socket.send_multipart([identity, *frames], copy=len(frames[-1]) < SHARED_BYTES)
        socket.send_multipart([identity, *REPLAY_END])
        return await joiner.answer()


class Round(NamedTuple):
    """What each kind cost, and the reply."""

    first: Cost
    second: Cost
    raw: Cost
    reply: Heard


async def one_round(joiner: Joiner, plane: EventPlane, meter: Meter) -> Round:
    """All three after each other, so that they meet the same neighbours."""
    endpoint = plane.bound[0].replay
    assert endpoint is not None
    plane.renderer.recovery.snapshots.clear()
    meter.restart()
    first = await joiner.joined(endpoint)
    first_cost = meter.read(first)
    second = await joiner.joined(endpoint)
    second_cost = meter.read(second)
    assert plane.renderer.recovery.snapshots[-1].blocks >= BLOCKS
    messages = messages_of(plane)
    meter.restart()
    plain = await raw(joiner, messages)
    assert first[1:] == second[1:] == plain[1:], (first, second, plain)
    return Round(first_cost, second_cost, meter.read(plain), first)


async def rounds(joiner: Joiner) -> list[Round]:
    """One more than RUNS; the first warms up."""
    with zmq.Context() as context:
        config = ServeConfig(pub=ANYWHERE, replay=ANYWHERE, heartbeat_s=0.0, retained_batches=RETAINED_BATCHES)
        plane = bind_events(context, config, None)
        scheduler = make_scheduler(BLOCKS + CHAIN_BLOCKS)
        fill(scheduler, plane)
        plane.renderer.recovery.sources = lambda: [scheduler.pool]
        meter = Meter()
        tasks = [asyncio.create_task(part) for part in (*plane.parts(), meter.watch())]
        made = [await one_round(joiner, plane, meter) for _ in range(RUNS + 1)][1:]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    return made


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    with joiner() as process, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(rounds(process))
    first = Spread.of([one.first.mb_per_s / one.raw.mb_per_s for one in made])
    again = Spread.of([one.second.mb_per_s / one.raw.mb_per_s for one in made])
    costs = {kind: _medians([getattr(one, kind) for one in made]) for kind in ("first", "second", "raw")}
    size = made[0].reply.payload_bytes
    note(f"first joiner {first} of raw, second {again}; {size / 1e6:.0f} MB in {made[0].reply.messages} messages")
    note(f"first: {costs['first']}")
    report(
        "replay",
        first,
        "of raw sending",
        TARGET_RATIO,
        rate=True,
        second=again.median,
        second_min_max=[again.min, again.max],
        costs={kind: costs[kind]._asdict() for kind in ("first", "second")},
        raw_mb_per_s=costs["raw"].mb_per_s,
        raw_cpu_ms=costs["raw"].cpu_ms,
        stall_max_ms=max(one.first.stall_ms for one in made),
        resident_blocks=BLOCKS,
        messages=made[0].reply.messages,
        bytes=size,
    )


def _medians(costs: list[Cost]) -> Cost:
    return Cost(*map(median, zip(*costs, strict=True)))


if __name__ == "__main__":
    main()
