"""Plain extra keys: known shapes stay, others are told apart."""

from collections.abc import Callable
from hashlib import sha256

import msgspec
import pytest

from kvevents_service.wire.extra_keys import MAX_DEPTH, is_deep, plain_extra_keys


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


@pytest.mark.parametrize("item", ["salt", 0, 5, True, 1.5, b"x", {"a": 1}])
def test_an_entry_that_is_no_list_is_its_only_item(item: object) -> None:
    assert plain_extra_keys([item]) == [[plain(item)]]


def nested(depth: int, make: Callable[[object], object]) -> object:
    value: object = None
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [1, v], lambda v: (v, 1), lambda v: {"a": v}])
def test_depth_is_that_of_lists_and_maps(make: Callable[[object], object]) -> None:
    assert not is_deep([None, nested(MAX_DEPTH - 1, make)])
    assert is_deep([None, nested(MAX_DEPTH, make)])


def test_the_keys_of_a_map_are_inside_it_and_width_is_no_depth() -> None:
    assert is_deep([{nested(MAX_DEPTH, lambda v: (v,)): 1}])
    assert not is_deep([[list(range(1000))], ["x"] * 1000])
