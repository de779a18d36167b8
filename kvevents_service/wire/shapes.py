"""Event classes made from a dialect: msgspec writes an event of any of them as fast as one of `events`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from kvevents_service.wire.dialects import REMOVED_KEYS, STORED_KEYS, Dialect, Layout
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

NO_ARRAY: Final = msgspec.Raw(b"")
"""In the place of an array: nothing is written."""
_ARRAYS: Final = ("block_hashes", "token_ids")
_MARK: Final = b"\xc1"
"""The one byte that MessagePack does not use."""
_NIL: Final = b"\xc0"

Build = Callable[[Sequence[object]], msgspec.Struct]


class Gaps(NamedTuple):
    """Where the arrays of an encoded store belong that is written without them (`NO_ARRAY`).

    hashes: of its bytes so many come before them. tokens: so many, and those of the parent, between the two.
    """

    hashes: int
    tokens: int

    def pieces(self, stored: bytes, parent: bytes) -> tuple[bytes, bytes, bytes]:
        """What comes before, between and behind its arrays."""
        tokens = self.hashes + self.tokens + len(parent)
        return stored[: self.hashes], stored[self.hashes : tokens], stored[tokens:]


class Shape(NamedTuple):
    """Builders of one dialect's events.

    stored takes a value for each of STORED_KEYS, removed one for each of REMOVED_KEYS; the rest is left out.
    """

    stored: Build
    removed: Build
    cleared: msgspec.Struct
    gaps: Gaps


@lru_cache(maxsize=64)
def shape_of(dialect: Dialect) -> Shape:
    """The builders of a dialect, made once."""
    stored = _builder(BlockStored, STORED_KEYS, dialect.stored, dialect.stored_if_set, dialect.layout)
    return Shape(
        stored,
        _builder(BlockRemoved, REMOVED_KEYS, dialect.removed, dialect.removed_if_set, dialect.layout),
        _event_class(AllBlocksCleared, (), (), dialect.layout)(),
        _gaps(stored),
    )


def _gaps(stored: Build) -> Gaps:
    """Found with marks in the places of the arrays, which no key and no nil has in it."""
    values = [msgspec.Raw(_MARK) if key in _ARRAYS else None for key in STORED_KEYS]
    written = msgspec.msgpack.encode(stored(values))
    hashes = written.index(_MARK)
    tokens = written.index(_MARK, hashes + 1)
    return Gaps(hashes, tokens - hashes - len(_MARK) - len(_NIL))


def _builder(
    cls: type[Event], keys: tuple[str, ...], always: tuple[str, ...], if_set: tuple[str, ...], layout: Layout
) -> Build:
    made, pick = _event_class(cls, always, if_set, layout), itemgetter(*map(keys.index, always + if_set))
    return lambda values: made(*pick(values))


def _event_class(
    cls: type[Event], always: tuple[str, ...], if_set: tuple[str, ...], layout: Layout
) -> type[msgspec.Struct]:
    """`cls` itself where it writes just these keys, else a class of its name that does."""
    required = cls.__struct_fields__[: len(cls.__struct_fields__) - len(cls.__struct_defaults__)]
    keys = always + if_set
    if layout is Layout.MAP and always == required and cls.__struct_fields__[: len(keys)] == keys:
        return cls
    hints = get_type_hints(cls)
    fields: list[Any] = [(name, hints[name]) for name in always]
    fields += [(name, hints[name], None) for name in if_set]
    positional = layout is Layout.ARRAY
    return msgspec.defstruct(
        cls.__name__, fields, tag=True, array_like=positional, omit_defaults=True, frozen=True, gc=False
    )
