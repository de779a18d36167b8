"""How a request for old numbers is answered: with what is retained, or with a snapshot that takes their place.

    retained    start ................................ end
    snapshot    first: clear + state ... | empty ... upto | retained ... end
    exact       start: clear + state | empty ........ upto | retained ... end

The reply is contiguous. `first` is the number asked for, or 9,999 below the newest. If the state needs more
numbers than there are, empty batches are appended, so that `upto` is far enough. A reply that meets a number which
is no longer kept stops there: its reader misses the next one, and asks again.

An exact reply is for readers that take it only from the number they asked for, and only up to the live message that
made them ask, which we do not know: the whole state is in its first number. What comes live after that may be older
than the state; it ends at the same state all the same, as the last thing said of each block is said again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvevents_service.core.cut import StateSource
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal
from kvevents_service.core.snapshot import PartLimits, Snapshot


class ReplayLimits(NamedTuple):
    """reach: most numbers in a reply that starts with a snapshot; more than its parts. Times in seconds.

    exact_reach: most numbers in an exact one; empty batches, most of them.

    snapshots: in memory at once, slow readers' ones included. fresh_s: so long one serves those who come after.
    """

    reach: int = 10_000
    exact_reach: int = 100_000
    snapshots: int = 3
    fresh_s: float = 5.0
    parts: PartLimits = PartLimits()


class Wait(NamedTuple):
    """The next message is not there yet: it is being rendered, or has not been sent live."""


WAIT: Final = Wait()


class Reply:
    """The messages of one answer, from number `seq` to `end` of the journal. Close it: it may hold a snapshot."""

    def __init__(
        self,
        journal: Journal,
        encoding: int,
        first: int,
        end: int,
        snapshot: Snapshot | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.seq = self.first = first
        self.end = end
        self.snapshot = snapshot
        self._journal = journal
        self._encoding = encoding
        self._exact = exact
        if snapshot is not None:
            snapshot.readers += 1

    def __repr__(self) -> str:
        return f"<Reply at {self.seq} of {self.first}..{self.end} {self.snapshot or 'retained'}>"

    def payload(self) -> bytes | Wait | None:
        """The payload of number `seq`; None at the end. `advance` when it is sent."""
        if self.seq > self.end:
            return None
        if self.seq >= self._journal.unsent_from:  # a reader must not see a number live that it has from us
            return WAIT
        snapshot = self.snapshot
        if snapshot is not None and self.seq <= snapshot.upto:
            return self._of_snapshot(snapshot)
        return self._journal.payload(self.seq, self._encoding)

    @property
    def half_told(self) -> bool:
        """Some of the state is told, and what was told is not yet the state at any number."""
        return self.snapshot is not None and self.first < self.seq <= self.snapshot.upto

    def _of_snapshot(self, snapshot: Snapshot) -> bytes | Wait | None:
        place = self.seq - self.first
        parts = self._exact_parts(snapshot) if self._exact and snapshot.done else snapshot.parts
        if place < len(parts) and (snapshot.done or not self._exact):
            return parts[place]
        if not snapshot.done:
            return WAIT
        return snapshot.empty if parts and not snapshot.failed else None

    def _exact_parts(self, snapshot: Snapshot) -> list[bytes]:
        """The whole state at once; one too large for that as it is, if there are numbers enough; else none."""
        joined = snapshot.joined()
        if joined is not None:
            return [joined]
        return snapshot.parts if self.first + snapshot.numbers_needed - 1 <= snapshot.upto else []

    def advance(self) -> None:
        """Number `seq` is sent."""
        self.seq += 1

    # all at once, for the snapshot endpoint

    @property
    def ready(self) -> bool:
        """`payloads` can be had."""
        rendered = self.snapshot is None or self.snapshot.done
        return rendered and self.end < self._journal.unsent_from

    def payloads(self) -> list[bytes] | None:
        """What must be folded for the state after `end`; None if a part of it is no longer kept."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.failed or snapshot.upto < self._journal.whole_from - 1:
            return None
        later = range(snapshot.upto + 1, self.end + 1)
        kept = [self._journal.payload(seq, self._encoding) for seq in later]
        return [*snapshot.parts, *(payload for payload in kept if payload is not None)]

    def close(self) -> None:
        """The snapshot is not needed any more."""
        if self.snapshot is not None:
            self.snapshot.readers -= 1
            self.snapshot = None


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
        self._clock = clock
        self._wall_clock = wall_clock

    def __repr__(self) -> str:
        return f"<Recovery made={self.made} snapshots={self.snapshots}>"

    def answer(self, start: int, encoding: int, *, exact: bool = False, distrust: bool = False) -> Reply | None:
        """The reply to a request for numbers >= start; None: ask again when less is being rendered.

        exact: it starts at `start`, however old. distrust: `start` may be of another numbering, send a snapshot.
        """
        journal = self.journal
        end = journal.next_seq - 1
        if start > end or (start >= journal.whole_from and not distrust):
            return Reply(journal, encoding, start, end)
        first = start if exact else max(start, end - self.limits.reach + 1)
        room_from = None if exact else first
        snapshot = self._shared(room_from, encoding, first) or self._make(room_from, encoding)
        if snapshot is None:
            return None
        return Reply(journal, encoding, first, journal.next_seq - 1, snapshot, exact=exact)

    def whole(self, encoding: int) -> Reply | None:
        """The state after the newest number, wherever its parts are numbered; None: ask again later."""
        end = self.journal.next_seq - 1
        snapshot = self._shared(None, encoding) or self._make(None, encoding)
        return None if snapshot is None else Reply(self.journal, encoding, end + 1, end, snapshot)

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
