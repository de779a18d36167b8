"""Packed integers of the engine protocol: token ids and block ids as little-endian int32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from struct import error as StructError

INT32_BYTES = 4
_FEW = tuple(Struct(f"<{count}i") for count in range(65))
"""Up to so many values twice as fast as an array: what one block of a decode step has."""
_BIG_ENDIAN = sys.byteorder == "big"


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack values of -2^31 to 2^31 - 1; OverflowError outside. An int32 array is packed already."""
    if isinstance(values, array) and values.typecode == "i" and not _BIG_ENDIAN:
        return values.tobytes()
    values = values if isinstance(values, (list, tuple, range)) else list(values)
    if len(values) < len(_FEW):
        try:
            return _FEW[len(values)].pack(*values)
        except StructError:  # out of range, or no int: told apart below
            pass
    return _pack_many(values)


def _pack_many(values: Sequence[int]) -> bytes:
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
    values = array("i", packed)
    if _BIG_ENDIAN:
        values.byteswap()
    return values


def int32_list(packed: bytes) -> list[int]:
    """The same as a list; ValueError unless the length is a multiple of 4."""
    count, rest = divmod(len(packed), INT32_BYTES)
    if count < len(_FEW) and not rest:
        return list(_FEW[count].unpack(packed))
    return unpack_int32(packed).tolist()
