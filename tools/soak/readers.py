"""The readers of the soak, in one process: some stay, some come and go, and each is watched.

    python -m tools.soak.readers --ready JSON --stay 2 --churn 6 --fold 2

Some fold what they read; the others follow the numbers. A line on stdin ends the churn: every reader then catches
up with the sidecar, those that fold compare, and one JSON line says how each of them got on.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import click
import msgspec
import uvloop
import zmq

from kvevents_service.items import Source
from kvevents_service.sockets import Receiver, connect
from kvevents_service.subscriber import Subscriber
from kvevents_service.wire.frames import LiveFrame, parse_replay_reply, replay_request
from kvevents_service.wire.peek import starts_anew
from tools.proving.follower import Follower, Observer, counters, differences, folded, level, resident
from tools.proving.process import Ready
from tools.soak.numbers import Numbers

CATCH_UP_S = 60.0
LIFE_S = (4.0, 15.0)
ASK_S = 1.0
ANSWER_S = 40.0


class Reader:
    """One place for a reader. folds: it decodes all it reads. comes_and_goes: it closes and joins anew, again and
    again."""

    def __init__(self, source: Source, *, folds: bool, comes_and_goes: bool, random: random.Random) -> None:
        self.source = source
        self.folds = folds
        self.comes_and_goes = comes_and_goes
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.follower = Follower()
        self.subscriber: Subscriber | None = None
        self._random = random
        self._stays = asyncio.Event()
        """This life is its last."""

    async def run(self, ending: asyncio.Event) -> None:
        """Read until cancelled; after `ending` it stays."""
        while True:
            self.follower = Follower()
            async with self._subscriber() as self.subscriber:
                reading = asyncio.create_task(self.follower.run(self.subscriber))
                try:
                    await self._live(ending)
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
                    self._add_up()

    def _subscriber(self) -> Subscriber:
        return Subscriber(self.source, track=True) if self.folds else Numbers(self.source)

    async def _live(self, ending: asyncio.Event) -> None:
        if self.comes_and_goes:
            try:
                async with asyncio.timeout(self._random.uniform(*LIFE_S)):
                    await ending.wait()
            except TimeoutError:
                return
        self._stays.set()
        await asyncio.Event().wait()

    def _add_up(self) -> None:
        """One life is over. That it ended in the middle of a gap is no fault of anybody's."""
        assert self.subscriber is not None
        self.counts["lives"] += 1
        for name in ("batches", "gaps", "holes", "undecodable", "resyncs", "restarts"):
            self.counts[name] += getattr(self.follower, name)
        self.counts["dropped"] += counters(self.subscriber).get("dropped", 0)

    async def compare(self, observer: Observer) -> None:
        """Catch up, and hold what was folded against the books."""
        async with asyncio.timeout(CATCH_UP_S):
            await self._stays.wait()
        inspected = await level(observer, self.follower, CATCH_UP_S)
        if inspected is None:
            self.faults.append(f"it did not catch up with the books: {self.follower}")
            return
        self.faults += self.follower.faults()
        if self.folds:
            assert self.subscriber is not None
            self.faults += differences(folded(self.subscriber), resident(inspected))
            for fold in self.subscriber.state().values():
                self.faults += [f"{name}: {n}" for name, n in (+fold.faults).items() if not self.follower.gaps]

    def told(self) -> dict[str, Any]:
        faults = [*self.faults, *([f"{self.counts['holes']} holes"] if self.counts["holes"] else [])]
        late = self.comes_and_goes and self.source.snapshot is None
        return {"folds": self.folds, "late_by_replay": late, **self.counts, "faults": faults}


class Asker:
    """Asks for replays from anywhere, over and over; each must be consecutive, and end.

    broken_off: those that stopped inside a state, which a slow reader's may (proto/SPEC.md, Replay).
    """

    def __init__(self, endpoint: str, random: random.Random) -> None:
        self.asked = self.numbers = self.broken_off = 0
        self.faults: list[str] = []
        self._endpoint = endpoint
        self._random = random

    async def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while True:
                await self._ask(context)
                await asyncio.sleep(ASK_S)
        finally:
            context.destroy(linger=0)

    async def _ask(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        start = self._random.randrange(self.numbers + 2)
        frames: list[LiveFrame] = []
        with context.socket(zmq.DEALER) as dealer:
            connect(dealer, self._endpoint, "replay")
            dealer.send_multipart(replay_request(start))
            with Receiver(dealer) as receiver:
                ended = await self._collect(receiver, frames)
        self.asked += 1
        numbers = [frame.seq for frame in frames]
        if any(number != before + 1 for before, number in pairwise(numbers)):
            self.faults.append(f"the replay from {start} is not consecutive")
        if not ended and frames and starts_anew(frames[0].payload):
            self.broken_off += 1
        elif not ended:
            self.faults.append(f"the replay from {start} of {self.numbers} has no end marker: {numbers[-1:]}")
        self.numbers = max([self.numbers, *numbers])

    async def _collect(self, receiver: Receiver, frames: list[LiveFrame]) -> bool:
        """Whether the end marker came, ANSWER_S after the last message at most."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    frame = parse_replay_reply(await receiver.recv())
            except TimeoutError:
                return False
            if frame is None:
                return True
            frames.append(frame)


def places(ready: Ready, stay: int, churn: int, fold: int, seed: int) -> list[Reader]:
    """The first `fold` fold; every third one recovers by snapshots, the others by replay."""
    made = []
    for number in range(stay + churn):
        snapshot = ready.snapshot if number % 3 == 1 else None
        source = Source(ready.pub, ready.replay, snapshot=snapshot, label=f"reader-{number}")
        own = random.Random(f"{seed}-{number}")
        made.append(Reader(source, folds=number < fold, comes_and_goes=number >= stay, random=own))
    return made


async def read(ready: Ready, stay: int, churn: int, fold: int, seed: int) -> dict[str, Any]:
    ending = asyncio.Event()
    readers = places(ready, stay, churn, fold, seed)
    asker = Asker(ready.replay, random.Random(seed))
    tasks = [asyncio.create_task(reader.run(ending)) for reader in readers]
    tasks.append(asking := asyncio.create_task(asker.run()))
    await asyncio.to_thread(sys.stdin.readline)
    ending.set()
    asking.cancel()
    observer = await asyncio.to_thread(Observer, ready.engine_socket)
    for reader in readers:
        await reader.compare(observer)
    await asyncio.to_thread(observer.close)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    broke = [repr(end) for end in ended if isinstance(end, Exception)]
    return {
        "readers": [reader.told() for reader in readers],
        "replays_asked": asker.asked,
        "replays_broken_off": asker.broken_off,
        "cpu_s": time.process_time(),
        "faults": asker.faults + broke,
    }


@click.command()
@click.option("--ready", required=True, help="The sidecar's ready line.")
@click.option("--stay", default=1)
@click.option("--churn", default=1)
@click.option("--fold", default=1)
@click.option("--seed", default=1)
def main(ready: str, stay: int, churn: int, fold: int, seed: int) -> None:
    at = msgspec.json.decode(ready, type=Ready)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(read(at, stay, churn, fold, seed))
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")


if __name__ == "__main__":
    main()
