"""Events as JSON: always encodable, hashes as text, no tokens unless asked for."""

import json
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_vectors import DECODED

from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents_service.wire.jsonform import TOO_DEEP, event_to_json, hash_text, to_plain

STORED = BlockStored([2**64 - 1, b"\xab\xcd"], -1, [7001, 7002], 1, None, None, None)


def test_a_bare_store() -> None:
    assert event_to_json(STORED, tokens=False) == {
        "type": "BlockStored",
        "block_hashes": ["18446744073709551615", "abcd"],
        "parent_block_hash": "-1",
        "token_count": 2,
        "block_size": 1,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
    }


def test_tokens_come_only_when_asked_for() -> None:
    event = msgspec.structs.replace(STORED, lookahead_token_ids=[[7003]], group_idx=0)
    assert event_to_json(event, tokens=True)["token_ids"] == [7001, 7002]
    assert event_to_json(event, tokens=True)["lookahead_token_ids"] == [[7003]]
    hidden = event_to_json(event, tokens=False)
    assert "700" not in json.dumps(hidden)
    assert hidden["group_idx"] == 0


def test_removals_and_clears() -> None:
    assert event_to_json(AllBlocksCleared(), tokens=True) == {"type": "AllBlocksCleared"}
    removed = BlockRemoved([b"\x01"], "CPU", group_idx=1)
    assert event_to_json(removed, tokens=False) == {
        "type": "BlockRemoved",
        "block_hashes": ["01"],
        "medium": "CPU",
        "group_idx": 1,
    }


def test_parents_that_are_none_or_bytes() -> None:
    assert event_to_json(msgspec.structs.replace(STORED, parent_block_hash=b"\x0f"), tokens=False)[
        "parent_block_hash"
    ] == hash_text(b"\x0f")
    orphan = msgspec.structs.replace(STORED, parent_block_hash=None)
    assert event_to_json(orphan, tokens=False)["parent_block_hash"] is None


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (b"\x01\xff", "01ff"),
        (("lora", [b"\x02", None, True]), ["lora", ["02", None, True]]),
        ({1: "a", b"\x03": 1, (1, 2): 2, None: 3}, {"1": "a", "03": 1, "[1, 2]": 2, "None": 3}),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1.5, 1.5),
        (msgspec.msgpack.Ext(5, b"\x04"), {"ext": 5, "hex": "04"}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (object(), "(object)"),
    ],
)
def test_plain_values(value: object, plain: object) -> None:
    assert to_plain(value) == plain


def test_nesting_is_cut() -> None:
    deep: object = 1
    for level in range(900):
        deep = [deep] if level % 2 else {"k": deep}
    assert TOO_DEEP in json.dumps(event_to_json(msgspec.structs.replace(STORED, extra_keys=[deep]), tokens=False))


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
@pytest.mark.parametrize("tokens", [True, False])
def test_every_vector_is_json(vector, tokens: bool) -> None:
    for event in decode_batch(vector.payload).batch.events:
        plain = event_to_json(event, tokens=tokens)
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain["type"] == type(event).__name__


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text() | st.binary(), inner, max_size=3),
    max_leaves=10,
)


@given(values)
def test_any_extra_keys_are_json(value: object) -> None:
    plain = event_to_json(msgspec.structs.replace(STORED, extra_keys=[value]), tokens=True)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
