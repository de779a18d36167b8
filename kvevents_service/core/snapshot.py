"""A snapshot: a clear, then the whole resident state, as payloads of bounded size in one encoding.

It is rendered piece by piece, so that lookups come in between, and read while it grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvevents_service.core.announce import EVENT_WEIGHT, MAX_BATCH_EVENTS
from kvevents_service.core.cut import Cut
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.press import Press
from kvevents_service.core.rows import Row, joined
from kvevents_service.wire.frames import Payload
from kvevents_service.wire.splice import event_count, spliced

STEP_RUNS: Final = 64
"""So many are looked at in one step, or the runs of one row: about half a millisecond, however short they are."""
_END: Final[list[Row]] = []


class MessageLimits(NamedTuple):
    """What one payload may hold for readers that refuse a larger one: vllm-router refuses
    more than 16 MiB, and has to fold a reply in 5 s."""

    payload_bytes: int = 8 * 1024 * 1024
    events: int = MAX_BATCH_EVENTS


class PartLimits(NamedTuple):
    """How a state is split. weight: tokens of a part, with EVENT_WEIGHT for each block; about half a ms and 400 KB.

    parts: beyond so many they get heavier instead of more, for they must fit into the numbers of one reply.
    """

    weight: int = 1 << 17
    parts: int = 4096


def block_weight(block_size: int) -> int:
    """What one block adds to a part."""
    return block_size + EVENT_WEIGHT


def part_weight(cuts: Sequence[Cut], limits: PartLimits) -> int:
    """How heavy a part may become for these cuts."""
    total = sum(blocks * block_weight(block_size) for cut in cuts for blocks, block_size in cut.sizes())
    return max(limits.weight, total // limits.parts)


def most_parts(cuts: Sequence[Cut], weight: int) -> int:
    """No rendering of these cuts has more parts: all but the last are filled to less than a block's room."""
    sizes = [size for cut in cuts for size in cut.sizes()]
    heaviest = max((block_weight(block_size) for _, block_size in sizes), default=1)
    total = sum(blocks * block_weight(block_size) for blocks, block_size in sizes)
    return 1 + min(total // max(1, weight - heaviest + 1), sum(blocks for blocks, _ in sizes))


def parts_of(cuts: Sequence[Cut], weight: int) -> Iterator[list[Row]]:
    """Everything, cut so that each part is filled before the next begins. One part at least."""
    return (part for part in steps_of(cuts, weight) if part is not None)


def steps_of(cuts: Sequence[Cut], weight: int) -> Iterator[list[Row] | None]:
    """The parts; None on the way to one that has many runs, each of which takes a while to find."""
    part: list[Row] = []
    left, looked_at = weight, 0
    for row in (row for cut in cuts for row in joined(cut.rows())):
        each, start = block_weight(row.block_size), 0
        while start < row.blocks:
            if left < each and left < weight:
                yield part
                part, left = [], weight
            stop = min(row.blocks, start + max(1, left // each))
            part.append(row.part(start, stop))
            left -= (stop - start) * each
            start = stop
        looked_at += len(row.runs)
        if looked_at >= STEP_RUNS:
            yield None
            looked_at = 0
    yield part


class Snapshot:
    """The state after number `upto`, as `parts` that grow until `done`. `made_at` in seconds of the caller's clock.

    readers: replies that still need it.
    """

    def __init__(
        self, cuts: Sequence[Cut], upto: int, encoding: Encoding, limits: PartLimits, *, made_at: float, ts: float
    ) -> None:
        weight = part_weight(cuts, limits)
        self.upto = upto
        self.encoding = encoding
        self.made_at = made_at
        self.parts: list[Payload] = []
        self.done = self.failed = False
        self.readers = self.blocks = self.bytes = self.events = 0
        self._most_parts = most_parts(cuts, weight)
        self.empty = encoding.encode((), ts)
        self._joined: bytes | None = None
        self._ts = ts
        self._press = Press()
        self._rest = steps_of(cuts, weight)

    def __repr__(self) -> str:
        state = "failed" if self.failed else "done" if self.done else "growing"
        return f"<Snapshot upto={self.upto} {state} parts={len(self.parts)} readers={self.readers}>"

    def joined(self, most: MessageLimits) -> bytes | None:
        """The whole state as one payload, once it is done; None if it is larger than that."""
        if self._joined is None and not self.failed:
            if self.bytes > most.payload_bytes or self.events > most.events:
                return None
            self._joined = spliced(self.empty, self.parts)
        return self._joined

    @property
    def numbers_needed(self) -> int:
        """How many numbers its parts take, at most; exact once it is done."""
        return len(self.parts) if self.done else self._most_parts

    def render_next(self) -> None:
        """One part more, a step towards it, or `done`. Any error: it cannot be rendered, it has `failed` and is
        done."""
        try:
            part = next(self._rest, _END)
            if part is None:
                return
            if part is _END:
                self.done = True
                return
            payload = self.encoding.press(part, self._ts, self._press, clear=not self.parts)
        except Exception:
            self.done = self.failed = True
            raise
        self.parts.append(payload)
        self.bytes += len(payload)
        self.events += event_count(payload)
        self.blocks += sum(row.blocks for row in part)
