"""The order of one publisher's numbers: what to deliver, what to hold, what is missing, when it started anew.

    live ──────────> held, while a replay is under way or a hole is open ──> delivered
    replayed ──────────────────────────────────────────────────────────────> delivered

Two rules. Delivered numbers rise, and each number that was skipped is in a `Gap` or a `Resync`, from one `Restart`
or `Resync` to the next. A number of a live message is never sent twice, so which message is late and which is of a
new publisher is told by the live numbers alone: one above all live numbers so far that a replay has brought already
is a duplicate, one that is not above is a restart. Between a replay and the first live message after it there is
nothing to compare with: then a number the replay brought counts as still under way until `settle`, and as a restart
from then on. A publisher that says its id is known by that instead.

A batch whose first event is AllBlocksCleared makes all before it void: a hole before it is no loss but a `Resync`.
A reply that has such a batch may be a snapshot, spread over its numbers: until its end the state is not whole.

A publisher without an id that started anew, is already past the last number and does not clear first looks like a
gap: numbers alone cannot tell.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, TypeAlias

from kvevents_service.wire.frames import LiveFrame
from kvevents_service.wire.peek import Snapshot, is_plain, publisher_id, starts_anew

TRIES: Final = 2
RETIRED: Final = 16
"""So many earlier publishers' ids are known, so that what they sent last is not taken for a new one's."""


class Origin(NamedTuple):
    """One counter: the source's label, and the topic and data parallel rank of its batches."""

    label: str
    topic: bytes = b""
    dp_rank: int | None = None


NOWHERE: Final = Origin("")


class Deliver(NamedTuple):
    """The next message, for the consumer."""

    frame: LiveFrame
    replayed: bool


class Gap(NamedTuple):
    """The numbers [expected, got) are missing: what was told in them is unknown, so what is known of `source` is
    not to be trusted. An empty range: a snapshot broke off."""

    expected: int
    got: int
    source: Origin = NOWHERE


class Restart(NamedTuple):
    """The number went from `last` to `seq` at another publisher. All that the old one told is void."""

    last: int
    seq: int
    source: Origin = NOWHERE


class Resync(NamedTuple):
    """The numbers [expected, got) were skipped, or told again, without loss: all told so far is void, and what
    follows tells the whole state."""

    expected: int
    got: int
    source: Origin = NOWHERE


class Ask(NamedTuple):
    """Ask for a replay of all numbers >= start; 0: for the whole state. One that is under way is to be given up."""

    start: int


Step: TypeAlias = Deliver | Gap | Restart | Resync | Ask


class HoldLimits(NamedTuple):
    """Bounds of the live messages that wait for a replay; the newest one is always kept."""

    batches: int = 8192
    payload_bytes: int = 256 * 1024 * 1024


class Sequencer:
    """Feed it what came; perform the steps it returns, in order.

    replay: whether `Ask` can be performed. Without it a hole is a `Gap` at once, and the first number of all may be
    any (`joined_at`), as with `since`, where the first replay is to start; else numbers are expected from 0 on.
    After a restart they are in all cases. source: what the steps say they are from.
    """

    def __init__(self, *, replay: bool, limits: HoldLimits | None = None, since: int = 0) -> None:
        self.limits = limits or HoldLimits()
        self.source = NOWHERE
        self.joined_at: int | None = None
        self.replaying = False
        self.distrusted = False
        """Something is missing that asking for the whole state may bring: see `refresh`."""
        self.duplicates = self.held_dropped = 0
        self._can_replay = replay
        self._next = self._asked_below = self._tries = self._held_bytes = 0
        self._since, self._settled, self._joining = since, True, not replay or since > 0
        self._newest: tuple[int, int] | None = None  # number and hash of the newest live message
        self._unanswered = False  # nothing of the reply under way has come
        self._void = False  # the reply under way may tell anew what was delivered
        self._filling = False  # the reply under way told a clear: what follows may be a snapshot
        self._partial = False  # one that told a clear broke off, and nothing has made it whole
        self._publisher: bytes | None = None
        self._proposed: bytes | None = None  # whose snapshot came that is not the publisher's
        self._retired: deque[bytes] = deque(maxlen=RETIRED)
        self._held: deque[LiveFrame] = deque()

    def __repr__(self) -> str:
        state = "replaying" if self.replaying else "live"
        return f"<Sequencer {state} next={self._next} held={len(self._held)}>"

    def stats(self) -> dict[str, int]:
        held = {"held": len(self._held), "held_bytes": self._held_bytes}
        return {"duplicates": self.duplicates, "held_dropped": self.held_dropped} | held

    @property
    def settled(self) -> bool:
        """False from a replay's start until `settle`."""
        return self._settled

    def start(self) -> list[Step]:
        """Before all else: a replay brings what was sent before the subscription worked."""
        return self._ask(self._since) if self._can_replay else []

    def live(self, frame: LiveFrame) -> list[Step]:
        """A message of the subscription, in the order they came."""
        if self._is_next(frame):
            self._newest, self._next = (frame.seq, hash(frame.payload)), frame.seq + 1
            return [Deliver(frame, False)]
        if self._is_retired(frame):
            return []
        if self._is_other(frame) or self._is_restart(frame):
            return self._restart(frame)
        if self._is_duplicate(frame):
            self.duplicates += 1
            return []
        self._hold(frame)
        return [] if self.replaying else self._release(0)

    def replayed(self, frame: LiveFrame) -> list[Step]:
        """A message of the replay under way. It goes before a held one of the same number, and it is of the
        publisher that is there now, whoever sent live messages before."""
        if self._is_other(frame):
            return [*self._end_old(frame.seq), *self._ask(0)]
        anew = starts_anew(frame.payload)
        self._partial &= not anew
        first, self._unanswered = self._unanswered, False
        again = self._void and (anew or frame.seq == 0) and frame.seq < self._next
        if again or (anew and frame.seq > self._next):
            return self._resync(frame)
        steps: list[Step] = []
        while self._held and self._held[0].seq < frame.seq:
            steps += self._accept(self._unhold(), replayed=False)
        distrusted = self.distrusted
        steps += self._accept(frame, replayed=True)
        if first:
            self.distrusted = distrusted  # it has no more than this: asking again brings the same
        self._filling |= anew
        return steps

    def end(self) -> list[Step]:
        """The replay has told all it has. A hole it could not know of, because it came later, is asked for."""
        self.distrusted &= not self._void  # it does not have the whole state
        return self._stop(self._asked_below, broken=self._partial)

    def give_up(self) -> list[Step]:
        """The replay is not going to end: ask once more, then deliver what is on hold, holes and all."""
        if self._tries < TRIES:
            return self._ask(0 if self._filling or self._void else self._since if self._joining else self._next)
        return self._stop(self._live_below(), broken=self._filling or self._partial)

    def snapshot(self, snapshot: Snapshot) -> list[Step]:
        """The answer to an `Ask` from an endpoint for snapshots: the whole state, after which the numbers go on.

        One of another publisher than the last one heard may have been under way since before that. Ask again: who
        answers the same twice is the one that is there.
        """
        steps: list[Step] = []
        if self._publisher not in (None, snapshot.publisher_id):
            if self._proposed != snapshot.publisher_id:
                self._proposed = snapshot.publisher_id
                return self._ask(0)
            steps = self._end_old(snapshot.seq)
        self._retire(snapshot.publisher_id)
        while self._held and self._held[0].seq <= snapshot.seq:
            self._unhold()
            self.duplicates += 1
        steps.append(Resync(self._next, snapshot.seq + 1, self.source))
        self._next, self._joining, self.distrusted = snapshot.seq + 1, False, False
        steps += [Deliver(LiveFrame(b"", snapshot.seq, payload), True) for payload in snapshot.payloads]
        self._answered()
        return steps + self._release(self._asked_below)

    def distrust(self) -> None:
        """The consumer could not use what was delivered."""
        self.distrusted = self._can_replay

    def refresh(self) -> list[Step]:
        """Ask for the whole state, because of a loss. It is told after a `Resync`, if the publisher has it."""
        if self._can_replay and not self.replaying:
            self._void = True
            return self._ask(0)
        return []

    def settle(self) -> None:
        """Nothing sent before the last replay's end can still be under way."""
        self._settled = not self.replaying

    # who sent it

    def _is_next(self, frame: LiveFrame) -> bool:
        """The usual case: the one behind the newest live one, nothing is on hold or missing."""
        newest, seq = self._newest, frame.seq
        behind = newest is not None and newest[0] + 1 == seq == self._next
        return behind and not (self.replaying or self._held) and is_plain(frame.payload)

    def _is_retired(self, frame: LiveFrame) -> bool:
        late = bool(self._retired) and publisher_id(frame.payload) in self._retired
        self.duplicates += late
        return late

    def _is_other(self, frame: LiveFrame) -> bool:
        """Whether another publisher than that of the frames so far sent it, as far as they say who they are."""
        found = publisher_id(frame.payload)
        return found is not None and self._retire(found)

    def _retire(self, found: bytes) -> bool:
        known, self._publisher, self._proposed = self._publisher, found, None
        if known is None or known == found:
            return False
        if found in self._retired:
            self._retired.remove(found)
        self._retired.append(known)
        return True

    def _is_restart(self, frame: LiveFrame) -> bool:
        if self._newest is not None and frame.seq <= self._newest[0]:
            return self._newest != (frame.seq, hash(frame.payload))
        return self._settled and frame.seq < self._next

    def _is_duplicate(self, frame: LiveFrame) -> bool:
        same = self._newest is not None and frame.seq == self._newest[0]
        self._newest = (frame.seq, hash(frame.payload))
        return same or frame.seq < self._next

    def _restart(self, frame: LiveFrame) -> list[Step]:
        steps = self._end_old(frame.seq)
        self._newest = (frame.seq, hash(frame.payload))
        self._hold(frame)
        return steps + (self._ask(0) if self._can_replay else self._release(0))

    def _end_old(self, seq: int) -> list[Step]:
        """Tell what is on hold of the old publisher, and that it is over."""
        self._answered()
        steps = [*self._release(self._live_below()), Restart(self._next - 1, seq, self.source)]
        self._next, self._newest, self.distrusted, self._joining = 0, None, False, False
        return steps

    # the replay under way

    def _ask(self, start: int) -> list[Step]:
        self._tries = self._tries + 1 if self.replaying else 1
        self._void |= self._filling
        self._partial |= self._filling
        self.replaying, self._settled, self._unanswered, self._filling = True, False, True, False
        self._asked_below = self._live_below()
        return [Ask(start)]

    def _answered(self) -> None:
        self.replaying = self._void = self._filling = self._partial = False

    def _stop(self, asked_below: int, broken: bool) -> list[Step]:
        self._answered()
        gap: list[Step] = [self._gap(self._next)] if broken else []
        return gap + self._release(asked_below)

    def _resync(self, frame: LiveFrame) -> list[Step]:
        while self._held and self._held[0].seq <= frame.seq:
            self._unhold()
            self.duplicates += 1
        steps: list[Step] = [Resync(self._next, frame.seq, self.source)]
        self._next, self._void, self.distrusted, self._filling = frame.seq, False, False, True
        self._partial = False
        return steps + self._accept(frame, replayed=True)

    def _live_below(self) -> int:
        return 0 if self._newest is None else self._newest[0] + 1

    def _release(self, asked_below: int) -> list[Step]:
        """Deliver what is on hold, up to a hole that no replay was asked for; such a hole is before
        `asked_below` or later."""
        steps: list[Step] = []
        while self._held:
            if self._is_open_hole(self._held[0], asked_below):
                return steps + self._ask(self._next)
            steps += self._accept(self._unhold(), replayed=False)
        return steps

    def _is_open_hole(self, head: LiveFrame, asked_below: int) -> bool:
        behind = head.seq >= max(self._next + 1, asked_below) and not self._joining
        return behind and self._can_replay and not starts_anew(head.payload)

    def _accept(self, frame: LiveFrame, replayed: bool) -> list[Step]:
        if frame.seq < self._next:
            self.duplicates += 1
            return []
        hole = frame.seq > self._next and not self._joining
        steps: list[Step] = [self._hole(frame)] if hole else []
        self.joined_at = frame.seq if self.joined_at is None else self.joined_at
        self._joining, self._next = False, frame.seq + 1
        return [*steps, Deliver(frame, replayed)]

    def _hole(self, frame: LiveFrame) -> Gap | Resync:
        if starts_anew(frame.payload):
            self.distrusted = False
            return Resync(self._next, frame.seq, self.source)
        return self._gap(frame.seq)

    def _gap(self, got: int) -> Gap:
        self.distrusted |= self._can_replay and not self._filling
        return Gap(self._next, got, self.source)

    # what waits

    def _hold(self, frame: LiveFrame) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)
        batches, payload_bytes = self.limits
        while len(self._held) > 1 and (len(self._held) > batches or self._held_bytes > payload_bytes):
            self._unhold()
            self.held_dropped += 1

    def _unhold(self) -> LiveFrame:
        frame = self._held.popleft()
        self._held_bytes -= len(frame.payload)
        return frame
