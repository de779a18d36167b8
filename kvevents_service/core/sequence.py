"""The order of one publisher's numbers: what to deliver, what to hold, what is missing, when it started anew.

    live ──────────> held, while a replay is under way or a hole is open ──> delivered
    replayed ──────────────────────────────────────────────────────────────> delivered

Two rules. Delivered numbers rise, and each number that was skipped is in a `Gap`, from one `Restart` to the next.
A number of a live message is never sent twice, so which message is late and which is of a new publisher is told
by the live numbers alone: one above all live numbers so far that a replay has brought already is a duplicate, one
that is not above is a restart. Between a replay and the first live message after it there is nothing to compare
with: then a number the replay brought counts as still under way until `settle`, and as a restart from then on.

A publisher that started anew and is already past the last number looks like a gap: numbers alone cannot tell.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from kvevents_service.wire.frames import LiveFrame


class Deliver(NamedTuple):
    """The next message, for the consumer."""

    frame: LiveFrame
    replayed: bool


class Gap(NamedTuple):
    """The numbers [expected, got) are missing for good: what was told in them is unknown."""

    expected: int
    got: int


class Restart(NamedTuple):
    """The number went back from `last` to `seq`: another publisher. All that the old one told is void."""

    last: int
    seq: int


class Ask(NamedTuple):
    """Ask for a replay of all numbers >= start. One that is under way is to be given up."""

    start: int


Step: TypeAlias = Deliver | Gap | Restart | Ask


class HoldLimits(NamedTuple):
    """Bounds of the live messages that wait for a replay; the newest one is always kept."""

    batches: int = 8192
    payload_bytes: int = 256 * 1024 * 1024


class Sequencer:
    """Feed it what came; perform the steps it returns, in order.

    replay: whether `Ask` can be performed. Without it a hole is a `Gap` at once, and the first number of all may be
    any (`joined_at`); with it numbers are expected from 0 on. After a restart they are in both cases.
    """

    def __init__(self, *, replay: bool, limits: HoldLimits | None = None) -> None:
        self.limits = limits or HoldLimits()
        self.joined_at: int | None = None
        self.replaying = False
        self.duplicates = self.held_dropped = 0
        self._can_replay = replay
        self._next = 0
        self._joining = not replay
        self._settled = True
        self._newest: tuple[int, int] | None = None  # number and hash of the newest live message
        self._asked_below = 0
        self._held: deque[LiveFrame] = deque()
        self._held_bytes = 0

    def __repr__(self) -> str:
        state = "replaying" if self.replaying else "live"
        return f"<Sequencer {state} next={self._next} held={len(self._held)}>"

    def stats(self) -> dict[str, int]:
        counts = {"duplicates": self.duplicates, "held_dropped": self.held_dropped}
        return {**counts, "held": len(self._held), "held_bytes": self._held_bytes}

    @property
    def settled(self) -> bool:
        """False from a replay's start until `settle`."""
        return self._settled

    def start(self) -> list[Step]:
        """Before all else: a replay from 0 brings what was sent before the subscription worked."""
        return self._ask() if self._can_replay else []

    def live(self, frame: LiveFrame) -> list[Step]:
        """A message of the subscription, in the order they came."""
        if self._is_restart(frame):
            return self._restart(frame)
        if self._is_duplicate(frame):
            self.duplicates += 1
            return []
        self._hold(frame)
        return [] if self.replaying else self._release(0)

    def replayed(self, frame: LiveFrame) -> list[Step]:
        """A message of the replay under way. It goes before a held one of the same number."""
        steps: list[Step] = []
        while self._held and self._held[0].seq < frame.seq:
            steps += self._accept(self._unhold(), replayed=False)
        return steps + self._accept(frame, replayed=True)

    def end(self) -> list[Step]:
        """The replay has told all it has. A hole it could not know of, because it came later, is asked for."""
        self.replaying = False
        return self._release(self._asked_below)

    def give_up(self) -> list[Step]:
        """The replay is not going to end: what is on hold is delivered, holes and all."""
        self.replaying = False
        return self._release(self._live_below())

    def settle(self) -> None:
        """Nothing sent before the last replay's end can still be under way."""
        self._settled = not self.replaying

    def _is_restart(self, frame: LiveFrame) -> bool:
        if self._newest is not None and frame.seq <= self._newest[0]:
            return self._newest != (frame.seq, hash(frame.payload))
        return self._settled and frame.seq < self._next

    def _is_duplicate(self, frame: LiveFrame) -> bool:
        same = self._newest is not None and frame.seq == self._newest[0]
        self._newest = (frame.seq, hash(frame.payload))
        return same or frame.seq < self._next

    def _restart(self, frame: LiveFrame) -> list[Step]:
        steps = self._release(self._live_below())
        steps.append(Restart(self._next - 1, frame.seq))
        self._next = 0
        self._newest = (frame.seq, hash(frame.payload))
        self._hold(frame)
        return steps + (self._ask() if self._can_replay else self._release(0))

    def _ask(self) -> list[Step]:
        self.replaying, self._settled = True, False
        self._asked_below = self._live_below()
        return [Ask(self._next)]

    def _live_below(self) -> int:
        return 0 if self._newest is None else self._newest[0] + 1

    def _release(self, asked_below: int) -> list[Step]:
        """Deliver what is on hold, up to a hole that no replay was asked for; such a hole is before
        `asked_below` or later."""
        steps: list[Step] = []
        while self._held:
            seq = self._held[0].seq
            if self._can_replay and seq > self._next and seq >= asked_below:
                return steps + self._ask()
            steps += self._accept(self._unhold(), replayed=False)
        return steps

    def _accept(self, frame: LiveFrame, replayed: bool) -> list[Step]:
        if frame.seq < self._next:
            self.duplicates += 1
            return []
        hole = frame.seq > self._next and not self._joining
        steps: list[Step] = [Gap(self._next, frame.seq)] if hole else []
        if self.joined_at is None:
            self.joined_at = frame.seq
        self._joining = False
        self._next = frame.seq + 1
        return [*steps, Deliver(frame, replayed)]

    def _hold(self, frame: LiveFrame) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)
        while len(self._held) > 1 and self._over_limit():
            self._unhold()
            self.held_dropped += 1

    def _over_limit(self) -> bool:
        return len(self._held) > self.limits.batches or self._held_bytes > self.limits.payload_bytes

    def _unhold(self) -> LiveFrame:
        frame = self._held.popleft()
        self._held_bytes -= len(frame.payload)
        return frame
