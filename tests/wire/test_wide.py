"""Arrays written at one width, many at once: every decoder reads the same values."""

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.columns import Columns
from kvevents_service.wire.hashes import HashForm, hashes_in
from kvevents_service.wire.packing import pack_int32
from kvevents_service.wire.wide import Array, wide_hashes, wide_tokens

tokens_s = st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**31 - 1)))


def read(array: Array) -> object:
    return msgspec.msgpack.decode(b"".join(array))


@given(st.lists(st.lists(tokens_s)))
def test_tokens_are_the_same_in_either_form(rows: list[list[list[int]]]) -> None:
    arrays = wide_tokens([[*map(pack_int32, row)] for row in rows], Columns())
    assert [*map(read, arrays)] == [[*chain.from_iterable(row)] for row in rows]


@pytest.mark.parametrize(("count", "head"), [(15, 1), (16, 3), (65_535, 3), (65_536, 5)])
def test_an_array_has_the_shortest_head(count: int, head: int) -> None:
    few, many = wide_tokens([[bytes(4)], [bytes(4 * count)]], Columns())
    assert (read(few), read(many)) == ([0], [0] * count)
    assert len(many.head) == head


def test_small_tokens_take_three_bytes() -> None:
    assert [len(array.values) for array in wide_tokens([[pack_int32([1, 65535])]], Columns())] == [2 * 3]
    rows = [[pack_int32([1])], [pack_int32([1, 65536])]]
    assert [len(array.values) for array in wide_tokens(rows, Columns())] == [5, 10]


@given(st.sampled_from(HashForm), st.sampled_from([8, 12, 16, 32]), st.data())
def test_hashes_are_the_same_in_either_form(form: HashForm, hash_bytes: int, data: st.DataObject) -> None:
    digests = st.lists(st.binary(min_size=hash_bytes, max_size=hash_bytes))
    rows = data.draw(st.lists(st.lists(digests.map(b"".join))))
    arrays = wide_hashes(form, rows, hash_bytes, Columns())
    assert (arrays is None) == (form in (HashForm.DIGEST, HashForm.NARROW))
    assert arrays is None or [*map(read, arrays)] == [hashes_in(form, b"".join(row), hash_bytes) for row in rows]


def test_digests_shorter_than_a_word_are_left_to_others() -> None:
    assert wide_hashes(HashForm.LOW64, [[b"abcd"]], 4, Columns()) is None
