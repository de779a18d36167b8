"""A reader under watch: are its numbers without a hole, and does what it folded equal the resident set?"""

from __future__ import annotations

import asyncio
from typing import Any

from kvevents_service.core.residency import key64
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.items import Batch, Item, Undecodable
from kvevents_service.subscriber import Gap, Restart, Resync, Subscriber
from kvevents_service.wire.control import Inspected

INSPECT_S = 20.0
QUIET_POLL_S = 0.2
STILL_S = 0.5
"""Nothing came for so long: the state of a snapshot, many batches of one number, is told to its end."""

Shelves = dict[tuple[str, int], set[int]]


class Follower:
    """Consumes one subscriber.

    holes: numbers that were left out without a word. lost: a `Gap` was told and the state not told anew since.
    anew: the state of a snapshot comes as several batches of one number. told: behind the last one with events.
    """

    def __init__(self) -> None:
        self.batches = self.gaps = self.holes = self.undecodable = self.resyncs = self.restarts = 0
        self.lost = False
        self.next_seq = self.told = 0
        self._last: int | None = None

    def __repr__(self) -> str:
        return f"<Follower next={self.next_seq} gaps={self.gaps} holes={self.holes} lost={self.lost}>"

    async def run(self, subscriber: Subscriber) -> None:
        """Consume until cancelled or closed."""
        async for item in subscriber:
            self.take(item)

    def take(self, item: Item) -> None:
        match item:
            case Batch():
                self._number(item)
            case Gap():
                self.gaps, self.lost, self._last = self.gaps + 1, True, None
            case Resync():
                self.resyncs, self.lost, self._last = self.resyncs + 1, False, None
            case Restart():
                self.restarts, self.lost, self._last = self.restarts + 1, False, None
                self.told = 0
            case Undecodable():
                self.undecodable += 1

    def _number(self, item: Batch) -> None:
        self.batches += 1
        last = self._last
        if last is not None and item.seq != last + 1 and not (item.replayed and item.seq == last):
            self.holes += 1
        self._last = item.seq
        self.next_seq = item.seq + 1
        if item.batch.events:
            self.told = self.next_seq

    def faults(self) -> list[str]:
        found = {
            f"{self.holes} numbers left out without a word": self.holes,
            f"{self.undecodable} batches that are none": self.undecodable,
            "a gap that was never made good": self.lost,
        }
        return [text for text, there in found.items() if there]

    async def reach(self, next_seq: int, wait_s: float) -> bool:
        """Whether every batch below `next_seq` came in time, and the state is whole."""
        deadline, batches = asyncio.get_running_loop().time() + wait_s, -1
        while self.next_seq < next_seq or self.lost or self.batches != batches:
            if asyncio.get_running_loop().time() > deadline:
                return False
            batches = self.batches
            await asyncio.sleep(STILL_S)
        return True


class Observer:
    """Asks the sidecar for its books. Blocking calls."""

    def __init__(self, engine_socket: str) -> None:
        self.client = OffloadClient(engine_socket, EngineLayout("proving", "", (), (), ()))
        self.client.wait_connected(INSPECT_S)

    def inspect(self, *, residents: bool = True) -> Inspected:
        """TimeoutError if it does not answer."""
        inspected = self.client.inspect(residents=residents, wait_s=INSPECT_S)
        if inspected is None:
            raise TimeoutError(f"no answer from the sidecar: {self.client.last_error}")
        return inspected

    def close(self) -> None:
        self.client.close()


async def quiet(observer: Observer, wait_s: float) -> Inspected:
    """The books, as soon as no copy is under way. TimeoutError if that does not come."""
    async with asyncio.timeout(wait_s):
        while True:
            inspected = await asyncio.to_thread(observer.inspect)
            if not (inspected.stats.get("transfers", 0) or inspected.stats["copies"]):
                return inspected
            await asyncio.sleep(QUIET_POLL_S)


async def level(observer: Observer, follower: Follower, wait_s: float) -> Inspected | None:
    """The books as of the last event that the follower has; None if they are not to be had in time.

    That no copy is under way is not enough: the disk is written to when it has time.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        inspected = await quiet(observer, left)
        if not await follower.reach(inspected.next_seq, left):
            return None
        if follower.told <= inspected.next_seq:
            return inspected
    return None


def resident(inspected: Inspected) -> Shelves:
    size = inspected.hash_bytes or 1
    shelves: Shelves = {}
    for shelf in inspected.residents:
        packed = shelf.block_hashes
        keys = {key64(packed[start : start + size]) for start in range(0, len(packed), size)}
        shelves.setdefault((shelf.medium, shelf.group), set()).update(keys)
    return {place: keys for place, keys in shelves.items() if keys}


def folded(subscriber: Subscriber) -> Shelves:
    """What a tracking subscriber of one output holds."""
    return {
        (shelf.medium, shelf.group): set(keys)
        for fold in subscriber.state().values()
        for shelf, keys in fold.shelves.items()
        if keys
    }


def differences(found: Shelves, expected: Shelves) -> list[str]:
    """In words; no line: they are equal."""
    return [
        f"{place}: {len(found.get(place, set()) - expected.get(place, set()))} blocks too many, "
        f"{len(expected.get(place, set()) - found.get(place, set()))} too few"
        for place in sorted(found.keys() | expected.keys())
        if found.get(place) != expected.get(place)
    ]


def counters(subscriber: Subscriber) -> dict[str, Any]:
    return dict(subscriber.stats())
