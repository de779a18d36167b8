"""MessagePack arrays of integers made straight from packed ones, without a Python object for each value.

Every value of an array is written at one width, that of the widest. That is valid MessagePack, and read by every
decoder, but longer than the shortest form that other writers choose: it is for much that must be written fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvevents_service.wire.hashes import WORD_BYTES, HashForm
from kvevents_service.wire.packing import INT32_BYTES

_UINT64: Final = b"\xcf"
_INT64: Final = b"\xd3"
_UINT32: Final = b"\xce"
_UINT16: Final = b"\xcd"
_FORMS: Final = {
    HashForm.LOW64: (_UINT64, False),
    HashForm.LOW64_SIGNED: (_INT64, False),
    HashForm.HIGH64_SIGNED: (_INT64, True),
}
"""How a hash is written, and whether its first word or its last is."""


def wide_tokens(packed: bytes) -> msgspec.Raw:
    """Packed little-endian int32 values, none negative, as an array."""
    low, high = [packed[1::INT32_BYTES], packed[::INT32_BYTES]], [packed[3::INT32_BYTES], packed[2::INT32_BYTES]]
    used = [column if column.strip(b"\0") else None for column in high]
    return _array(_UINT32, [*used, *low]) if any(used) else _array(_UINT16, [*low])


def wide_hashes(form: HashForm, packed: bytes, hash_bytes: int) -> msgspec.Raw | None:
    """Every hash of n packed digests as an array; None for a form whose values depend on more than some bytes."""
    if form not in _FORMS:
        return None
    code, first_word = _FORMS[form]
    start = 0 if first_word else hash_bytes - WORD_BYTES
    return _array(code, [packed[start + place :: hash_bytes] for place in range(WORD_BYTES)])


def _array(code: bytes, columns: Sequence[bytes | None]) -> msgspec.Raw:
    """An array of values of one kind, from their first bytes, their second bytes and so on; None: all are 0."""
    count, width = len(columns[-1] or b""), len(columns) + 1
    body = bytearray((code + bytes(len(columns))) * count)
    for place, column in enumerate(columns, 1):
        if column is not None:
            body[place::width] = column
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + body)
