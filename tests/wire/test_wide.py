"""Arrays written at one width, many at once: every decoder reads the same values."""

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.hashes import HashForm, hashes_in
from kvevents_service.wire.packing import pack_int32
from kvevents_service.wire.wide import wide_hashes, wide_tokens

tokens_s = st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**31 - 1)))


def read(raw: msgspec.Raw) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode([raw]))[0]


@given(st.lists(st.lists(tokens_s)))
def test_tokens_are_the_same_in_either_form(rows: list[list[list[int]]]) -> None:
    raws = wide_tokens([[*map(pack_int32, row)] for row in rows])
    assert [*map(read, raws)] == [[*chain.from_iterable(row)] for row in rows]


@pytest.mark.parametrize("count", [65_535, 65_536])
def test_a_count_of_more_than_16_bits_is_as_wide_as_a_token(count: int) -> None:
    few, many = wide_tokens([[bytes(4)], [bytes(4 * count)]])
    assert (read(few), read(many)) == ([0], [0] * count)


def test_small_tokens_take_three_bytes() -> None:
    assert [len(bytes(raw)) for raw in wide_tokens([[pack_int32([1, 65535])]])] == [3 + 2 * 3]
    assert [len(bytes(raw)) for raw in wide_tokens([[pack_int32([1])], [pack_int32([1, 65536])]])] == [10, 15]


@given(st.sampled_from(HashForm), st.sampled_from([8, 12, 16, 32]), st.data())
def test_hashes_are_the_same_in_either_form(form: HashForm, hash_bytes: int, data: st.DataObject) -> None:
    digests = st.lists(st.binary(min_size=hash_bytes, max_size=hash_bytes))
    rows = data.draw(st.lists(st.lists(digests.map(b"".join))))
    raws = wide_hashes(form, rows, hash_bytes)
    assert (raws is None) == (form in (HashForm.DIGEST, HashForm.NARROW))
    assert raws is None or [*map(read, raws)] == [hashes_in(form, b"".join(row), hash_bytes) for row in rows]


def test_digests_shorter_than_a_word_are_left_to_others() -> None:
    assert wide_hashes(HashForm.LOW64, [[b"abcd"]], 4) is None
