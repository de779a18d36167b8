"""Batches of events to bytes and back.

Encoding writes the one layout of vLLM 0.33, byte for byte. Decoding takes every layout in `layouts`: first
with one typed decoder for the common layout, and only where that refuses, event by event. Long arrays of tokens
are stepped over and read on first use (`tokens.TokenIds`): making their ints is most of the work. Error texts
name a place and a type, never a value: values may be prompt tokens. For the same reason no msgspec error is
chained to ours.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from kvevents_service.errors import WireError
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.layouts import KNOWN, Layout, Outer, OuterMap, layout_of, tolerant
from kvevents_service.wire.splice import event_count
from kvevents_service.wire.tokens import TokenIds

MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
"""Largest payload taken or made. Decoded, a byte becomes 78 at worst (one-key maps within extra_keys)."""

LONG_BYTES: Final = 512
"""Of events that are longer, in the mean of their batch, the tokens are read on first use; of shorter ones the few
ints cost less than putting them off."""

_MAX_TYPE_CHARS: Final = 64
_COMPLETE: Final = "one complete MessagePack value, its text UTF-8, not nested too deep"
_FOREIGN: Final = (ValueError, TypeError, OverflowError, RecursionError)
"""All that msgspec raises on odd input. Its DecodeError and Unicode errors are ValueErrors."""

_T = TypeVar("_T")
_Sized = TypeVar("_Sized", bound=Sized)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EventBatch)
_TOKENS_AT: Final = BlockStored.__struct_fields__.index("token_ids")
_Untouched: Final[Any] = tolerant(BlockStored, positional=False, token_ids=msgspec.Raw)
_checked: Final[dict[type, type[msgspec.Struct]]] = {cls: tolerant(cls, positional=False) for cls in KNOWN.values()}

_PATH: Final = re.compile(r"`\$([^`]*)`\Z")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_EXPECTED: Final = re.compile(r"Expected (`[^`]+`(?: of at least length \d+)?)")
_POSITION: Final = re.compile(r"\[(\d+)\]")


class Skipped(NamedTuple):
    """An event left out of a batch: its index there, its type (at most 64 characters), and why.

    reason: "unknown type", or "token pairs": a store whose token_ids are pairs (SGLang with EAGLE), which
    name no position in a prompt.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, of no use here
    type: str
    reason: str


class Decoded(NamedTuple):
    """A batch, and the events of it that were left out."""

    batch: EventBatch
    skipped: tuple[Skipped, ...]


class _Header(msgspec.Struct, gc=False):
    ts: float
    events: list[object]
    data_parallel_rank: int | None
    publisher_id: bytes | None


class _UntouchedBatch(msgspec.Struct, array_like=True, gc=False):
    """As `EventBatch`."""

    ts: float
    events: list[_Untouched | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


_untouched: Final = msgspec.msgpack.Decoder(_UntouchedBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """The payload of a batch: `[ts, events, rank]`, and the publisher id as a fourth element if there is one.

    Raises WireError, field as in "events[3].block_hashes", for a hash or other int out of [-2^63, 2^64), a
    value of the wrong type, or a payload over MAX_PAYLOAD_BYTES. Layout: vLLM 0.33, which sends even a nil
    rank.
    """
    elements = _checked_elements(batch)
    try:
        payload = _encoder.encode(elements)
    except _FOREIGN:
        raise WireError(_unencodable(batch), "MessagePack values, integers in [-2^63, 2^64)") from None
    return bounded(payload)


def encode_own(batch: EventBatch) -> bytes:
    """`encode_batch` without type checks, for values that came off the wire. WireError if too big."""
    return bounded(_encoder.encode(_elements(batch)))


def encode_value(value: object) -> bytes:
    """A part of a batch by itself, likewise unchecked."""
    return _encoder.encode(value)


def bounded(payload: _Sized) -> _Sized:
    """The payload, if it is not too big for a reader; else WireError."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError("payload", f"at most {MAX_PAYLOAD_BYTES} bytes")
    return payload


def decode_batch(payload: bytes, *, read_tokens: bool = False) -> Decoded:
    """The batch in a payload, in any layout of `layouts`. Unknown keys are ignored, unknown events `Skipped`.

    read_tokens: every token is going to be read, so all are made lists of ints now. Otherwise many `token_ids` are
    `TokenIds`, and a value among them that is no int is refused when they are read.

    Raises WireError, and nothing else, for bytes that are no batch, for a malformed event of a known type,
    for bytes after the batch and for payloads over MAX_PAYLOAD_BYTES.
    """
    bounded(payload)
    try:
        if read_tokens or not _is_long(payload):
            return Decoded(_decoder.decode(payload), ())
        return Decoded(_with_tokens(_untouched.decode(payload)), ())
    except _FOREIGN:
        pass  # another layout, or a fault that the slower way can place
    return _decode_by_event(payload, read_tokens)


def _checked_elements(batch: EventBatch) -> list[object]:
    """Structs do not check what they are built from, and the encoder would write a float hash or a None
    token."""
    header = _checked_as(_Header, batch, "")
    header.events = [_read(event, f"events[{index}]") for index, event in enumerate(header.events)]
    for index, event in enumerate(header.events):
        _check_event(event, f"events[{index}]")
    return _elements(header)


def _read(event: object, field: str) -> object:
    """The event with its tokens as a list."""
    if not isinstance(event, BlockStored) or not isinstance(event.token_ids, TokenIds):
        return event
    try:
        return msgspec.structs.replace(event, token_ids=event.token_ids.read())
    except WireError as error:
        raise WireError(f"{field}.{error.field}", error.expected) from None


def _elements(batch: EventBatch | _Header) -> list[object]:
    elements: list[object] = [batch.ts, batch.events, batch.data_parallel_rank]
    return elements if batch.publisher_id is None else [*elements, batch.publisher_id]


def _check_event(event: object, field: str) -> None:
    # A throw-away struct built in C costs 100 ns a block of 16 tokens; a loop here would cost ten times that.
    cls = _checked.get(type(event))
    if cls is None:
        raise WireError(field, " | ".join(KNOWN))
    _checked_as(cls, event, field)


def _checked_as(cls: type[_T], value: object, field: str) -> _T:
    try:
        return msgspec.convert(value, cls, from_attributes=True, builtin_types=(bytes,))
    except _FOREIGN as error:
        raise _placed(error, field) from None


def _unencodable(batch: EventBatch) -> str:
    for index, event in enumerate(batch.events):
        for name in event.__struct_fields__:
            if not _encodes(getattr(event, name)):
                return f"events[{index}].{name}"
    return "data_parallel_rank"


def _encodes(value: object) -> bool:
    try:
        _encoder.encode(value)
    except _FOREIGN:
        return False
    return True


def _is_long(payload: bytes) -> bool:
    """Whether its events are, on average. Of another layout the answer is of no matter."""
    return len(payload) > LONG_BYTES and len(payload) > LONG_BYTES * event_count(payload)


def _with_tokens(batch: _UntouchedBatch) -> EventBatch:
    events = [_built(event) if type(event) is _Untouched else event for event in batch.events]
    return EventBatch(batch.ts, events, batch.data_parallel_rank, batch.publisher_id)


def _built(untouched: msgspec.Struct) -> BlockStored:
    """ValueError for tokens that need a closer look."""
    values = list(msgspec.structs.astuple(untouched))
    values[_TOKENS_AT] = TokenIds(values[_TOKENS_AT])
    return BlockStored(*values)


def _decode_by_event(payload: bytes, read_tokens: bool) -> Decoded:
    outer = _outer(payload)
    results = [_event(raw, index, read_tokens) for index, raw in enumerate(outer.events)]
    events = [result for result in results if not isinstance(result, Skipped)]
    skipped = tuple(result for result in results if isinstance(result, Skipped))
    return Decoded(EventBatch(outer.ts, events, outer.data_parallel_rank, outer.publisher_id), skipped)


def _outer(payload: bytes) -> Outer | OuterMap:
    if not payload:
        raise WireError("payload", _COMPLETE)
    layout = layout_of(payload[0], "batch")
    try:
        outer: Outer | OuterMap = layout.outer.decode(payload)
    except _FOREIGN as error:
        raise _placed(error, "", Outer.__struct_fields__ if layout.positional else ()) from None
    return outer


def _event(raw: msgspec.Raw, index: int, read_tokens: bool) -> Event | Skipped:
    field, data = f"events[{index}]", memoryview(raw)
    layout = layout_of(data[0], field)
    if not read_tokens and len(data) > LONG_BYTES:
        with suppress(*_FOREIGN):
            return _built(layout.untouched.decode(raw))
    try:
        loose = layout.event.decode(raw)
    except _FOREIGN as error:
        return _skipped_or_raise(raw, index, layout, error)
    return KNOWN[type(loose).__name__](*msgspec.structs.astuple(loose))


def _skipped_or_raise(raw: msgspec.Raw, index: int, layout: Layout, error: Exception) -> Skipped:
    field = f"events[{index}]"
    tag = _tag(raw, layout, field)
    if tag not in KNOWN:
        return Skipped(index, tag[:_MAX_TYPE_CHARS], "unknown type")
    if tag == "BlockStored" and _has_token_pairs(raw, layout):
        return Skipped(index, tag, "token pairs")
    names = ("type", *KNOWN[tag].__struct_fields__) if layout.positional else ()
    raise _placed(error, field, names) from None


def _tag(raw: msgspec.Raw, layout: Layout, field: str) -> str:
    try:
        tag: str = layout.tag.decode(raw).type
    except _FOREIGN:
        raise WireError(f"{field}.type", "a string") from None
    return tag


def _has_token_pairs(raw: msgspec.Raw, layout: Layout) -> bool:
    try:
        layout.pairs.decode(raw)
    except _FOREIGN:
        return False
    return True


def _placed(error: Exception, field: str, positions: tuple[str, ...] = ()) -> WireError:
    """Our error for one of msgspec's, with only its path and type names. `positions` name array slots."""
    if not isinstance(error, msgspec.ValidationError):
        return WireError(field or "payload", _COMPLETE)
    text = str(error)
    path = _PATH.search(text)
    place = path[1] if path else ""
    if positions:
        place = _POSITION.sub(lambda slot: f".{positions[int(slot[1])]}", place, count=1)
    missing = _MISSING.match(text)
    if missing:
        return WireError(f"{field}{place}.{missing[1]}".lstrip("."), "the field to be there")
    expected = _EXPECTED.match(text)
    what = expected[1].replace("`", "") if expected else "another value"
    return WireError(f"{field}{place}".lstrip(".") or "batch", what)
