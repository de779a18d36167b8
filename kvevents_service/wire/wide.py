"""MessagePack arrays of integers made straight from packed ones, without a Python object for each value.

Every value is written at one width, that of the widest. That is valid MessagePack, and read by every decoder, but
longer than the shortest form that other writers choose: it is for much that must be written fast. Many arrays are
made in one step: the header of each is written as if it were a value before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Final

import msgspec

from kvevents_service.wire.columns import fits_16_bits, prefixed
from kvevents_service.wire.hashes import WORD_BYTES, HashForm
from kvevents_service.wire.packing import INT32_BYTES

_UINT64, _INT64, _UINT32, _UINT16 = 0xCF, 0xD3, 0xCE, 0xCD
_ARRAY32, _ARRAY16 = 0xDD, 0xDC
_FORMS: Final = {
    HashForm.LOW64: (_UINT64, False),
    HashForm.LOW64_SIGNED: (_INT64, False),
    HashForm.HIGH64_SIGNED: (_INT64, True),
}
"""How a hash is written, and whether its first word or its last is."""
_HEAD_AT: Final = 4
"""Where the five bytes of a header begin in the nine of a value."""


Rows = Sequence[Sequence[bytes]]
"""For each array to make its packed values, in pieces."""


def wide_tokens(rows: Rows) -> list[msgspec.Raw]:
    """Arrays of packed little-endian int32 values, none negative, all in the width of the widest."""
    counts = [sum(map(len, row)) // INT32_BYTES for row in rows]
    heads = (count.to_bytes(INT32_BYTES, "little") for count in counts)
    packed = _with_heads(heads, rows)
    narrow = fits_16_bits(packed)  # the counts too
    code, width, head = (_UINT16, 2, _ARRAY16) if narrow else (_UINT32, 4, _ARRAY32)
    body = prefixed(code, width, packed, INT32_BYTES, 0, little=True)
    bounds = _bounds(counts, width + 1)
    for start in bounds[:-1]:
        body[start] = head
    return [msgspec.Raw(body[start:end]) for start, end in pairwise(bounds)]


def wide_hashes(form: HashForm, rows: Rows, hash_bytes: int) -> list[msgspec.Raw] | None:
    """Arrays of packed digests; None for a form whose values depend on more than some bytes."""
    if form not in _FORMS or hash_bytes < WORD_BYTES:
        return None
    code, first_word = _FORMS[form]
    place = 0 if first_word else hash_bytes - WORD_BYTES
    before, behind = bytes(place), bytes(hash_bytes - WORD_BYTES - place)
    counts = [sum(map(len, row)) // hash_bytes for row in rows]
    heads = (before + (_ARRAY32 << 32 | count).to_bytes(WORD_BYTES, "big") + behind for count in counts)
    body = prefixed(code, WORD_BYTES, _with_heads(heads, rows), hash_bytes, place, little=False)
    bounds = _bounds(counts, WORD_BYTES + 1)
    return [msgspec.Raw(body[start + _HEAD_AT : end]) for start, end in pairwise(bounds)]


def _with_heads(heads: Iterable[bytes], rows: Rows) -> bytes:
    return b"".join(chain.from_iterable((head, *row) for head, row in zip(heads, rows, strict=True)))


def _bounds(counts: Sequence[int], width: int) -> list[int]:
    """Where each array begins, and where the last one ends."""
    return [*accumulate(((count + 1) * width for count in counts), initial=0)]
