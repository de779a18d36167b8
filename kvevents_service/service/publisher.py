"""The publisher coroutine: numbered announcements -> encoded batches -> every output.

`publish` only numbers a batch and wakes the coroutine: no step and no copy ever waits for it (I11). The lists of
token ids appear here, after the copy, from the snapshot that rode on the transfer. Each distinct encoding is made
once per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvevents_service.core.announce import in_batches
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, PendingBatch, blocks_of
from kvevents_service.core.metadata import Announcement
from kvevents_service.errors import WireError
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.service.outputs import Sink
from kvevents_service.service.rarely import is_told
from kvevents_service.service.rota import Rota
from kvevents_service.service.tally import Tally
from kvevents_service.wire.splice import spliced

log = logging.getLogger(__name__)

BATCHES_PER_TURN = 4
"""After so many batches it is the turn of others."""
BLOCKS_PER_BATCH = 256
"""A batch of more counts as several."""


class Publisher:
    """Sends the journal's batches in order, to all outputs. `heartbeat_s` without one: an empty batch; 0: never."""

    def __init__(
        self,
        journal: Journal,
        outputs: Sequence[Sink],
        *,
        encodings: Sequence[Encoding] = (Encoding(),),
        numbers: SequenceStore | None,
        wall_clock: Callable[[], float],
        heartbeat_s: float = 0.0,
    ) -> None:
        self.journal = journal
        self.outputs = outputs
        self.heartbeats = self.encode_failed = self.state_write_failed = 0
        self.turns = 0
        self.rota = Rota()
        self.tally = Tally(_key_of_all(encodings))
        self.more_stats: Callable[[], dict[str, int]] = dict
        self.tell: Callable[[], bool] = lambda: False
        """Numbers what is to be told when nothing is pending; False if nothing is."""
        self._encodings = encodings
        self._numbers = numbers
        self._wall_clock = wall_clock
        self._heartbeat_s = heartbeat_s or None
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Publisher sent={self.batches_sent} {self.journal!r}>"

    @property
    def batches_sent(self) -> int:
        """By all outputs together."""
        return sum(output.sent for output in self.outputs)

    def publish(self, announcements: tuple[Announcement, ...]) -> int:
        """Number what is to be said and return the last number; it is sent soon, in order.

        One batch, or several where one would be too large for a consumer.
        """
        now, seq = self._wall_clock(), self.journal.next_seq
        for batch in in_batches(announcements):
            seq = self.journal.append(batch, now)
        self.wake()
        return seq

    def heartbeat(self) -> None:
        """Number an empty batch: readers learn the newest number, and ask for what they miss."""
        self.heartbeats += 1
        self.journal.append((), self._wall_clock())
        self.wake()

    def wake(self) -> None:
        """Something is pending."""
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._woken()
            await self._reserve_ahead()
            await self.rota.run(self._send_some)

    async def _woken(self) -> None:
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._wake.wait()
        except TimeoutError:
            self.heartbeat()
        self._wake.clear()

    def _send_some(self) -> bool:
        self.turns += 1
        if self.send_pending(BATCHES_PER_TURN) < BATCHES_PER_TURN:
            return False
        self._wake.set()
        return not self._runs_out

    @property
    def _runs_out(self) -> bool:
        return self._numbers is not None and self._numbers.runs_out(self.journal.next_seq)

    async def _reserve_ahead(self) -> None:
        """Write the next reservation off the loop, before it is needed."""
        if self._numbers is not None and self._runs_out:
            seq = self._numbers.reserved
            await asyncio.get_running_loop().run_in_executor(None, self._cover, seq)

    def send_pending(self, limit: int | None = None) -> int:
        """Encode and send up to `limit` batches of usual size (None: all); returns how many. Used by the drain as
        well.

        One that tells a state is large, and counts as a whole turn's.
        """
        sent = 0
        while (limit is None or sent < limit) and (batch := self._next()) is not None:
            self._send(batch)
            weight = 1 + blocks_of(batch.announcements) // BLOCKS_PER_BATCH
            sent += weight if batch.told is None else BATCHES_PER_TURN
        return sent

    def _next(self) -> PendingBatch | None:
        batch = self.journal.take_pending()
        if batch is None and self.tell():
            batch = self.journal.take_pending()
        return batch

    def _encoded(self, batch: PendingBatch) -> list[bytes]:
        payloads = [encoding.encode(batch.announcements, batch.ts) for encoding in self._encodings]
        if batch.told is not None:
            place = batch.told.encoding
            payloads[place] = spliced(payloads[place], batch.told.payloads)
        return payloads

    def _send(self, batch: PendingBatch) -> None:
        try:
            payloads = self._encoded(batch)
        except Exception as error:  # noqa: BLE001  a batch that cannot be written must not end the others' stream
            self._lose(batch, error)
            return
        self._cover(batch.seq)
        self.journal.retain(batch.seq, *payloads)
        self.tally.add(batch)
        for output in self.outputs:
            output.send(batch.seq, payloads)

    def _lose(self, batch: PendingBatch, error: Exception) -> None:
        """Its number is a hole, which readers see. `in_batches` leaves room: what comes here is a fault of ours."""
        self.encode_failed += 1
        self.journal.lose(batch.seq)
        if is_told(self.encode_failed):
            known = isinstance(error, WireError)
            text = "batch %d cannot be sent (%d so far): %s"
            log.error(text, batch.seq, self.encode_failed, error, exc_info=None if known else error)

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
            "batches_send_refused": sum(output.refused for output in self.outputs),
            "batches_encode_failed": self.encode_failed,
            "heartbeats": self.heartbeats,
            "outputs": len(self.outputs),
            "state_write_failed": self.state_write_failed,
            **self.more_stats(),
        }


def _key_of_all(encodings: Sequence[Encoding]) -> bytes | None:
    """A key of hashes if none is shown as the engine calls it."""
    keys = [encoding.privacy.hash_key for encoding in encodings]
    return keys[0] if keys and None not in keys else None
