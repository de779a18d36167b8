"""Arrays written at one width: every decoder reads the same values."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.hashes import HashForm, hashes_in
from kvevents_service.wire.packing import pack_int32
from kvevents_service.wire.wide import wide_hashes, wide_tokens

tokens_s = st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**31 - 1)))


def read(raw: msgspec.Raw) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode([raw]))[0]


@given(tokens_s)
def test_tokens_are_the_same_in_either_form(tokens: list[int]) -> None:
    assert read(wide_tokens(pack_int32(tokens))) == tokens


def test_small_tokens_take_three_bytes() -> None:
    assert len(bytes(wide_tokens(pack_int32([1, 65535])))) == 5 + 2 * 3
    assert len(bytes(wide_tokens(pack_int32([1, 65536])))) == 5 + 2 * 5


@given(st.sampled_from(HashForm), st.sampled_from([8, 12, 16, 32]), st.data())
def test_hashes_are_the_same_in_either_form(form: HashForm, hash_bytes: int, data: st.DataObject) -> None:
    packed = b"".join(data.draw(st.lists(st.binary(min_size=hash_bytes, max_size=hash_bytes))))
    raw = wide_hashes(form, packed, hash_bytes)
    assert (raw is None) == (form in (HashForm.DIGEST, HashForm.NARROW))
    assert raw is None or read(raw) == hashes_in(form, packed, hash_bytes)
