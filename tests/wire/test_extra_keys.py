"""Plain extra keys: known shapes stay, others are told apart."""

from hashlib import sha256

import msgspec
import pytest

from kvevents_service.wire.extra_keys import plain_extra_keys


def plain(item: object) -> object:
    entries = plain_extra_keys([(item,)])
    assert entries is not None
    assert entries[0] is not None
    return entries[0][0]


@pytest.mark.parametrize("item", ["salt", "", 3, -3, 2**64 - 1, 1.5, True, ("image", 0), ["image", -7]])
def test_known_shapes_stay(item: object) -> None:
    assert plain(item) == item


OTHER = [
    *(None, b"\x00", {}, {"a": 1}, []),
    *(["a"], ["a", 1, 2], [1, "a"], ["a", "b"], ["a", 1.5], ["a", True], [["a", 1], 2]),
]


@pytest.mark.parametrize("item", OTHER)
def test_other_shapes_are_said_as_a_digest(item: object) -> None:
    assert plain(item) == sha256(msgspec.msgpack.encode(item)).hexdigest()


def test_unequal_items_stay_unequal() -> None:
    assert plain({"a": 1}) != plain({"a": 2})
    assert plain(b"a") != plain(b"b")


def test_blocks_without_keys_have_none() -> None:
    assert plain_extra_keys(None) is None
    assert plain_extra_keys([None, ("x",), None]) == [None, ["x"], None]
