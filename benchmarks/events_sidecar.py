"""The sidecar's side of `events_cost`: the same steps to sidecars that publish and to some that only count."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

import uvloop
import zmq

from benchmarks.events_cases import WARM_UP, Case, Costs, Identity, Requests, bare, block_ids, described
from benchmarks.harness import BLOCK_TOKENS, HASH_BYTES, a_board
from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.journal import Journal, JournalLimits
from kvevents_service.core.metadata import Announcement, BlockStoreMeta
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.wire.control import GroupSpec, Step
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message

ROUNDS = 15
SESSION = 1
DEADLINE_MS = 20_000
RETAINED_BATCHES = 16
"""Few, so that the journal is full from the first rounds on and its memory is used again."""


def subscribe(endpoint: str, asked: Pipe) -> None:
    """Receive everything; when asked for a number, answer with the bytes so far once that batch is there."""
    receiver = zmq.Context().socket(zmq.SUB)
    receiver.set_hwm(0)
    receiver.setsockopt(zmq.SUBSCRIBE, b"")
    receiver.connect(endpoint)
    poller = zmq.Poller()
    poller.register(receiver, zmq.POLLIN)
    poller.register(asked.fileno(), zmq.POLLIN)
    expected = size = 0
    wanted: int | None = None
    while True:
        ready = dict(poller.poll())
        if receiver in ready:
            _, seq, payload = receiver.recv_multipart()
            assert int.from_bytes(seq, "big") == expected, "a batch was lost"
            expected, size = expected + 1, size + len(payload)
        if asked.fileno() in ready:
            wanted = asked.recv()
            if wanted < 0:
                return
        if wanted is not None and expected >= wanted:
            asked.send(size)
            wanted = None


class Subscribed(NamedTuple):
    """A publish socket with a subscriber process behind it."""

    socket: zmq.Socket[bytes]
    asked: Pipe

    def bytes_until(self, seq: int) -> int:
        """Wait until the subscriber has every batch before `seq`; returns the bytes of all of them."""
        self.asked.send(seq)
        assert self.asked.poll(DEADLINE_MS / 1000), "no answer"
        return int(self.asked.recv())


@contextmanager
def subscribed() -> Iterator[Subscribed]:
    """A bound socket whose subscriber is there (an XPUB tells when)."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder, zmq.Context() as context:
        ours, theirs = spawn.Pipe()
        with context.socket(zmq.XPUB) as publish:
            publish.set(zmq.SNDHWM, 0)
            publish.bind(endpoint := f"ipc://{folder}/pub")
            process = spawn.Process(target=subscribe, args=(endpoint, theirs))
            process.start()
            assert publish.poll(DEADLINE_MS), "no subscriber"
            publish.recv()
            yield Subscribed(publish, ours)
            ours.send(-1)
            process.join()


class CountingPublisher:
    """Events off: what would be said is counted, as the sidecar's counters do."""

    def __init__(self) -> None:
        self.blocks = 0

    def publish(self, announcements: tuple[Announcement, ...]) -> None:
        for item in announcements:
            if isinstance(item, BlockStoreMeta):
                self.blocks += item.blocks


class Frames(NamedTuple):
    """A step as it arrives: with metadata, without, and decoded (events off needs the tokens as well today)."""

    full: bytes
    bare: bytes
    decoded: Step


class SidecarSide:
    """The sidecar's parts between the engine's socket and the publisher."""

    def __init__(self, case: Case, publish: Callable[[tuple[Announcement, ...]], object]) -> None:
        blocks = case.step_blocks
        capacity = blocks * 5 // 4 if case.evicting else blocks * case.steps * (ROUNDS + WARM_UP)
        group = GroupSpec(0, "full_attention", BLOCK_TOKENS)
        spec = TierSpec("CPU", capacity, HASH_BYTES, (group,), BLOCK_TOKENS, board=a_board())
        self.scheduler = OffloadScheduler(spec)
        self.scheduler.hello(SESSION, blocks)
        self._reader = FrameReader()
        self._publish = publish

    def decode(self, frame: bytes) -> Step:
        (body,) = self._reader.feed(frame)
        step = decode_client(body)
        assert isinstance(step, Step)
        return step

    async def take(self, frames: list[Frames], *, events: bool) -> None:
        """Whole steps, one after the other; the publisher has its turn after each."""
        for frame in frames:
            step = self.decode(frame.full) if events else self.decode(frame.bare) and frame.decoded
            self.perform(self.scheduler.step(SESSION, step, 0.0))
            await asyncio.sleep(0)

    def perform(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Publish(announcements):
                    self._publish(announcements)
                case Copy(transfer):
                    self.perform(self.scheduler.complete(transfer))
                case Reply(message=message):
                    encode_message(message)


class SidecarBench:
    """Three sidecars that get the same steps: without events, with, and without again."""

    def __init__(self, case: Case, subscriber: Subscribed) -> None:
        self.case, self.subscriber = case, subscriber
        self.requests, self.identity, self.block_ids = Requests(case), Identity.of(case), block_ids(case)
        self.journal = Journal(JournalLimits(retained_batches=RETAINED_BATCHES))
        self.publisher = Publisher(self.journal, [Output(subscriber.socket)], numbers=None, wall_clock=time.time)
        self.counting = CountingPublisher()
        self.sides = [SidecarSide(case, self.counting.publish) for _ in range(2)]
        self.speaking = SidecarSide(case, self.publisher.publish)
        self.bytes_sent = 0

    def frames(self) -> list[Frames]:
        """The steps of a round. Not timed."""
        made = []
        for number in range(self.case.steps):
            chains = self.requests.chains()
            told = list(zip(chains, self.block_ids, self.requests.parents(chains), strict=True))
            full = [described(chain, ids, parent, self.identity) for chain, ids, parent in told]
            short = [bare(chain, ids) for chain, ids, _ in told]
            frame = bytes(encode_message(Step(number, full)))
            made.append(Frames(frame, bytes(encode_message(Step(number, short))), self.speaking.decode(frame)))
        return made

    async def rounds(self) -> list[tuple[float, float, float]]:
        """CPU seconds of every round."""
        running = asyncio.create_task(self.publisher.run())
        seconds = []
        for _ in range(ROUNDS + WARM_UP):
            frames = self.frames()
            before = await self._silent(self.sides[0], frames)
            spoken = await self._spoken(frames)
            seconds.append((before, spoken, await self._silent(self.sides[1], frames)))
        running.cancel()
        self._check()
        return seconds[WARM_UP:]

    async def _silent(self, side: SidecarSide, frames: list[Frames]) -> float:
        started = time.process_time()
        await side.take(frames, events=False)
        return time.process_time() - started

    async def _spoken(self, frames: list[Frames]) -> float:
        started = time.process_time()
        await self.speaking.take(frames, events=True)
        self.publisher.send_pending()
        self.bytes_sent = self.subscriber.bytes_until(self.journal.next_seq)
        return time.process_time() - started

    def _check(self) -> None:
        """All of them stored the same, and everything was sent."""
        blocks = self.case.step_blocks * self.case.steps * (ROUNDS + WARM_UP)
        for side in (*self.sides, self.speaking):
            stats = side.scheduler.stats()
            assert stats["blocks_stored"] == blocks, stats
            assert bool(stats["blocks_removed"]) == self.case.evicting, stats
        assert self.counting.blocks == 2 * blocks
        assert self.publisher.batches_sent == self.journal.next_seq, self.publisher


def sidecar_costs(case: Case) -> Costs:
    with subscribed() as subscriber, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(SidecarBench(case, subscriber).rounds())
    return Costs.of(rounds, case.step_blocks * case.steps)
