"""Packed int32: little endian, whole, or a typed refusal."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.packing import INT32_BYTES, int32_list, pack_int32, unpack_int32

INT32 = st.integers(-(2**31), 2**31 - 1)


FEW_AND_MANY = [0, 1, 16, 63, 64, 65, 66, 1000]
"""Lengths on both sides of where `struct` hands over to `array`."""


@given(st.lists(INT32))
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    packed = pack_int32(values)
    assert packed == struct.pack(f"<{len(values)}i", *values)
    assert len(packed) == INT32_BYTES * len(values)
    assert unpack_int32(packed).tolist() == values


@pytest.mark.parametrize("count", FEW_AND_MANY)
@pytest.mark.parametrize("edge", [-(2**31), -1, 0, 2**31 - 1])
def test_few_and_many_are_packed_alike(count: int, edge: int) -> None:
    values = [edge, *range(count)][:count]
    assert pack_int32(values) == pack_int32(iter(values)) == struct.pack(f"<{count}i", *values)
    assert int32_list(pack_int32(values)) == unpack_int32(pack_int32(values)).tolist() == values


@pytest.mark.parametrize("count", FEW_AND_MANY)
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**64])
def test_a_value_that_does_not_fit_is_not_packed(value: int, count: int) -> None:
    with pytest.raises(OverflowError):
        pack_int32([*range(count), value])


@pytest.mark.parametrize("count", FEW_AND_MANY)
@pytest.mark.parametrize("value", ["1", 1.0, None])
def test_what_is_no_int_is_not_packed(value: object, count: int) -> None:
    with pytest.raises(TypeError):
        pack_int32([*range(count), value])  # type: ignore[list-item]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_half_a_value_is_not_unpacked(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_int32(bytes(length))
    with pytest.raises(ValueError, match="multiple"):
        int32_list(bytes(length))
