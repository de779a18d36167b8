"""An output on NATS JetStream: what `send` is given waits in a bounded queue, and a task of its own publishes it.

The stream has the batches, in order, each once: `Nats-Msg-Id` is publisher id and number, and what may have got
lost on the way is sent again. What is dropped, here or on the way, is a hole in `Kv-Seq`, and the state follows as
a snapshot in the object store: one at every connection, after every hole, and before the stream forgets what came
after the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

from kvevents_service.core.replay import Reply
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.nats_broker import Broker, BrokerGone, Credentials, connect
from kvevents_service.service.nats_queue import SendQueue, outcome
from kvevents_service.service.rarely import is_told
from kvevents_service.service.renderer import Renderer

log = logging.getLogger(__name__)

BURST: Final = 64
"""Batches under way at once."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
RENDER_RETRY_S: Final = 0.02
FAILED_RETRY_S: Final = 1.0
NOTHING_YET: Final = -1
"""The number of a snapshot before the first batch."""
FLUSH_S: Final = 3.0
CANCEL_AGAIN_S: Final = 2.0


class NatsOutput:
    """Sends batches of the journal to a broker, which may be slow or away: nobody waits for it.

    clock: seconds. first: the journal's first number. `exact` and `encoding` as of any output.
    """

    exact = False

    def __init__(
        self,
        config: NatsConfig,
        known: Credentials,
        *,
        publisher_id: str,
        encoding: int,
        first: int,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.encoding = encoding
        self.sent = self.snapshots = self.disconnects = self.snapshots_failed = 0
        self.queue = SendQueue(config.queue_messages, config.queue_bytes, first)
        self.connected = False
        self._known = known
        self._id = publisher_id
        self._clock = clock
        self._wake = asyncio.Event()
        self._since_snapshot = self._bytes_since = self._holes_told = 0
        self._snapshot_at: float | None = None

    def __repr__(self) -> str:
        state = "connected" if self.connected else "away"
        return f"<NatsOutput {self.config.subject} {state} sent={self.sent} {self.queue!r}>"

    @property
    def refused(self) -> int:
        """Batches that no reader gets live."""
        return self.queue.dropped

    def send(self, seq: int, payloads: Sequence[bytes]) -> None:
        """Queue number `seq` of the journal."""
        before = self.queue.dropped
        self.queue.put(seq, payloads[self.encoding])
        if before != self.queue.dropped and not before:
            log.warning("%s: the broker is away or too slow, batches are dropped", self.config.subject)
        self._wake.set()

    async def run(self, renderer: Renderer) -> None:
        """Publish until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            sent, trying = self.sent, asyncio.create_task(self._try(renderer))
            try:
                await asyncio.wait([trying])
            finally:
                await _ended(trying)
            retry_s = FIRST_RETRY_S if sent != self.sent else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _try(self, renderer: Renderer) -> None:
        """One connection. Whatever the client raises, the other outputs and the engine go on."""
        try:
            await self._serve(await connect(self.config, self._known, self._id), renderer)
        except BrokerGone as error:
            self.disconnects += 1
            if is_told(self.disconnects):
                log.warning("%s: %s (%d so far)", self.config.subject, error, self.disconnects)
        except Exception:
            self.disconnects += 1
            log.exception("%s: the connection is made anew", self.config.subject)

    async def _serve(self, broker: Broker, renderer: Renderer) -> None:
        """One connection, from its first snapshot to its end."""
        self._snapshot_at, self.connected = None, True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish(broker))
                tasks.create_task(self._keep_snapshot(broker, renderer))
        except* BrokerGone as group:
            raise BrokerGone(str(group.exceptions[0])) from group
        finally:
            self.connected = False
            await broker.close()

    # batches

    async def _publish(self, broker: Broker) -> None:
        while True:
            self._wake.clear()
            while self.queue:
                await self._burst(broker)
            if not broker.is_up:
                raise BrokerGone("the connection was lost")
            try:
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _burst(self, broker: Broker) -> None:
        batches = self.queue.head(BURST)
        if len(batches[0].payload) > broker.largest:
            self.queue.done(batches[:1])
            self.queue.lose(1)
            return
        batches = [*takewhile(lambda batch: len(batch.payload) <= broker.largest, batches)]
        taken = await broker.publish(batches)
        settled, lost = outcome(taken)
        self.queue.done(batches[:settled])
        self.sent += settled - lost
        self._since_snapshot += settled
        self._bytes_since += sum(len(batch.payload) for batch in batches[:settled])
        if lost:
            self.queue.lose(lost)
        if settled < len(batches):
            raise BrokerGone(f"{len(batches) - settled} batches were not taken")

    async def flush(self) -> None:
        """Until all is published, for a short while; at once if the broker is away."""
        deadline = self._clock() + FLUSH_S
        while self.queue and self._clock() < deadline:
            if not self.connected:
                return
            await asyncio.sleep(0.01)

    # snapshots

    @property
    def _due(self) -> bool:
        """None was put over this connection, there is a hole, it is old, or the stream will forget what follows."""
        if self._snapshot_at is None or self._holes_told != self.queue.holes:
            return True
        many = 2 * self._since_snapshot >= self.config.max_messages
        much = 2 * self._bytes_since >= self.config.max_bytes
        return many or much or self._clock() >= self._snapshot_at + self.config.snapshot_s

    async def _keep_snapshot(self, broker: Broker, renderer: Renderer) -> None:
        while True:
            if self._due:
                await self._put_snapshot(broker, renderer)
            await asyncio.sleep(RENDER_RETRY_S)

    async def _put_snapshot(self, broker: Broker, renderer: Renderer) -> None:
        holes, began = self.queue.holes, self._clock()
        since, since_bytes = self._since_snapshot, self._bytes_since
        place = await broker.last_place()  # before the state is cut: what it lacks comes behind
        if renderer.is_empty:
            await broker.put_snapshot(NOTHING_YET, place, [])
        elif not await self._put_state(broker, renderer, place):
            self.snapshots_failed += 1
            await asyncio.sleep(FAILED_RETRY_S)
            return
        self.snapshots += 1
        self._holes_told, self._snapshot_at = holes, began
        self._since_snapshot -= since
        self._bytes_since -= since_bytes

    async def _put_state(self, broker: Broker, renderer: Renderer, place: int) -> bool:
        """False if it could not be rendered."""
        reply = await self._rendered(renderer)
        try:
            payloads = reply.payloads()
            if payloads is not None:
                await broker.put_snapshot(reply.end, place, payloads)
            return payloads is not None
        finally:
            reply.close()

    async def _rendered(self, renderer: Renderer) -> Reply:
        reply = None
        try:
            while True:
                reply = reply or renderer.whole(self)
                if reply is not None and reply.ready:
                    return reply
                await asyncio.sleep(RENDER_RETRY_S)
        except asyncio.CancelledError:
            if reply is not None:
                reply.close()
            raise

    def stats(self) -> dict[str, int]:
        return {
            "nats_batches_sent": self.sent,
            "nats_batches_dropped": self.queue.dropped,
            "nats_batches_waiting": len(self.queue),
            "nats_snapshots": self.snapshots,
            "nats_snapshots_failed": self.snapshots_failed,
            "nats_disconnects": self.disconnects,
            "nats_connected": int(self.connected),
        }


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancelled until it is over: the client takes some cancellations for a timeout."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
