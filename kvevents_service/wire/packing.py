"""Packed integers of the engine protocol: token ids and block ids as little-endian int32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

INT32_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack values of -2^31 to 2^31 - 1; OverflowError outside."""
    values = values if isinstance(values, (list, tuple, range)) else list(values)
    try:
        packed = array("I", values)  # four times as fast as "i", which parses each value
    except OverflowError:  # a negative one, or one that does not fit
        packed = array("i", values)
    if _BIG_ENDIAN:
        packed.byteswap()
    data = packed.tobytes()
    if packed.typecode == "I" and not data[INT32_BYTES - 1 :: INT32_BYTES].isascii():
        raise OverflowError("values of at most 2^31 - 1")
    return data


def unpack_int32(packed: bytes) -> array[int]:
    """The values again; ValueError unless the length is a multiple of 4."""
    return _unpack("i", packed)


def unpack_uint32(packed: bytes) -> array[int]:
    """The same bits as values of 0 to 2^32 - 1."""
    return _unpack("I", packed)


def _unpack(typecode: str, packed: bytes) -> array[int]:
    values: array[int] = array(typecode, packed)
    if _BIG_ENDIAN:
        values.byteswap()
    return values
