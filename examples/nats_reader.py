"""What one publisher has, read from NATS JetStream: its snapshot, then the stream from there on.

    python examples/nats_reader.py nats://127.0.0.1:4222 KVEVENTS kv.my-model.pod-1.0

Prints how many blocks are known, a line a change. The recipe is `NatsReader`; docs/nats.md explains it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass

import nats
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.object_store import ObjectStore

from kvevents_service.core.residency import Residency
from kvevents_service.wire.codec import decode_batch

RETRY_S = 0.1
SNAPSHOT_S = 30.0
LOOK_S = 0.5
"""So often it is asked whether a snapshot that is being read has been replaced: the rest of it never comes then."""


@dataclass
class Place:
    """The state goes up to batch `upto` of a publisher; what follows is in the stream, from message `start` on."""

    publisher: str
    upto: int
    start: int


class NatsReader:
    """The fold of one subject. silent_s: without a message for so long, heartbeats included, it begins anew."""

    def __init__(self, js: JetStreamContext, stream: str, subject: str, silent_s: float = 10.0) -> None:
        self.fold = Residency()
        self.at: Place | None = None
        self.snapshots = self.gaps = self.restarts = self.batches = self.skipped = 0
        self._js = js
        self._stream = stream
        self._subject = subject
        self._silent_s = silent_s
        self._least = -1
        self._publisher = ""

    async def run(self) -> None:
        """Read until cancelled. nats-py takes some cancellations for a timeout."""
        while not _is_cancelled():
            with suppress(Error, TimeoutError, OSError):
                if await self._snapshot():
                    await self._follow()
            await asyncio.sleep(RETRY_S)

    async def _snapshot(self) -> bool:
        """Take the state that is in the store; False if it is older than what is missing."""
        async with asyncio.timeout(SNAPSHOT_S):
            store = await self._js.object_store(f"{self._stream}_snapshots")
            newest = await store.get_info(self._subject)
            told = newest.headers or {}
            upto, publisher = int(told["Kv-Upto"][0]), told["Kv-Publisher"][0]
            if publisher != (self._publisher or publisher) or upto < self._least:
                return False
            found = await self._read(store, newest.nuid)
        if found is None:
            return False
        data = found.data or b""
        if len(data) != (found.info.size or 0):
            return False  # nats-py takes some cancellations for the end
        told = found.info.headers or {}  # it may have been replaced meanwhile, by a later one
        self.at = Place(told["Kv-Publisher"][0], int(told["Kv-Upto"][0]), int(told["Kv-From-Stream-Seq"][0]))
        self._publisher, self._least = self.at.publisher, self.at.upto
        self.fold = Residency()
        for payload in payloads(data):
            self.fold.apply(decode_batch(payload).batch.events)
        self.snapshots += 1
        return True

    async def _read(self, store: ObjectStore, nuid: str | None) -> ObjectStore.ObjectResult | None:
        """The snapshot whose name in the store is `nuid`, or one put since; None if that was replaced meanwhile."""
        reading = asyncio.create_task(store.get(self._subject))
        try:
            while not (await asyncio.wait([reading], timeout=LOOK_S))[0]:
                if (await store.get_info(self._subject)).nuid != nuid:
                    return None
            return reading.result()
        finally:
            reading.cancel()

    async def _follow(self) -> None:
        """Until a hole, another publisher, or silence."""
        assert self.at is not None, "a snapshot was taken"
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self.at.start)
        messages = await self._js.subscribe(
            self._subject, stream=self._stream, ordered_consumer=True, config=config
        )
        try:
            while True:
                message = await messages.next_msg(timeout=self._silent_s)
                headers = message.headers or {}
                if not self._take(int(headers["Kv-Seq"]), headers["Kv-Publisher"], message.data):
                    return
        finally:
            await messages.unsubscribe()

    def _take(self, seq: int, publisher: str, payload: bytes) -> bool:
        assert self.at is not None
        if publisher != self.at.publisher:
            self.restarts += 1
            self._publisher, self._least = publisher, -1
            return False
        if seq <= self.at.upto:
            self.skipped += 1
            return True
        if seq != self.at.upto + 1:
            self.gaps += 1
            self._least = seq - 1
            return False
        self.fold.apply(decode_batch(payload).batch.events)
        self.at.upto = seq
        self.batches += 1
        return True


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def payloads(data: bytes) -> list[bytes]:
    """The batches of a snapshot: each behind its length, 4 bytes, big endian."""
    found, place = [], 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        found.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    return found


async def say(error: Exception) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)


async def main(server: str, stream: str, subject: str) -> None:
    client = await nats.connect(server, error_cb=say)
    reader = NatsReader(client.jetstream(), stream, subject)
    reading = asyncio.create_task(reader.run())
    known = None
    while not reading.done():
        if known != len(reader.fold):
            known = len(reader.fold)
            print(known, "blocks at", reader.at, flush=True)
        await asyncio.sleep(RETRY_S)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:4]))
