"""What a reader must know of a batch before it may decode it: whose it is, and whether it starts anew.

Batches wait encoded, for a replay or for a slow consumer, so these look at few bytes wherever that is exact.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvevents_service.errors import WireError
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.frames import SEQ_BYTES

PUBLISHER_ID_BYTES: Final = 16
SNAPSHOT_REQUEST: Final = (b"", b"snapshot")
"""What a DEALER sends to a snapshot endpoint; a REQ sends the second frame."""

_THREE, _FOUR, _NIL, _FIXINT_END = 0x93, 0x94, 0xC0, 0x80
_LONGEST_INT: Final = 9
_HEAD_BYTES: Final = 256
_CLEAR: Final = AllBlocksCleared.__name__.encode()
_FOREIGN: Final = (ValueError, TypeError, OverflowError, RecursionError)


class Header(NamedTuple):
    """Whose a batch is, as far as it says."""

    dp_rank: int | None
    publisher_id: bytes | None = None


_OF_ONE_BYTE: Final = {_NIL: Header(None)} | {rank: Header(rank) for rank in range(_FIXINT_END)}
"""By the last byte of a batch."""


class Snapshot(NamedTuple):
    """The whole state after number `seq`, as batches; seq -1: nothing was sent yet."""

    seq: int
    publisher_id: bytes
    payloads: tuple[bytes, ...]


class _Array(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: msgspec.Raw
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


class _Map(msgspec.Struct, gc=False):
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


_array: Final = msgspec.msgpack.Decoder(_Array)
_map: Final = msgspec.msgpack.Decoder(_Map)


def peek(payload: bytes) -> Header | None:
    """Rank and publisher of a batch, its events not looked into. None if it is no batch."""
    if payload[0] == _THREE and _ends_with_one_byte(payload):
        return _OF_ONE_BYTE[payload[-1]]
    decoder = _array if 0x90 <= payload[0] <= 0x9F or payload[0] in (0xDC, 0xDD) else _map
    try:
        outer = decoder.decode(payload)
    except _FOREIGN:
        return None
    return Header(outer.data_parallel_rank, outer.publisher_id)


def _ends_with_one_byte(payload: bytes) -> bool:
    """Whether the last element can only be nil or an int of one byte: no format code stands where a longer one's
    would."""
    if len(payload) < _LONGEST_INT or payload[-1] not in _OF_ONE_BYTE:
        return False
    return not (
        payload[-2] in (0xCC, 0xD0)
        or payload[-3] in (0xCD, 0xD1)
        or payload[-5] in (0xCE, 0xD2)
        or payload[-9] in (0xCF, 0xD3)
    )


def is_plain(payload: bytes) -> bool:
    """Whether it can only be of a publisher that says no id."""
    return payload[0] == _THREE


def publisher_id(payload: bytes) -> bytes | None:
    """The publisher's id, of those that say it."""
    if is_plain(payload):
        return None
    header = peek(payload)
    return None if header is None else header.publisher_id


def starts_anew(payload: bytes) -> bool:
    """Whether the first event is AllBlocksCleared: nothing told before matters any more."""
    if _CLEAR not in payload[:_HEAD_BYTES]:
        return False
    try:
        batch, skipped = decode_batch(payload)
    except WireError:
        return False
    first = isinstance(batch.events[0], AllBlocksCleared) if batch.events else False
    return first and not (skipped and skipped[0].index == 0)


def parse_snapshot(frames: list[bytes]) -> Snapshot | None:
    """A reply to `SNAPSHOT_REQUEST`, with the DEALER's empty frame or without; None: no snapshot can be had.

    Raises WireError with field frames, seq or publisher_id. Form: proposed to vLLM, not settled.
    """
    body = frames[1:] if frames and not frames[0] else frames
    if not body or len(body[0]) != SEQ_BYTES:
        raise WireError("seq", f"{SEQ_BYTES} bytes")
    seq = int.from_bytes(body[0], "big", signed=True)
    if seq < -1:
        return None
    if len(body) < 2 or len(body[1]) != PUBLISHER_ID_BYTES:
        raise WireError("publisher_id", f"{PUBLISHER_ID_BYTES} bytes")
    if not all(body[2:]):
        raise WireError("payload", "at least one byte")
    return Snapshot(seq, body[1], tuple(body[2:]))
