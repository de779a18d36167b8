"""Events put between the header and the end of a batch without decoding them.

Only for what `codec.encode_own` writes: `[float64 ts, [events], int rank]`, perhaps with a publisher id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvevents_service.wire.frames import Payload

_EVENTS_AT: Final = 10
"""After the array's own byte and the float64."""
_SMALL: Final = 0x90
_ARRAY16, _ARRAY32 = b"\xdc", b"\xdd"
_WIDTHS: Final = {0xDC: 2, 0xDD: 4}


def array_head(count: int) -> bytes:
    """What comes before the values of an array of so many."""
    if count < 1 << 4:
        return bytes((_SMALL | count,))
    return _ARRAY16 + count.to_bytes(2, "big") if count < 1 << 16 else _ARRAY32 + count.to_bytes(4, "big")


class Ends(NamedTuple):
    """What comes before the events of a batch and what behind them."""

    head: bytes
    tail: bytes


def ends_of(empty: bytes, events: int) -> Ends:
    """Those of a batch of so many events that is else as this one, which has none."""
    return Ends(empty[:_EVENTS_AT] + array_head(events), empty[_EVENTS_AT + 1 :])


def spliced(empty: bytes, payloads: Sequence[Payload]) -> bytes:
    """One payload with the events of all, in order; the rest is that of `empty`, a batch of the same encoding."""
    counts_and_starts = [_events_of(payload) for payload in payloads]
    head, tail = ends_of(empty, sum(count for count, _ in counts_and_starts))
    bodies = (
        memoryview(payload)[start : len(payload) - len(tail)]
        for payload, (_, start) in zip(payloads, counts_and_starts, strict=True)
    )
    return b"".join([head, *bodies, tail])


def event_count(payload: Payload) -> int:
    """How many events a payload has, if it is one of those."""
    return _events_of(payload)[0] if len(payload) > _EVENTS_AT else 0


def _events_of(payload: Payload) -> tuple[int, int]:
    """How many events, and where the first one is."""
    first = payload[_EVENTS_AT]
    width = _WIDTHS.get(first)
    start = _EVENTS_AT + 1
    if width is None:
        return first - _SMALL, start
    return int.from_bytes(payload[start : start + width], "big"), start + width
