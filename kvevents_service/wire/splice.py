"""Many batches made one without decoding them: the events of all behind the header of the first.

Only for what `codec.encode_own` writes: `[float64 ts, [events], int rank]`, perhaps with a publisher id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_EVENTS_AT: Final = 10
"""After the array's own byte and the float64."""
_SMALL: Final = 0x90
_WIDTHS: Final = {0xDC: 2, 0xDD: 4}
_LARGE: Final = b"\xdd"


def spliced(empty: bytes, payloads: Sequence[bytes]) -> bytes:
    """One payload with the events of all, in order; the rest is that of `empty`, a batch of the same encoding."""
    tail = len(empty) - _EVENTS_AT - 1
    counts_and_starts = [_events_of(payload) for payload in payloads]
    total = sum(count for count, _ in counts_and_starts)
    bodies = (
        memoryview(payload)[start : len(payload) - tail]
        for payload, (_, start) in zip(payloads, counts_and_starts, strict=True)
    )
    return b"".join([empty[:_EVENTS_AT], _LARGE, total.to_bytes(4, "big"), *bodies, empty[_EVENTS_AT + 1 :]])


def events_in(payload: bytes) -> int:
    """How many events a batch has."""
    count, _ = _events_of(payload)
    return count


def _events_of(payload: bytes) -> tuple[int, int]:
    """How many events, and where the first one is."""
    first = payload[_EVENTS_AT]
    width = _WIDTHS.get(first)
    start = _EVENTS_AT + 1
    if width is None:
        return first - _SMALL, start
    return int.from_bytes(payload[start : start + width], "big"), start + width
