"""Event classes of a dialect: made once, named as the wire names them, array or map."""

import msgspec
import pytest

from kvevents_service.wire.dialects import DIALECTS, REMOVED_KEYS, STORED_KEYS
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents_service.wire.shapes import shape_of

STORED = ([1], None, [5, 6], 2, None, "GPU", None, [None], 0, "full_attention", None, "LOCAL")
REMOVED = ([1], "GPU", 0, "LOCAL")


def test_the_keys_are_the_first_fields_of_the_events() -> None:
    assert BlockStored.__struct_fields__[: len(STORED_KEYS)] == STORED_KEYS
    assert BlockRemoved.__struct_fields__[: len(REMOVED_KEYS)] == REMOVED_KEYS


def test_a_shape_is_made_once() -> None:
    assert shape_of(DIALECTS["vllm"]) is shape_of(DIALECTS["vllm"])


@pytest.mark.parametrize("name", DIALECTS)
def test_events_are_named_as_on_the_wire(name: str) -> None:
    shape = shape_of(DIALECTS[name])
    made = [shape.stored(STORED), shape.removed(REMOVED), shape.cleared]
    assert [type(event).__name__ for event in made] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]


def test_vllm_events_are_those_of_the_common_layout() -> None:
    shape = shape_of(DIALECTS["vllm"])
    assert shape.cleared == AllBlocksCleared()
    assert shape.stored(STORED) == BlockStored(*STORED)  # type: ignore[arg-type]
    assert shape.removed(REMOVED) == BlockRemoved(*REMOVED)  # type: ignore[arg-type]


def test_keys_that_are_not_said_are_not_there() -> None:
    shape = shape_of(DIALECTS["sglang"])
    bare = msgspec.to_builtins(shape.stored(STORED))
    assert list(bare) == ["type", *STORED_KEYS[:6]]
    named = msgspec.to_builtins(shape.stored((*STORED[:6], "ada", *STORED[7:])))
    assert list(named) == ["type", *STORED_KEYS[:7]]
    assert list(msgspec.to_builtins(shape.removed(REMOVED))) == ["type", *REMOVED_KEYS[:2]]


def test_array_events_have_every_position() -> None:
    shape = shape_of(DIALECTS["vllm-array"])
    assert msgspec.to_builtins(shape.stored(STORED)) == ["BlockStored", *STORED[:11]]
    assert msgspec.to_builtins(shape.removed(REMOVED)) == ["BlockRemoved", *REMOVED[:3]]
