"""Packed int32: little endian, whole, or a typed refusal."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.packing import INT32_BYTES, pack_int32, unpack_int32

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    packed = pack_int32(values)
    assert packed == struct.pack(f"<{len(values)}i", *values)
    assert len(packed) == INT32_BYTES * len(values)
    assert unpack_int32(packed).tolist() == values


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**64])
def test_a_value_that_does_not_fit_is_not_packed(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_int32([1, value])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_half_a_value_is_not_unpacked(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_int32(bytes(length))
