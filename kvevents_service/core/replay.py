"""How a request for old numbers is answered: with what is retained, or with a snapshot that takes their place.

    retained    start ................................ end
    snapshot    first: clear + state ... | empty ... upto | retained ... end
    exact       start: clear + state | empty ........ upto | retained ... end

The reply is contiguous. `first` is the number asked for, or 9,999 below the newest. If the state needs more
numbers than there are, empty batches are appended, so that `upto` is far enough. What a reply under way needs is
kept; one that meets a number which is gone all the same stops there: its reader misses that one, and asks again.

An exact reply is for readers that take it only from the number they asked for, and only up to the live message that
made them ask, which we do not know: the whole state is in its first number. What comes live after that may be older
than the state; it ends at the same state all the same, as the last thing said of each block is said again. Such
readers ask once: if the reply would be too long or too large, it stops, and the state is told live (`Teller`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from kvevents_service.core.cut import StateSource
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal
from kvevents_service.core.snapshot import MessageLimits, PartLimits, Snapshot
from kvevents_service.wire.frames import Payload


class ReplayLimits(NamedTuple):
    """reach: most numbers in a reply that starts with a snapshot; more than its parts. Times in seconds.

    exact_reach: most numbers of an exact one. exact: the same for its bytes, and what its first message may hold.

    snapshots: in memory at once, slow readers' ones included. fresh_s: so long one serves those who come after.
    """

    reach: int = 10_000
    exact_reach: int = 100_000
    snapshots: int = 3
    fresh_s: float = 5.0
    parts: PartLimits = PartLimits()
    exact: MessageLimits = MessageLimits()


class Wait(NamedTuple):
    """The next message is not there yet: it is being rendered, or has not been sent live."""


WAIT: Final = Wait()


class Reply:
    """The messages of one answer, from number `seq` to `end` of the journal. Close it: what it needs is kept.

    most: of an exact one.
    """

    def __init__(
        self,
        journal: Journal,
        encoding: int,
        first: int,
        end: int,
        snapshot: Snapshot | None = None,
        *,
        most: MessageLimits | None = None,
    ) -> None:
        self.seq = self.first = first
        self.end = end
        self.snapshot = snapshot
        self._journal = journal
        self._encoding = encoding
        self.closed = False
        self._most = most
        self._left_bytes = inf if most is None else most.payload_bytes
        self._next_bytes = 0
        if snapshot is not None:
            snapshot.readers += 1

    def __repr__(self) -> str:
        return f"<Reply at {self.seq} of {self.first}..{self.end} {self.snapshot or 'retained'}>"

    def payload(self) -> Payload | Wait | None:
        """The payload of number `seq`; None at the end. `advance` when it is sent."""
        if self.seq > self.end:
            return None
        if self.seq >= self._journal.unsent_from:  # a reader must not see a number live that it has from us
            return WAIT
        found = self._found()
        self._next_bytes = len(found) if isinstance(found, Payload) else 0
        return None if self._next_bytes > self._left_bytes else found

    @property
    def complete(self) -> bool:
        """All of it is told."""
        return self.seq > self.end

    @property
    def half_told(self) -> bool:
        """Some of the state is told, and what was told is not yet the state at any number."""
        spread = self.snapshot if self._most is None else None
        return spread is not None and self.first < self.seq <= spread.upto

    @property
    def needs_from(self) -> int:
        """From this number on it needs what is retained."""
        return self.seq if self.snapshot is None else self.snapshot.upto + 1

    def _found(self) -> Payload | Wait | None:
        snapshot = self.snapshot
        if snapshot is None or self.seq > snapshot.upto:
            return self._journal.payload(self.seq, self._encoding)
        if self._most is not None:
            return self._of_exact(snapshot, self._most)
        place = self.seq - self.first
        if place < len(snapshot.parts):
            return snapshot.parts[place]
        if not snapshot.done:
            return WAIT
        return snapshot.empty if snapshot.parts and not snapshot.failed else None

    def _of_exact(self, snapshot: Snapshot, most: MessageLimits) -> bytes | Wait | None:
        """The whole state at once, or nothing."""
        if not snapshot.done:
            return WAIT
        return snapshot.joined(most) if self.seq == self.first else snapshot.empty

    def advance(self) -> None:
        """Number `seq` is sent."""
        self.seq += 1
        self._left_bytes -= self._next_bytes

    # all at once

    @property
    def rendered(self) -> bool:
        return self.snapshot is None or self.snapshot.done

    @property
    def ready(self) -> bool:
        """`payloads` can be had."""
        return self.rendered and self.end < self._journal.unsent_from

    def payloads(self, end: int | None = None) -> list[Payload] | None:
        """What must be folded for the state after `end`, or a later number that is sent; None if a part of it is
        no longer kept."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.failed or snapshot.upto < self._journal.whole_from - 1:
            return None
        later = range(snapshot.upto + 1, (self.end if end is None else end) + 1)
        kept = [self._journal.payload(seq, self._encoding) for seq in later]
        return [*snapshot.parts, *(payload for payload in kept if payload is not None)]

    def close(self) -> None:
        """The snapshot is not needed any more."""
        if self.snapshot is not None:
            self.snapshot.readers -= 1
            self.snapshot = None
        self.closed = True


class Recovery:
    """Answers requests; many that come together share one snapshot. `encodings` as the journal retains them.

    clock: seconds, for the age of a snapshot. wall_clock: seconds since the epoch, for its batches. `sources` says
    whose blocks are resident, the fastest tier first.
    """

    def __init__(
        self,
        journal: Journal,
        encodings: Sequence[Encoding],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        limits: ReplayLimits | None = None,
    ) -> None:
        self.journal = journal
        self.encodings = encodings
        self.limits = limits or ReplayLimits()
        self.sources: Callable[[], Sequence[StateSource]] = tuple
        self.snapshots: list[Snapshot] = []
        self.made = self.heartbeats = 0
        self._open: list[Reply] = []
        self._clock = clock
        self._wall_clock = wall_clock
        journal.needed_from = self._needed_from

    def __repr__(self) -> str:
        return f"<Recovery made={self.made} snapshots={self.snapshots}>"

    def answer(self, start: int, encoding: int, *, exact: bool = False) -> Reply | None:
        """The reply to a request for numbers >= start; None: ask again when less is being rendered.

        exact: it starts at `start`, however old, and has what is retained if that is out of reach.
        """
        end = self.journal.next_seq - 1
        too_long = exact and end - start >= self.limits.exact_reach
        if start >= self.journal.whole_from or start > end or too_long:
            return self._reply(encoding, start, end, exact=exact)
        first = start if exact else max(start, end - self.limits.reach + 1)
        room_from = None if exact else first
        snapshot = self._shared(room_from, encoding, first) or self._make(room_from, encoding)
        if snapshot is None:
            return None
        return self._reply(encoding, first, self.journal.next_seq - 1, snapshot, exact=exact)

    def whole(self, encoding: int) -> Reply | None:
        """The state after the newest number, wherever its parts are numbered; None: ask again later."""
        end = self.journal.next_seq - 1
        snapshot = self._shared(None, encoding) or self._make(None, encoding)
        return None if snapshot is None else self._reply(encoding, end + 1, end, snapshot)

    def _reply(
        self, encoding: int, first: int, end: int, snapshot: Snapshot | None = None, *, exact: bool = False
    ) -> Reply:
        most = self.limits.exact if exact else None
        reply = Reply(self.journal, encoding, first, end, snapshot, most=most)
        self._open.append(reply)
        return reply

    def _needed_from(self) -> int | None:
        """What the journal has to keep for the replies under way."""
        self._open = [reply for reply in self._open if not reply.closed]
        return min((reply.needs_from for reply in self._open), default=None)

    # the shared snapshot

    def _shared(self, first: int | None, encoding: int, least_upto: int = 0) -> Snapshot | None:
        """One that is young, has numbers enough from `first` on, and is followed by retained batches."""
        for snapshot in self._young():
            needed = least_upto if first is None else first + snapshot.numbers_needed - 1
            fits = needed <= snapshot.upto
            if snapshot.encoding == self.encodings[encoding] and fits:
                return snapshot
        return None

    def _young(self) -> list[Snapshot]:
        youngest = self._clock() - self.limits.fresh_s
        kept = self.journal.whole_from - 1
        return [
            snapshot
            for snapshot in self.snapshots
            if snapshot.made_at >= youngest and snapshot.upto >= kept and not snapshot.failed
        ]

    def _make(self, first: int | None, encoding: int) -> Snapshot | None:
        """Cut now, and append the numbers that it lacks. None while another is rendered, or too many are read."""
        self.forget_old()
        if len(self.snapshots) >= self.limits.snapshots:
            self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.readers or not snapshot.done]
        if self.rendering is not None or len(self.snapshots) >= self.limits.snapshots:
            return None
        now = self._wall_clock()
        cuts = [source.cut() for source in self.sources()]
        upto = self.journal.next_seq - 1
        chosen = self.encodings[encoding]
        snapshot = Snapshot(cuts, upto, chosen, self.limits.parts, made_at=self._clock(), ts=now)
        lacking = 0 if first is None else first + snapshot.numbers_needed - 1 - upto
        for _ in range(lacking):
            snapshot.upto = self.journal.append((), now)
            self.heartbeats += 1
        self.snapshots.append(snapshot)
        self.made += 1
        return snapshot

    @property
    def rendering(self) -> Snapshot | None:
        """The one that is not done."""
        return next((snapshot for snapshot in self.snapshots if not snapshot.done), None)

    def forget_old(self) -> None:
        """Drop what nobody reads and nobody will. Call it about once a second."""
        young = self._young()
        self._open = [reply for reply in self._open if not reply.closed]
        self.snapshots = [
            snapshot for snapshot in self.snapshots if snapshot.readers or snapshot in young or not snapshot.done
        ]

    def stats(self) -> dict[str, int]:
        return {
            "snapshots_made": self.made,
            "snapshots_held": len(self.snapshots),
            "snapshot_bytes": sum(snapshot.bytes for snapshot in self.snapshots),
            "snapshot_blocks": self.snapshots[-1].blocks if self.snapshots else 0,
            "snapshot_heartbeats": self.heartbeats,
        }
