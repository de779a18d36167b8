"""A press writes parts of a state, many blocks at a time: runs that continue each other as one event, its arrays in
the longer form of `wire.wide`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvevents_service.core.announce import let_through, stored_values
from kvevents_service.core.rows import Row
from kvevents_service.wire.codec import bounded, encode_value
from kvevents_service.wire.columns import Columns
from kvevents_service.wire.dialects import Dialect
from kvevents_service.wire.frames import Payload
from kvevents_service.wire.hashes import hash_in, hashes_in
from kvevents_service.wire.shapes import NO_ARRAY, shape_of
from kvevents_service.wire.slabs import Slabs
from kvevents_service.wire.splice import ends_of
from kvevents_service.wire.wide import Array, wide_hashes, wide_tokens

_EMPTY: Final = Array(encode_value(()), b"")


class Press:
    """The memory that the parts of one state are written with. A payload keeps what it lies in."""

    def __init__(self) -> None:
        self._columns = Columns()
        self._slabs = Slabs()

    def batch(self, dialect: Dialect, rows: Sequence[Row], empty: bytes, *, clear: bool) -> memoryview:
        """A batch as `empty` is, but with an event for each row, and a clear before them or not. WireError if it is
        too big. Not for dialects of one hash an event."""
        rows = [row for row in rows if let_through(dialect, row.runs[0]) is not None]
        arrays = zip(rows, self._hashes(dialect, rows), self._tokens(dialect, rows), strict=True)
        cleared = [encode_value(shape_of(dialect).cleared)] if clear else []
        head, tail = ends_of(empty, len(cleared) + len(rows))
        events = (piece for row, hashes, tokens in arrays for piece in _event(dialect, row, hashes, tokens))
        return bounded(self._slabs.joined([head, *cleared, *events, tail]))

    def _tokens(self, dialect: Dialect, rows: Sequence[Row]) -> list[Array]:
        if not dialect.tokens:
            return [_EMPTY] * len(rows)
        return wide_tokens([[run.token_ids for run in row.runs] for row in rows], self._columns)

    def _hashes(self, dialect: Dialect, rows: Sequence[Row]) -> list[Array]:
        packed, sizes = (
            [[run.block_hashes for run in row.runs] for row in rows],
            {row.runs[0].hash_bytes for row in rows},
        )
        made = wide_hashes(dialect.hashes, packed, sizes.pop(), self._columns) if len(sizes) == 1 else None
        if made is not None:
            return made
        joined = zip(map(b"".join, packed), rows, strict=True)
        lists = (hashes_in(dialect.hashes, hashes, row.runs[0].hash_bytes) for hashes, row in joined)
        return [Array(encode_value(hashes), b"") for hashes in lists]


def _event(dialect: Dialect, row: Row, hashes: Array, tokens: Array) -> Iterator[Payload]:
    """The event of a row, in pieces."""
    first, shape = row.head(), shape_of(dialect)
    medium, parent = dialect.medium(first.medium) or "", first.parent_block_hash
    stored = encode_value(shape.stored(stored_values(dialect, first, medium, NO_ARRAY, NO_ARRAY)))
    name = encode_value(None if parent is None else hash_in(dialect.hashes, parent))
    before, between, behind = shape.gaps.pieces(stored, name)
    yield from (before, *hashes, between, *tokens, behind)
