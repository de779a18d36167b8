"""The journal: every batch of events has its number here before anything it speaks of changes.

    append -> (pending) -> take_pending -> encoded by the publisher -> retain -> replayed, until it is pushed out
                                                               \\-> lose

Numbers rise by exactly 1 (I5). When too much is pending a batch is dropped, but keeps its number, so that every
consumer sees the hole (I11); a replay over a hole is answered with a snapshot. What a reply under way needs is kept
longer than the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.wire.frames import Payload


class Told(NamedTuple):
    """The events of these payloads, in order, for the readers of one encoding; the others are told nothing."""

    encoding: int
    payloads: tuple[Payload, ...]


class PendingBatch(NamedTuple):
    """A numbered batch not yet encoded. `ts` is seconds since the epoch."""

    seq: int
    ts: float
    announcements: tuple[Announcement, ...]
    told: Told | None = None


class RetainedBatch(NamedTuple):
    """A batch kept for replay, once in every encoding."""

    seq: int
    payloads: tuple[bytes, ...]


_SEQ_OF: Final = attrgetter("seq")


class JournalLimits(NamedTuple):
    """Bounds of what waits and what is kept. `retained_bytes` is the sum over all encodings.

    needed: so much more of each is kept while replies under way need it.
    """

    pending_batches: int = 16384
    pending_blocks: int = 4_000_000
    retained_batches: int = 10_000
    retained_bytes: int = 256 * 1024 * 1024
    needed_batches: int = 16384
    needed_bytes: int = 64 * 1024 * 1024


def blocks_of(announcements: tuple[Announcement, ...]) -> int:
    """What they say something of."""
    return sum(
        item.blocks if isinstance(item, BlockStoreMeta) else len(item.block_hashes)
        for item in announcements
        if isinstance(item, BlockStoreMeta | RemovedRun)
    )


class Journal:
    """Numbers and keeps batches. Appending never waits."""

    def __init__(self, limits: JournalLimits | None = None, first_seq: int = 0) -> None:
        self.limits = limits or JournalLimits()
        self.next_seq = first_seq
        self.dropped_batches = self.lost_batches = 0
        self.needed_from: Callable[[], int | None] = lambda: None
        """From this number on replies under way need what is kept."""
        self._after_hole = first_seq
        self._pending: deque[PendingBatch] = deque()
        self._pending_blocks = 0
        self._retained: deque[RetainedBatch] = deque()
        self._retained_bytes = 0

    def __repr__(self) -> str:
        return f"<Journal next={self.next_seq} pending={len(self._pending)} retained={len(self._retained)}>"

    # numbering

    def append(self, announcements: tuple[Announcement, ...], ts: float) -> int:
        """Number one batch; returns its number, also when it had to be dropped.

        An empty one never is: the numbers that a snapshot needs would be holes, for which others ask for another.
        """
        seq = self.next_seq
        self.next_seq += 1
        blocks = blocks_of(announcements)
        if announcements and self._is_full(blocks):
            self.dropped_batches += 1
            self._after_hole = self.next_seq
            return seq
        self._pending.append(PendingBatch(seq, ts, announcements))
        self._pending_blocks += blocks
        return seq

    def _is_full(self, blocks: int) -> bool:
        too_many = len(self._pending) >= self.limits.pending_batches
        return too_many or (bool(self._pending) and self._pending_blocks + blocks > self.limits.pending_blocks)

    def tell(self, told: Told, ts: float) -> int:
        """Number a batch of one encoding only. It is never dropped: there are few."""
        self._pending.append(PendingBatch(self.next_seq, ts, (), told))
        self.next_seq += 1
        return self.next_seq - 1

    def take_pending(self) -> PendingBatch | None:
        """The oldest batch that is not encoded yet. `retain` or `lose` it before anything else."""
        if not self._pending:
            return None
        batch = self._pending.popleft()
        self._pending_blocks -= blocks_of(batch.announcements)
        return batch

    # keeping

    def retain(self, seq: int, *payloads: bytes) -> None:
        """Keep an encoded batch for replay; the oldest are pushed out by count and by bytes."""
        self._retained.append(RetainedBatch(seq, payloads))
        self._retained_bytes += sum(map(len, payloads))
        while self._over_limit() and not self._is_needed():
            self._retained_bytes -= sum(map(len, self._retained.popleft().payloads))

    def lose(self, seq: int) -> None:
        """A batch that cannot be encoded: its number is a hole, as that of a dropped one."""
        self.lost_batches += 1
        self._after_hole = max(self._after_hole, seq + 1)

    def _over_limit(self, more_batches: int = 0, more_bytes: int = 0) -> bool:
        count, bound = len(self._retained), self.limits.retained_bytes + more_bytes
        return count > self.limits.retained_batches + more_batches or (self._retained_bytes > bound and count > 1)

    def _is_needed(self) -> bool:
        """Whether the oldest is kept for the sake of a reply."""
        needed = self.needed_from()
        if needed is None or self._retained[0].seq < needed:
            return False
        return not self._over_limit(self.limits.needed_batches, self.limits.needed_bytes)

    # replay

    @property
    def whole_from(self) -> int:
        """From this number on every batch is retained, or waits to be: there is no hole."""
        oldest = self._retained[0].seq if self._retained else self.unsent_from
        return max(oldest, self._after_hole)

    @property
    def unsent_from(self) -> int:
        """Numbers from here on have not been sent yet."""
        return self._pending[0].seq if self._pending else self.next_seq

    def retained_from(self, seq: int, limit: int) -> list[RetainedBatch]:
        """Up to `limit` kept batches with numbers >= seq, in order. Dropped numbers are missing."""
        start = bisect_left(self._retained, seq, key=_SEQ_OF)
        return list(islice(self._retained, start, start + limit))

    def payload(self, seq: int, encoding: int = 0) -> bytes | None:
        """A kept batch in one of its encodings; None if it is not kept."""
        found = bisect_left(self._retained, seq, key=_SEQ_OF)
        if found == len(self._retained) or self._retained[found].seq != seq:
            return None
        return self._retained[found].payloads[encoding]

    def stats(self) -> dict[str, int]:
        return {
            "next_seq": self.next_seq,
            "batches_pending": len(self._pending),
            "batches_dropped": self.dropped_batches,
            "batches_lost": self.lost_batches,
            "batches_retained": len(self._retained),
            "retained_bytes": self._retained_bytes,
        }
