"""MessagePack values of packed integers, without a Python object for each: what arrays of a state are made of.

Every value is written at one width, that of the widest. That is valid MessagePack, and read by every decoder, but
longer than the shortest form that other writers choose: it is for much that must be written fast. The values of
many arrays are made in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

from kvevents_service.wire.columns import Columns, fits_16_bits
from kvevents_service.wire.hashes import WORD_BYTES, HashForm
from kvevents_service.wire.packing import INT32_BYTES
from kvevents_service.wire.splice import array_head

_UINT64, _INT64, _UINT32, _UINT16 = 0xCF, 0xD3, 0xCE, 0xCD
_FORMS: Final = {
    HashForm.LOW64: (_UINT64, False),
    HashForm.LOW64_SIGNED: (_INT64, False),
    HashForm.HIGH64_SIGNED: (_INT64, True),
}
"""How a hash is written, and whether its first word or its last is."""

Rows = Sequence[Sequence[bytes]]
"""For each array to make its packed values, in pieces."""


class Array(NamedTuple):
    """An array as it is written."""

    head: bytes
    values: bytes | memoryview


def wide_tokens(rows: Rows, columns: Columns) -> list[Array]:
    """Arrays of packed little-endian int32, none negative, all in the width of the widest. Good until the next."""
    packed = b"".join(chain.from_iterable(rows))
    code, width = (_UINT16, 2) if fits_16_bits(packed) else (_UINT32, 4)
    body = columns.prefixed(code, width, packed, INT32_BYTES, 0, little=True)
    return _split(body, rows, INT32_BYTES, width)


def wide_hashes(form: HashForm, rows: Rows, hash_bytes: int, columns: Columns) -> list[Array] | None:
    """Arrays of packed digests; None for a form whose values depend on more than a word. Good until the next."""
    if form not in _FORMS or hash_bytes < WORD_BYTES:
        return None
    code, first_word = _FORMS[form]
    place = 0 if first_word else hash_bytes - WORD_BYTES
    packed = b"".join(chain.from_iterable(rows))
    body = columns.prefixed(code, WORD_BYTES, packed, hash_bytes, place, little=False)
    return _split(body, rows, hash_bytes, WORD_BYTES)


def _split(body: memoryview, rows: Rows, packed_bytes: int, width: int) -> list[Array]:
    """The values of each row."""
    counts = [sum(map(len, row)) // packed_bytes for row in rows]
    bounds = pairwise(accumulate((count * (width + 1) for count in counts), initial=0))
    return [Array(array_head(count), body[start:end]) for count, (start, end) in zip(counts, bounds, strict=True)]
