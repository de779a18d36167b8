"""The publisher coroutine: numbered announcements -> wire events -> encoded batches -> the PUB socket.

`publish` only numbers a batch and wakes the coroutine: no step and no copy ever waits for it (I11). The lists of
token ids appear here, after the copy, from the snapshot that rode on the transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from kvevents_service.core.announce import in_batches, to_event
from kvevents_service.core.journal import Journal, PendingBatch
from kvevents_service.core.metadata import Announcement
from kvevents_service.errors import WireError
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.wire.codec import encode_own
from kvevents_service.wire.events import EventBatch
from kvevents_service.wire.frames import live_frames

log = logging.getLogger(__name__)

BATCHES_PER_TURN = 16
"""After so many batches the coroutine lets lookups have the loop."""


class Publisher:
    """Sends the journal's batches in order. A subscriber that is too slow loses batches and sees a gap."""

    def __init__(
        self,
        journal: Journal,
        socket: zmq.Socket[bytes],
        *,
        topic: str,
        dp_rank: int,
        numbers: SequenceStore | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self.journal = journal
        self.batches_sent = 0
        self.send_refused = 0
        self.encode_failed = 0
        self.state_write_failed = 0
        self._socket = socket
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._numbers = numbers
        self._wall_clock = wall_clock
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Publisher sent={self.batches_sent} {self.journal!r}>"

    def publish(self, announcements: tuple[Announcement, ...]) -> int:
        """Number what is to be said and return the last number; it is sent soon, in order.

        One batch, or several where one would be too large for a consumer.
        """
        now, seq = self._wall_clock(), self.journal.next_seq
        for batch in in_batches(announcements):
            seq = self.journal.append(batch, now)
        self._wake.set()
        return seq

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._reserve_ahead()
            if self.send_pending(BATCHES_PER_TURN) == BATCHES_PER_TURN:
                self._wake.set()
                await asyncio.sleep(0)

    async def _reserve_ahead(self) -> None:
        """Write the next reservation off the loop, before it is needed."""
        if self._numbers is not None and self._numbers.runs_out(self.journal.next_seq):
            seq = self._numbers.reserved
            await asyncio.get_running_loop().run_in_executor(None, self._cover, seq)

    def send_pending(self, limit: int | None = None) -> int:
        """Encode and send up to `limit` batches (None: all); returns how many. Used by the drain as well."""
        sent = 0
        while (limit is None or sent < limit) and (batch := self.journal.take_pending()) is not None:
            self._send(batch)
            sent += 1
        return sent

    def _send(self, batch: PendingBatch) -> None:
        events = [to_event(item) for item in batch.announcements]
        try:
            payload = encode_own(EventBatch(batch.ts, events, self._dp_rank))
        except WireError as error:  # over the size limit: the number is spent, consumers see a gap
            self.encode_failed += 1
            log.error("batch %d cannot be sent: %s", batch.seq, error)
            return
        self._cover(batch.seq)
        self.journal.retain(batch.seq, payload)
        try:
            self._socket.send_multipart(live_frames(self._topic, batch.seq, payload), zmq.NOBLOCK)
        except zmq.Again:
            self.send_refused += 1  # the number is spent and retained: consumers see a gap and can replay it
        else:
            self.batches_sent += 1

    def _cover(self, seq: int) -> None:
        """A disk that fails must not stop the stream: a number is used unreserved, as only a crash would show."""
        try:
            if self._numbers is not None:
                self._numbers.cover(seq)
        except OSError as error:
            self.state_write_failed += 1
            if self.state_write_failed == 1:
                log.error("numbers cannot be reserved, they may repeat after a crash: %s", error)

    def stats(self) -> dict[str, int]:
        return {
            **self.journal.stats(),
            "batches_sent": self.batches_sent,
            "batches_send_refused": self.send_refused,
            "batches_encode_failed": self.encode_failed,
            "state_write_failed": self.state_write_failed,
        }
