"""The whole state told live, for readers of exact replies whom a reply did not bring up to date.

    numbered                  n      n+1             n+2      n+3
    to readers of exact ones  ...    clear + state   state    ...
    to all others             ...    empty           empty    ...

Such a reader asks once; whatever comes of that, it goes on behind the live message that made it ask. So it takes
these, as do the others of its kind, who know it all: their state ends as it was. The state is that of the last
number before, and no message is so large that a reader refuses it.

Every telling costs all its readers: after one there is a pause, longer each time it was not the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from kvevents_service.core.journal import Told
from kvevents_service.core.replay import Recovery, Reply
from kvevents_service.core.snapshot import MessageLimits
from kvevents_service.wire.frames import Payload
from kvevents_service.wire.splice import event_count


class TellingLimits(NamedTuple):
    """Seconds. gather_s: from the first who asks to the cut, for those who come with it. pause_s: after the first
    telling; twice as long after each that follows within twice the last pause, and at most most_pause_s."""

    gather_s: float = 0.1
    pause_s: float = 5.0
    most_pause_s: float = 320.0


class _Pace:
    """When one encoding may be told again."""

    def __init__(self, limits: TellingLimits) -> None:
        self._limits = limits
        self._pause_s = limits.pause_s
        self._free_from = -inf
        self.due_from = inf

    def asked(self, now: float) -> None:
        if self.due_from == inf:
            if now > self._free_from + self._pause_s:
                self._pause_s = self._limits.pause_s
            self.due_from = max(now + self._limits.gather_s, self._free_from)

    def told(self, now: float) -> None:
        self.due_from, self._free_from = inf, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._limits.most_pause_s)


class Teller:
    """Which encodings are due to be told. `clock` in seconds, `wall_clock` in seconds since the epoch."""

    def __init__(
        self,
        recovery: Recovery,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        limits: TellingLimits | None = None,
    ) -> None:
        self.told = self.failed = 0
        self._recovery = recovery
        self._clock = clock
        self._wall_clock = wall_clock
        self._limits = limits or TellingLimits()
        self._paces: dict[int, _Pace] = {}
        self._cut: dict[int, Reply] = {}

    def __repr__(self) -> str:
        return f"<Teller told={self.told} due={self.due}>"

    @property
    def due(self) -> list[int]:
        """Encodings that some reader waits for."""
        return [encoding for encoding, pace in self._paces.items() if pace.due_from < inf]

    @property
    def wait_s(self) -> float:
        """How long until `poll` has something to do."""
        starts = [pace.due_from for encoding, pace in self._paces.items() if encoding not in self._cut]
        return max(0.0, min(starts, default=inf) - self._clock())

    def ask(self, encoding: int) -> None:
        """A reader of this encoding does not know the state."""
        self._paces.setdefault(encoding, _Pace(self._limits)).asked(self._clock())

    def poll(self) -> None:
        """Cut what is due now."""
        for encoding, pace in self._paces.items():
            if pace.due_from <= self._clock() and encoding not in self._cut:
                reply = self._recovery.whole(encoding)
                if reply is not None:
                    self._cut[encoding] = reply

    @property
    def rendered(self) -> list[int]:
        """Encodings that `tell` is to be called for."""
        return [encoding for encoding, reply in self._cut.items() if reply.rendered]

    def tell(self) -> bool:
        """Number what is rendered; False if nothing is. Call it when nothing is pending."""
        before = self._recovery.journal.next_seq
        for encoding in self.rendered:
            self._tell(encoding, self._cut.pop(encoding))
        return self._recovery.journal.next_seq > before

    def _tell(self, encoding: int, reply: Reply) -> None:
        journal = self._recovery.journal
        payloads = reply.payloads(journal.next_seq - 1)
        reply.close()
        self._paces[encoding].told(self._clock())
        if payloads is None:
            self.failed += 1
            self.ask(encoding)
            return
        self.told += 1
        now = self._wall_clock()
        for message in messages(payloads, self._recovery.limits.exact):
            journal.tell(Told(encoding, message), now)

    def stats(self) -> dict[str, int]:
        return {"states_told_live": self.told, "states_told_live_failed": self.failed}


def messages(payloads: Sequence[Payload], most: MessageLimits) -> Iterator[tuple[Payload, ...]]:
    """In order, as many together as are not larger than that; at least one."""
    message: list[Payload] = []
    size = events = 0
    for payload in payloads:
        size, events = size + len(payload), events + event_count(payload)
        if message and (size > most.payload_bytes or events > most.events):
            yield tuple(message)
            message, size, events = [], len(payload), event_count(payload)
        message.append(payload)
    if message:
        yield tuple(message)
