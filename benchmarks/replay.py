"""A new joiner is told 1 M resident blocks: the rate of a snapshot-backed replay as a share of the same bytes sent raw.

One process has the event plane of `kvevents serve` (`bind_events`) and a pool of runs of 64 blocks, whose stores it
has published and mostly forgotten; another asks for number 0 on the replay endpoint and receives up to the end marker,
undecoded. "first": nobody asked before, so the state is cut and rendered meanwhile. "next": a second joiner within
seconds, who shares what was rendered. Raw: the very messages of that reply from a ROUTER of the same options to the
same kind of process, in a plain loop. Stall: how late a timer of the publisher's loop ever was.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
import zmq

from benchmarks.harness import Spread, note, report
from benchmarks.index_memory import BLOCKS, CHAIN_BLOCKS, RUN_BLOCKS, make_scheduler, steps
from kvevents_service.cli.serve import GC_THRESHOLD
from kvevents_service.config import ServeConfig
from kvevents_service.core.commands import Copy, Publish
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.service.cursor import SHARED_BYTES
from kvevents_service.service.event_plane import ANSWER_HIGH_WATER_MARK, EventPlane, bind_events
from kvevents_service.wire.frames import REPLAY_END, parse_replay_reply, replay_reply, replay_request

RUNS = 5
TARGET_RATIO, TARGET_STALL_MS = 0.5, 10.0
DEADLINE_S = 60.0
TICK_S = 0.001
ANYWHERE = "tcp://127.0.0.1:0"
RETAINED_BATCHES = 16
JOINER_HIGH_WATER_MARK = 100_000
"""As `Subscriber` sets it."""


class Heard(NamedTuple):
    """A reply as its reader has it: when it was asked for and over, its messages, bytes and bytes of payloads."""

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
            if isinstance(copy, Copy):
                done = scheduler.complete(copy.transfer)
                for command in done:
                    if isinstance(command, Publish):
                        plane.publisher.publish(command.announcements)
        plane.publisher.send_pending()


class Lateness:
    """The longest time that a timer of this loop was late, in seconds."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        clock = time.perf_counter
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, clock() - due)

    def taken(self) -> float:
        worst, self.worst_s = self.worst_s, 0.0
        return worst


def messages_of(plane: EventPlane) -> list[list[bytes]]:
    """The reply to a request for number 0, once its snapshot is rendered."""
    reply = plane.renderer.recovery.answer(0, 0)
    assert reply is not None
    made = []
    while isinstance(payload := reply.payload(), bytes):
        made.append(replay_reply(b"", reply.seq, payload))
        reply.advance()
    reply.close()
    return made


async def raw(joiner: Joiner, messages: list[list[bytes]]) -> Heard:
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
    """Bytes a second of each kind, the worst stall in ms while the first and the next joined, and the reply."""

    first: float
    next: float
    raw: float
    first_stall_ms: float
    next_stall_ms: float
    reply: Heard


async def one_round(joiner: Joiner, plane: EventPlane, late: Lateness) -> Round:
    """All three after each other, so that they meet the same neighbours."""
    endpoint = plane.bound[0].replay
    assert endpoint is not None
    plane.renderer.recovery.snapshots.clear()
    late.taken()
    first = await joiner.joined(endpoint)
    first_stall = late.taken()
    again = await joiner.joined(endpoint)
    again_stall = late.taken()
    plain = await raw(joiner, messages_of(plane))
    assert first[1:] == again[1:] == plain[1:], (first, again, plain)
    assert plane.renderer.recovery.snapshots[-1].blocks >= BLOCKS
    rates = [heard.payload_bytes / heard.seconds for heard in (first, again, plain)]
    return Round(*rates, first_stall * 1e3, again_stall * 1e3, first)


async def rounds(joiner: Joiner) -> list[Round]:
    """One more than RUNS; the first warms up."""
    with zmq.Context() as context:
        config = ServeConfig(pub=ANYWHERE, replay=ANYWHERE, heartbeat_s=0.0, retained_batches=RETAINED_BATCHES)
        plane = bind_events(context, config, None)
        scheduler = make_scheduler(BLOCKS + CHAIN_BLOCKS)
        fill(scheduler, plane)
        plane.renderer.recovery.sources = lambda: [scheduler.pool]
        late = Lateness()
        tasks = [asyncio.create_task(part) for part in (*plane.parts(), late.watch())]
        made = [await one_round(joiner, plane, late) for _ in range(RUNS + 1)][1:]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    return made


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    with joiner() as process, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(rounds(process))
    first, again = (Spread.of([of(one) for one in made]) for of in (_first_ratio, _next_ratio))
    speeds = {name: Spread.of([getattr(one, name) / 1e6 for one in made]).median for name in ("first", "next", "raw")}
    stall = Spread.of([one.first_stall_ms for one in made])
    reply = made[0].reply
    note(f"first joiner {first} of raw ({speeds['first']:.0f} of {speeds['raw']:.0f} MB/s), next {again}")
    note(f"longest stall {stall} ms; {reply.messages} messages, {reply.payload_bytes / 1e6:.0f} MB")
    report(
        "replay",
        first,
        "of raw sending",
        TARGET_RATIO,
        rate=True,
        next=again.median,
        next_min_max=[again.min, again.max],
        mb_per_s=speeds,
        stall_ms=stall.median,
        stall_max_ms=stall.max,
        next_stall_ms=Spread.of([one.next_stall_ms for one in made]).median,
        target_stall_ms=TARGET_STALL_MS,
        meets_stall=stall.median <= TARGET_STALL_MS,
        resident_blocks=BLOCKS,
        messages=reply.messages,
        bytes=reply.payload_bytes,
    )


def _first_ratio(one: Round) -> float:
    return one.first / one.raw


def _next_ratio(one: Round) -> float:
    return one.next / one.raw


if __name__ == "__main__":
    main()
