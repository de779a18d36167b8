"""The layouts an event may have on the wire beside the one of `events`, each as a typed msgspec decoder.

Sources: vLLM 0.33 (maps), vLLM up to 0.23 (arrays, positions in the order of the fields), SGLang 0.5 (maps
without the keys it has no value for), a development version of vLLM (the batch itself a map). All are
variants of the structs in `events`, so that a field is written down once.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Union, get_type_hints

import msgspec

from kvevents_service.errors import WireError
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

KNOWN: Final[dict[str, type[Event]]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
_MAY_BE_MISSING: Final = {"parent_block_hash", "lora_id", "medium", "lora_name"}
_OLD_ARRAY_FIELDS: Final = {BlockStored: 11, BlockRemoved: 3, AllBlocksCleared: 0}
"""Positions the array layout ever had. What follows them is ignored, never guessed at."""


class Outer(msgspec.Struct, array_like=True, gc=False):
    """A batch as an array, its events not looked into yet."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


class OuterMap(msgspec.Struct, gc=False):
    """A batch as a map."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


class Tag(msgspec.Struct, gc=False):
    """Only the type of a map event."""

    type: str


class TagFirst(msgspec.Struct, array_like=True, gc=False):
    """Only the type of an array event."""

    type: str


class Layout(NamedTuple):
    """How to read a batch (`outer`), an event (`event`; `untouched`: its tokens not looked into), its type (`tag`),
    one with token pairs (`pairs`)."""

    positional: bool
    outer: msgspec.msgpack.Decoder[Any]
    event: msgspec.msgpack.Decoder[Any]
    untouched: msgspec.msgpack.Decoder[Any]
    tag: msgspec.msgpack.Decoder[Any]
    pairs: msgspec.msgpack.Decoder[Any]


def layout_of(first_byte: int, field: str) -> Layout:
    """The layout of a value from its first byte (MessagePack format codes). Raises WireError at `field`."""
    if 0x90 <= first_byte <= 0x9F or first_byte in (0xDC, 0xDD):
        return ARRAY
    if 0x80 <= first_byte <= 0x8F or first_byte in (0xDE, 0xDF):
        return MAP
    raise WireError(field, "an array or a map")


def tolerant(cls: type[Event], *, positional: bool, **types: object) -> type[msgspec.Struct]:
    """`cls` as a reader takes it: what publishers leave out may be missing, `types` replace field types."""
    hints = get_type_hints(cls) | types
    names = cls.__struct_fields__[: _OLD_ARRAY_FIELDS[cls] if positional else None]
    optional = _optional(cls) - ({"parent_block_hash"} if positional else set())
    fields = [(name, hints[name], None) if name in optional else (name, hints[name]) for name in names]
    return msgspec.defstruct(
        cls.__name__, fields, tag=True, array_like=positional, kw_only=not positional, gc=False
    )


def _optional(cls: type[Event]) -> set[str]:
    required = len(cls.__struct_fields__) - len(cls.__struct_defaults__)
    return _MAY_BE_MISSING.union(cls.__struct_fields__[required:])


def _layout(positional: bool) -> Layout:
    events = [tolerant(cls, positional=positional) for cls in KNOWN.values()]
    untouched = tolerant(BlockStored, positional=positional, token_ids=msgspec.Raw)
    pairs = tolerant(BlockStored, positional=positional, token_ids=list[tuple[int, int]])
    return Layout(
        positional,
        msgspec.msgpack.Decoder(Outer if positional else OuterMap),
        msgspec.msgpack.Decoder(Union[tuple(events)]),  # noqa: UP007 - built from a list
        msgspec.msgpack.Decoder(untouched),
        msgspec.msgpack.Decoder(TagFirst if positional else Tag),
        msgspec.msgpack.Decoder(pairs),
    )


ARRAY: Final = _layout(positional=True)
MAP: Final = _layout(positional=False)
