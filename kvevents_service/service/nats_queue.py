"""What waits for a broker: batches in order, bounded, and whether readers are left with a hole.

A queue that is full is emptied: all that it held is behind a hole anyway, and the state is told anew. What is
missing in the numbers on the way in (a batch that could not be encoded) is a hole as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Waiting(NamedTuple):
    """One batch, as it will be published."""

    seq: int
    payload: bytes


class SendQueue:
    """`put` never waits. `holes` counts what made a new state necessary; compare it with what it was before."""

    def __init__(self, most: int, most_bytes: int, first: int = 0) -> None:
        """most, most_bytes: what it holds. first: the number that comes first."""
        self.dropped = self.holes = self.bytes = 0
        self.next_seq = first
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: deque[Waiting] = deque()

    def __repr__(self) -> str:
        return f"<SendQueue {len(self)} waiting, next {self.next_seq}, {self.dropped} dropped>"

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, seq: int, payload: bytes) -> None:
        """Behind all others. Too much, and what waits is dropped."""
        if seq != self.next_seq:
            self.holes += 1
        self.next_seq = seq + 1
        if len(self) >= self._most or self.bytes + len(payload) > self._most_bytes:
            self._drop_all()
        if len(payload) > self._most_bytes:
            self.lose(1)
            return
        self._waiting.append(Waiting(seq, payload))
        self.bytes += len(payload)

    def _drop_all(self) -> None:
        if self._waiting:
            self.lose(len(self))
            self._waiting.clear()
            self.bytes = 0

    def lose(self, batches: int) -> None:
        """So many are not published, and readers have to be told the state."""
        self.dropped += batches
        self.holes += 1

    def head(self, most: int) -> list[Waiting]:
        """The first ones; they stay until they are `done`."""
        return [self._waiting[place] for place in range(min(most, len(self)))]

    def done(self, batches: Sequence[Waiting]) -> None:
        """These are published or lost. Some may have been dropped meanwhile."""
        over = {batch.seq for batch in batches}
        for batch in [*takewhile(lambda first: first.seq in over, self._waiting)]:
            self._waiting.popleft()
            self.bytes -= len(batch.payload)


def outcome(acked: Sequence[bool]) -> tuple[int, int]:
    """Of a burst sent in order: how many are settled, from the first on, and how many of these are lost.

    What failed before one that was taken cannot be sent again: it would come after it.
    """
    settled = len(acked) - next((place for place, taken in enumerate(reversed(acked)) if taken), len(acked))
    return settled, sum(not taken for taken in acked[:settled])
