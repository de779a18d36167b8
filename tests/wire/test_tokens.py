"""Token ids that are read late are the list they would have been; what is no int is refused with its place."""

import copy
import json
import pickle
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wire_vectors import DECODED

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.prefix_index import BlockIndex
from kvevents_service.core.press import Press
from kvevents_service.core.rows import Row
from kvevents_service.errors import WireError
from kvevents_service.wire.codec import LONG_BYTES, decode_batch, encode_batch, encode_own
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.events import BlockStored, EventBatch
from kvevents_service.wire.jsonform import event_to_json
from kvevents_service.wire.packing import pack_int32
from kvevents_service.wire.splice import spliced
from kvevents_service.wire.tokens import TokenIds

pack = msgspec.msgpack.encode
MANY = [*range(0, 40_000, 80)]
PARENT = {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}
STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": MANY, "block_size": len(MANY), **PARENT}


def tokens_of(values: object) -> TokenIds:
    return TokenIds(msgspec.Raw(pack(values)))


def stored_as(values: object, layout: str) -> bytes:
    """A batch of one store with these tokens, long enough to be read late."""
    event: object = STORED | {"token_ids": values}
    if layout == "array":
        event = ["BlockStored", [1], None, values, 500]
    elif layout == "missing keys":
        event = {key: value for key, value in (STORED | {"token_ids": values}).items() if key not in PARENT}
    whole = {"ts": 1.5, "events": [event]} if layout == "map batch" else [1.5, [event], 0]
    return pack(whole)


LAYOUTS = ["map", "array", "missing keys", "map batch"]


def only(payload: bytes, **how: bool) -> BlockStored:
    (event,) = decode_batch(payload, **how).batch.events
    assert isinstance(event, BlockStored)
    return event


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_are_read_late_in_every_layout(layout: str) -> None:
    late, now = only(stored_as(MANY, layout)), only(stored_as(MANY, layout), read_tokens=True)
    assert isinstance(late.token_ids, TokenIds)
    assert isinstance(now.token_ids, list)
    assert late == now
    assert now == late


def test_few_are_a_list_at_once() -> None:
    payload = stored_as([5] * 16, "map")
    assert len(payload) < LONG_BYTES
    assert isinstance(only(payload).token_ids, list)


numbers = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**64 - 1))


@given(st.lists(numbers, min_size=0, max_size=40), st.sampled_from(LAYOUTS), st.sampled_from([0, 100, 70_000]))
@example([], "map", 0)
def test_late_and_at_once_are_the_same(values: list[int], layout: str, padding: int) -> None:
    payload = stored_as([*values, *range(padding)], layout)
    assert decode_batch(payload) == decode_batch(payload, read_tokens=True)


def written(encoding: Encoding, runs: Sequence[BlockStoreMeta], *, wide: bool) -> bytes:
    """As a live batch, or as a part of a state."""
    if not wide:
        return encoding.encode(runs, 1.5)
    return bytes(encoding.press([*map(Row.of, runs)], 1.5, Press(), clear=False))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("top", [40_000, 120_000])
def test_every_dialect_is_read_late_as_at_once(dialect: str, wide: bool, top: int) -> None:
    group = GroupSpec(0, "full_attention", 16, main=True)
    tokens = pack_int32(range(top - 16 * 32, top))
    run = BlockStoreMeta(group, "GPU", 32, bytes(range(256)) * 4, tokens, None, None, None, None)
    encoding = Encoding(dialect)
    payload = written(encoding, (run, run.part(0, 8)), wide=wide)
    assert decode_batch(payload) == decode_batch(payload, read_tokens=True)
    whole = spliced(encoding.encode((), 1.5), [payload, payload])
    assert decode_batch(whole) == decode_batch(whole, read_tokens=True)
    assert sum(len(event.token_ids) for event in decode_batch(whole).batch.events) == 2 * 16 * 40


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
def test_every_vector_is_the_same_read_at_once(vector) -> None:
    assert decode_batch(vector.payload, read_tokens=True) == decode_batch(vector.payload)


# as a list


@given(st.lists(numbers, max_size=20), st.slices(20))
def test_it_is_the_list(values: list[int], some: slice) -> None:
    tokens = tokens_of(values)
    assert len(tokens) == len(values)
    assert tokens == values
    assert values == tokens
    assert tokens == tokens_of(values)
    assert [*tokens] == values
    assert [*reversed(tokens)] == values[::-1]
    assert tokens[some] == values[some]
    assert (tokens + values, values + tokens, tokens + tokens) == (values * 2,) * 3
    assert repr(tokens) == repr(values)
    assert all(value in tokens for value in values)
    assert "1" not in tokens


@pytest.mark.parametrize("other", [[1, 3], [1], (1, 2), None, "12"])
def test_it_differs_from_what_the_list_differs_from(other: object) -> None:
    assert tokens_of([1, 2]) != other


def test_it_has_no_hash_as_a_list_has_none() -> None:
    with pytest.raises(TypeError):
        hash(tokens_of([1]))


def test_copied_or_pickled_it_is_a_list() -> None:
    event = only(stored_as(MANY, "map"))
    for again in (copy.deepcopy(event), pickle.loads(pickle.dumps(event))):
        assert again == event
        assert isinstance(again.token_ids, list)


def test_encoders_write_it_as_a_list() -> None:
    payload = encode_batch(EventBatch(1.5, [BlockStored([1], None, MANY, len(MANY), None, None, None)], 0))
    event = only(payload)
    assert isinstance(event.token_ids, TokenIds)
    assert encode_batch(decode_batch(payload).batch) == payload
    assert json.loads(json.dumps(event.token_ids, default=list)) == MANY
    assert msgspec.json.decode(msgspec.json.encode(event, enc_hook=list))["token_ids"] == MANY
    assert event_to_json(event, tokens=True)["token_ids"] == MANY
    assert event_to_json(event, tokens=False)["token_count"] == len(MANY)


def test_wide_tokens_are_written_short_again() -> None:
    group = GroupSpec(0, "full_attention", len(MANY))
    meta = BlockStoreMeta(group, "GPU", 8, bytes(8), pack_int32(MANY), None, None, None, None)
    short = Encoding().encode((meta,), 1.5)
    wide = written(Encoding(), (meta,), wide=True)
    assert len(wide) > len(short)
    assert encode_batch(decode_batch(wide).batch) == short


# what is no array of ints


ODD = ["secret", 77.25, None, True, [1], {"a": 1}, msgspec.msgpack.Ext(1, b"x"), b"secret"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_int_is_refused_with_its_place(layout: str, odd: object) -> None:
    """At the border where the first value shows it or every token is read, else by whoever reads the tokens."""
    first, later = stored_as([odd, *MANY], layout), stored_as([*MANY, odd, odd], layout)
    for payload, at_once, place in ((first, False, 0), (first, True, 0), (later, True, len(MANY))):
        with pytest.raises(WireError) as caught:
            decode_batch(payload, read_tokens=at_once)
        assert caught.value.field == f"events[0].token_ids[{place}]"
        assert "secret" not in str(caught.value)
    event = only(later)
    assert len(event.token_ids) == len(MANY) + 2
    for read in (list, repr, lambda tokens: tokens[0], lambda tokens: tokens == [*tokens]):
        with pytest.raises(WireError) as caught:
            read(event.token_ids)
        assert (caught.value.field, caught.value.expected) == (f"token_ids[{len(MANY)}]", "int")
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("odd", [None, "s" * 600, 5, {"a": [1] * 600}, b"s" * 600])
def test_what_is_no_array_is_refused_at_the_border(layout: str, odd: object) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(stored_as(odd, layout))
    assert caught.value.field == "events[0].token_ids"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_token_pairs_are_skipped(layout: str) -> None:
    decoded = decode_batch(stored_as([[1, 2]] * 500, layout))
    assert (decoded.batch.events, decoded.skipped[0].reason) == ([], "token pairs")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_that_is_cut_off_is_refused_at_the_border(layout: str) -> None:
    payload = stored_as(MANY, layout)
    for end in range(0, len(payload), 97):
        with pytest.raises(WireError):
            decode_batch(payload[:end])


def test_tokens_that_are_no_ints_are_refused_again_on_the_way_out() -> None:
    batch = decode_batch(stored_as([*MANY, None], "map")).batch
    with pytest.raises(WireError) as caught:
        encode_batch(batch)
    assert caught.value.field == f"events[0].token_ids[{len(MANY)}]"


def test_an_index_counts_a_store_whose_tokens_are_no_ints() -> None:
    odd = stored_as([*MANY[1:], None], "map")
    index = BlockIndex()
    index.apply("pod", decode_batch(odd).batch.events)
    assert index.stats()["malformed"] == 1
    index.apply("pod", decode_batch(stored_as(MANY, "map")).batch.events)
    assert index.match(MANY)["pod"].tokens == len(MANY)


def test_batches_of_many_short_events_are_read_at_once() -> None:
    short = BlockStored([1], None, [7] * 16, 16, None, None, None)
    payload = encode_own(EventBatch(1.5, [short] * 50, 0))
    assert len(payload) > LONG_BYTES
    assert all(isinstance(event.token_ids, list) for event in decode_batch(payload).batch.events)
