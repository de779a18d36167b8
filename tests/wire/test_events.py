"""The structs agree with what a vLLM 0.33 engine sends: keys, their order, what is left out."""

import msgspec
import pytest
from wire_vectors import CAPTURED

from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

STORED = BlockStored([1], None, [5, 6], 2, None, "GPU", None)


def keys(event: object) -> list[str]:
    return list(msgspec.msgpack.decode(msgspec.msgpack.encode(event)))


def test_required_keys_are_sent_even_when_nil() -> None:
    assert keys(STORED) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]
    assert keys(BlockRemoved([1], None)) == ["type", "block_hashes", "medium"]
    assert keys(AllBlocksCleared()) == ["type"]


def test_an_optional_key_is_sent_only_when_set() -> None:
    assert keys(msgspec.structs.replace(STORED, session_id="s"))[-1] == "session_id"
    assert keys(BlockRemoved([1], "CPU", group_idx=0)) == ["type", "block_hashes", "medium", "group_idx"]


@pytest.mark.parametrize("vector", CAPTURED, ids=lambda vector: vector.id)
def test_keys_and_their_order_are_those_of_the_engine(vector) -> None:
    theirs = msgspec.msgpack.decode(vector.payload)[1]
    assert [keys(event) for event in vector.batch.events] == [list(event) for event in theirs]


def test_events_and_batches_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        STORED.medium = "CPU"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        EventBatch(0.0, []).ts = 1.0  # type: ignore[misc]


def test_added_fields_all_have_defaults() -> None:
    assert BlockStored.__struct_defaults__ == (None,) * 8
    assert BlockRemoved.__struct_defaults__ == (None,) * 3
    assert EventBatch.__struct_defaults__ == (None,) * 2
