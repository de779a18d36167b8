"""The declarations, against what the consumers' table asks of every stream."""

import pytest

from kvevents_service.wire.dialects import DIALECTS, REMOVED_KEYS, STORED_KEYS, Dialect, Groups, Layout

REQUIRED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
NAMES = ["vllm", "vllm-array", "dynamo", "llm-d", "vllm-router", "mooncake", "aibrix", "sglang"]
EVERY = [*DIALECTS.values()]


def name_of(dialect: Dialect) -> str:
    return dialect.name


def test_each_is_under_its_name() -> None:
    assert list(DIALECTS) == [dialect.name for dialect in EVERY] == NAMES


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_keys_stand_in_the_order_of_the_wire(dialect: Dialect) -> None:
    assert dialect.stored == STORED_KEYS[: len(dialect.stored)]
    assert dialect.removed == REMOVED_KEYS[: len(dialect.removed)]
    if dialect.layout is Layout.ARRAY:
        assert dialect.stored_if_set == dialect.removed_if_set == ()
    assert dialect.stored[:6] == REQUIRED


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_readers_of_one_group_are_not_told_of_groups(dialect: Dialect) -> None:
    told = any(dialect.says(key) for key in ("group_idx", "kv_cache_spec_kind", "locality"))
    assert told is (dialect.groups is Groups.ALL)
    assert "group_idx" not in dialect.removed + dialect.removed_if_set or told


def test_a_medium_has_one_name_or_is_filtered_out() -> None:
    assert DIALECTS["vllm"].medium("TAPE") == "TAPE"
    assert DIALECTS["dynamo"].medium("TAPE") is None
    assert DIALECTS["sglang"].medium("STORAGE") == "DISK"
    assert DIALECTS["mooncake"].medium("CPU") is DIALECTS["aibrix"].medium("CPU") is None
    assert DIALECTS["llm-d"].medium("STORAGE") is None
    assert DIALECTS["vllm-router"].medium("EXTERNAL") is None
