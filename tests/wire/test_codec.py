"""One vector table proves encode and decode; anything else is a Decoded or a WireError."""

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_vectors import ALL, CAPTURED, DECODED, INVALID, PAYLOADS

from kvevents_service.errors import WireError
from kvevents_service.wire import codec
from kvevents_service.wire.codec import Decoded, Skipped, decode_batch, encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents_service.wire.frames import parse_live

pack = msgspec.msgpack.encode
HASHES = [0, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), b"", b"\xff" * 8, bytes(32)]
STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5, 6], "block_size": 2}
STORED_ARRAY = ["BlockStored", [1], None, [5, 6], 2]
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}


def stored(**fields) -> BlockStored:
    base = BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    return msgspec.structs.replace(base, **fields)


def batch(*events, **fields) -> EventBatch:
    return EventBatch(1.5, list(events), **{"data_parallel_rank": 0, **fields})


def decode_events(*events) -> Decoded:
    return decode_batch(pack([1.5, events, 0]))


def refusal(payload: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_batch(payload)
    return caught.value


def decodes_or_refuses(payload: bytes) -> bool:
    """The contract for any bytes. An exception of another kind fails the test that calls this."""
    try:
        assert isinstance(decode_batch(payload), Decoded)
    except WireError:
        return False
    return True


# -- the table --


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
def test_decode(vector) -> None:
    decoded = decode_batch(vector.payload)
    assert decoded.batch == vector.batch
    assert [skip.type for skip in decoded.skipped] == vector.unknown_types
    assert isinstance(decoded.batch.ts, float)


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
def test_encode_keeps_the_meaning(vector) -> None:
    assert decode_batch(encode_batch(vector.batch)) == Decoded(vector.batch, ())


@pytest.mark.parametrize("vector", CAPTURED, ids=lambda vector: vector.id)
def test_encode_gives_the_bytes_of_the_engine(vector) -> None:
    assert encode_batch(vector.batch) == vector.payload
    assert encode_batch(decode_batch(vector.payload).batch) == vector.payload


@pytest.mark.parametrize("note", ["heartbeat", "batch with a 4th"])
def test_encode_gives_the_bytes_of_the_layout(note: str) -> None:
    [vector] = [vector for vector in DECODED if note in vector.id]
    assert encode_batch(vector.batch) == vector.payload


def test_a_replayed_batch_is_the_live_one() -> None:
    live = {vector.frames[1]: vector.payload for vector in CAPTURED if "gpu-int" in vector.id}
    replayed = [vector for vector in ALL if "replay" in vector.id and vector.payload]
    assert len(replayed) == 5
    assert all(live[vector.frames[2]] == vector.payload for vector in replayed)


INVALID_FIELDS = {
    "one frame": "frames",
    "seq of 4 bytes": "seq",
    "payload is not msgpack": "batch",
    "payload is an int": "batch",
    "events is a map": "events",
    "ts is a string": "ts",
    "event without type": "events[0].type",
    "stored without block_hashes": "events[0].block_hashes",
    "hash is a float": "events[0].block_hashes[0]",
    "truncated": "payload",
    "4 GB array header": "payload",
    "empty payload": "payload",
    "trailing bytes after the batch": "payload",
}


@pytest.mark.parametrize("vector", INVALID, ids=lambda vector: vector.id)
def test_an_invalid_vector_is_one_typed_error(vector) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(parse_live(vector.frames).payload)
    assert caught.value.field == INVALID_FIELDS[vector.id.split(":", 2)[2]]


# -- what is tolerated --


def test_an_unknown_type_is_skipped_and_its_neighbours_kept() -> None:
    decoded = decode_events(REMOVED, {"type": "BlockPinned", "x": [1]}, ["BlockMoved", 1], REMOVED)
    assert decoded.batch.events == [BlockRemoved([1], "GPU")] * 2
    assert decoded.skipped == (
        Skipped(1, "BlockPinned", "unknown type"),
        Skipped(2, "BlockMoved", "unknown type"),
    )


def test_the_name_of_a_skipped_type_is_bounded() -> None:
    assert decode_events({"type": "x" * 10_000}).skipped[0].type == "x" * 64


@pytest.mark.parametrize(
    "event", [STORED | {"token_ids": [[1, 2], [2, 3]]}, ["BlockStored", [1], None, [[1, 2]], 1]]
)
def test_token_pairs_are_skipped(event) -> None:
    decoded = decode_events(event, REMOVED)
    assert decoded == Decoded(batch(BlockRemoved([1], "GPU")), (Skipped(0, "BlockStored", "token pairs"),))


def test_missing_keys_are_none() -> None:
    decoded = decode_events(STORED, {"type": "BlockRemoved", "block_hashes": [1]}, STORED_ARRAY)
    bare = stored(medium=None)
    assert decoded.batch.events == [bare, BlockRemoved([1], None), bare]


def test_trailing_elements_of_an_array_event_are_ignored() -> None:
    full = [*STORED_ARRAY, None, "GPU", None, None, 0, "mamba", None, {"new": 1}, 7]
    decoded = decode_events(full, ["BlockRemoved", [1], "GPU", 2, 3.5], ["AllBlocksCleared", 1])
    assert decoded.batch.events == [
        stored(group_idx=0, kv_cache_spec_kind="mamba"),
        BlockRemoved([1], "GPU", group_idx=2),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize("layout", [STORED | {"future": {"a": [1.5]}}, STORED])
def test_map_and_array_events_mix(layout) -> None:
    assert decode_events(layout, STORED_ARRAY).batch.events == [stored(medium=None)] * 2


@pytest.mark.parametrize(
    "elements", [[1, []], [1, [], None], [1, [], None, None], [1, [], None, None, {"future": 1}]]
)
def test_batches_of_two_and_more_elements(elements) -> None:
    decoded = decode_batch(pack(elements)).batch
    assert decoded == EventBatch(1.0, [])
    assert isinstance(decoded.ts, float)


def test_map_batches_take_unknown_keys_and_both_event_layouts() -> None:
    payload = pack({"future": 1, "ts": 2, "events": [REMOVED, STORED_ARRAY], "publisher_id": b"p"})
    decoded = decode_batch(payload).batch
    assert decoded == EventBatch(2.0, [BlockRemoved([1], "GPU"), stored(medium=None)], publisher_id=b"p")


@pytest.mark.parametrize("extra", [[None], [["a", ["img", 0]]], ["salt"], [{"k": b"v"}], [1.5], [], [[[[]]]]])
def test_extra_keys_are_any_values(extra) -> None:
    event = STORED | {"extra_keys": extra}
    assert decode_events(event).batch.events == [stored(medium=None, extra_keys=extra)]
    full = event | {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}
    assert decode_events(full) == decode_events(event)


# -- what is refused, and where the error points --


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"block_hashes": [1]}, ".type"),
        ({"type": 5}, ".type"),
        ([], ".type"),
        ([7], ".type"),
        (STORED | {"block_hashes": [1, True]}, ".block_hashes[1]"),
        (STORED | {"block_hashes": ["secret"]}, ".block_hashes[0]"),
        (STORED | {"block_hashes": None}, ".block_hashes"),
        (STORED | {"parent_block_hash": 1.0}, ".parent_block_hash"),
        (STORED | {"token_ids": [1, "secret"]}, ".token_ids[1]"),
        (STORED | {"token_ids": [1, 77.25]}, ".token_ids[1]"),
        (STORED | {"token_ids": [[1, 2, 3]]}, ".token_ids[0]"),
        (STORED | {"token_ids": None}, ".token_ids"),
        (STORED | {"medium": b"secret"}, ".medium"),
        (STORED | {"extra_keys": 1}, ".extra_keys"),
        (STORED | {"lookahead_token_ids": [[1, None]]}, ".lookahead_token_ids[0][1]"),
        (STORED | {"block_hashes": [msgspec.msgpack.Ext(1, b"secret")]}, ".block_hashes[0]"),
        (STORED | {"token_ids": [msgspec.msgpack.Ext(-1, bytes(12))]}, ".token_ids[0]"),
        (STORED | {"extra_keys": [msgspec.msgpack.Ext(-1, b"\xff" * 12)]}, ".extra_keys[0]"),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [1]}, ".block_size"),
        ({"type": "BlockRemoved"}, ".block_hashes"),
        (["BlockStored", [1], None, [5, "secret"], 2], ".token_ids[1]"),
        (["BlockStored", [1], None], ""),
        (["BlockRemoved", [1.5]], ".block_hashes[0]"),
        (5, ""),
        (None, ""),
        ("secret", ""),
    ],
)
def test_a_malformed_known_event(event, field: str) -> None:
    error = refusal(pack([1.5, [REMOVED, REMOVED, event, REMOVED], 0]))
    assert error.field == "events[2]" + field
    assert "secret" not in str(error)
    assert "77.25" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([None, [], 0], "ts"),
        ([1.5, {}, 0], "events"),
        ([1.5, None], "events"),
        ([1.5, [], "0"], "data_parallel_rank"),
        ([1.5, [], True], "data_parallel_rank"),
        ([1.5, [], 0, "id"], "publisher_id"),
        ([1.5], "batch"),
        ([], "batch"),
        ({"ts": 1.5}, "events"),
        ({"ts": "x", "events": []}, "ts"),
        ({}, "ts"),
        ("batch", "batch"),
        (None, "batch"),
        (msgspec.msgpack.Ext(4, b"x"), "batch"),
    ],
)
def test_a_malformed_batch(value, field: str) -> None:
    assert refusal(pack(value)).field == field


def test_text_that_is_not_utf8_is_refused() -> None:
    payload = pack([1.5, [STORED | {"medium": "secret"}], 0]).replace(b"secret", b"\xff\xfecret")
    assert refusal(payload).field == "events[0]"


@pytest.mark.parametrize(("depth", "decodes"), [(50, {True}), (1_000, {True, False}), (100_000, {False})])
def test_deep_nesting_is_decoded_or_refused(depth: int, decodes: set[bool]) -> None:
    """How deep is too deep is the interpreter's: Python 3.12 has more stack for C than 3.11."""
    nested = b"\x91" * depth + b"\xc0"
    for start in (b"", pack([1.5, [], 0, None, 0])[:-1], b"\x92\xcb" + bytes(8) + b"\x91"):
        decodes_or_refuses(start + nested)
    whole = pack([1.5, [STORED | {"extra_keys": [0]}], 0])
    assert decodes_or_refuses(whole[:-2] + nested + whole[-1:]) in decodes


def test_a_payload_over_the_limit_is_refused_unread() -> None:
    payload = pack([1.5, [], 0])
    assert refusal(payload + bytes(codec.MAX_PAYLOAD_BYTES)).field == "payload"
    with pytest.raises(WireError, match="at most"):
        encode_batch(batch(stored(extra_keys=[bytes(codec.MAX_PAYLOAD_BYTES)])))


# -- encoding what no batch may hold --


@pytest.mark.parametrize("block_hash", HASHES)
def test_a_hash_at_the_edge_survives(block_hash) -> None:
    whole = batch(stored(block_hashes=[block_hash], parent_block_hash=block_hash), BlockRemoved([block_hash], None))
    assert decode_batch(encode_batch(whole)) == Decoded(whole, ())


@pytest.mark.parametrize("block_hash", [2**64, -(2**63) - 1, 10**40, 1.0, True, "1", "YWJj", None, [1]])
def test_a_hash_that_is_none_is_refused(block_hash) -> None:
    for event in (stored(block_hashes=[1, block_hash]), BlockRemoved([1, block_hash], "GPU")):
        with pytest.raises(WireError) as caught:
            encode_batch(batch(stored(), event))
        assert caught.value.field.startswith("events[1].block_hashes")


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (stored(token_ids=[1, None]), "events[0].token_ids[1]"),
        (stored(token_ids=[1, 2.0]), "events[0].token_ids[1]"),
        (stored(parent_block_hash=2**64), "events[0].parent_block_hash"),
        (stored(medium=b"GPU"), "events[0].medium"),
        (stored(medium="\ud800"), "events[0].medium"),
        (stored(extra_keys=[object()]), "events[0].extra_keys"),
        (stored(extra_keys=[[2**64]]), "events[0].extra_keys"),
        ({"type": "BlockRemoved"}, "events[0]"),
        (None, "events[0]"),
    ],
)
def test_encode_refuses_a_wrong_type(event, field: str) -> None:
    with pytest.raises(WireError) as caught:
        encode_batch(batch(event))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ts": "now"}, "ts"),
        ({"data_parallel_rank": 0.0}, "data_parallel_rank"),
        ({"data_parallel_rank": 2**64}, "data_parallel_rank"),
        ({"publisher_id": "YWJj"}, "publisher_id"),
        ({"events": None}, "events"),
    ],
)
def test_encode_refuses_a_wrong_header(fields, field: str) -> None:
    with pytest.raises(WireError) as caught:
        encode_batch(msgspec.structs.replace(batch(), **fields))
    assert caught.value.field == field


def test_encode_survives_a_list_that_holds_itself() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(WireError, match=r"events\[0\].extra_keys"):
        encode_batch(batch(stored(extra_keys=loop)))


def test_the_wire_has_a_float_time_and_always_a_rank() -> None:
    assert encode_batch(EventBatch(2, [])).hex() == "93cb400000000000000090c0"


# -- any bytes --


def test_every_truncation_is_refused() -> None:
    for vector in DECODED:
        for end in range(len(vector.payload)):
            assert not decodes_or_refuses(vector.payload[:end])


def test_every_bit_flip_is_decoded_or_refused() -> None:
    for payload in PAYLOADS:
        flipped = bytearray(payload)
        for position in range(len(payload)):
            for bit in range(8):
                flipped[position] ^= 1 << bit
                decodes_or_refuses(bytes(flipped))
                flipped[position] ^= 1 << bit


@pytest.mark.parametrize(
    "header", ["dcffff", "ddffffffff", "deffff", "dfffffffff", "c6ffffffff", "dbffffffff", "c9ffffffff01"]
)
def test_a_giant_header_takes_no_memory(header: str) -> None:
    giant = bytes.fromhex(header)
    whole = pack([1.5, [STORED | {"extra_keys": [0]}], 0])
    starts = [whole[:i] for i in range(len(whole))]
    tracemalloc.start()
    for start in starts:
        decodes_or_refuses(start + giant)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("item", ["80", "90", "c0", "9180", "a0", "cb0000000000000000"])
@pytest.mark.parametrize("place", ["events", "extra_keys", "block_hashes", "token_ids", "unknown"])
def test_memory_is_bounded_by_the_payload(item: str, place: str) -> None:
    count = 100_000
    items = b"\xdd" + count.to_bytes(4, "big") + bytes.fromhex(item) * count
    value = [1.5, "@", 0] if place == "events" else [1.5, [STORED | {place: "@"}], 0]
    payload = pack(value).replace(b"\xa1@", items)
    tracemalloc.start()
    decodes_or_refuses(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(payload)


@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    decodes_or_refuses(payload)
    decodes_or_refuses(b"\x93\xcb" + bytes(8) + payload)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.builds(msgspec.msgpack.Ext, st.integers(-1, 127), st.binary(max_size=14))
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type"])
)
names = st.sampled_from(["type", "ts", "events", *BlockStored.__struct_fields__]) | st.text(max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(names, inner, max_size=6),
    max_leaves=25,
)


@given(values)
def test_random_values(value) -> None:
    decodes_or_refuses(pack(value))
    decodes_or_refuses(pack([1.5, value, 0]))
    decodes_or_refuses(pack([1.5, [value, STORED], 0]))


@given(names, values)
def test_a_random_value_in_a_known_event(name: str, value) -> None:
    decodes_or_refuses(pack([1.5, [STORED | {name: value}], 0]))


hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=32)
texts = st.none() | st.text(max_size=8)
small = st.none() | st.integers(0, 2**31)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
stores = st.builds(
    BlockStored,
    st.lists(hashes, max_size=5),
    st.none() | hashes,
    st.lists(st.integers(0, 2**31), max_size=40),
    st.integers(0, 2**20),
    small,
    texts,
    texts,
    st.none() | st.lists(plain, max_size=4),
    small,
    texts,
    small,
    texts,
    texts,
    texts,
    st.none() | st.lists(st.lists(st.integers(0, 2**31), max_size=3), max_size=3),
)
removals = st.builds(BlockRemoved, st.lists(hashes, max_size=5), texts, small, texts, texts)
batches = st.builds(
    EventBatch,
    st.floats(allow_nan=False),
    st.lists(stores | removals | st.just(AllBlocksCleared()), max_size=5),
    small,
    st.none() | st.binary(max_size=16),
)


@given(batches)
def test_round_trip(whole: EventBatch) -> None:
    payload = encode_batch(whole)
    assert decode_batch(payload) == Decoded(whole, ())
    assert encode_batch(decode_batch(payload).batch) == payload


@given(batches)
def test_the_slow_path_reads_the_same(whole: EventBatch) -> None:
    """One event of an unknown type sends the whole batch the slow way; nothing else may change."""
    pushed = [whole.ts, [*whole.events, {"type": "?"}], whole.data_parallel_rank, whole.publisher_id]
    assert decode_batch(pack(pushed)).batch == whole


@given(batches, st.data())
@settings(max_examples=50)
def test_the_array_layout_reads_the_same(whole: EventBatch, data) -> None:
    """As vLLM up to 0.23 sent it: positions, cut anywhere after the last value that is not a default."""
    kept = [cut_to_old_fields(event) for event in whole.events]
    arrays = [[type(event).__name__, *msgspec.structs.astuple(event)[:11]] for event in kept]
    for array in arrays:
        while len(array) > 5 and array[-1] is None and data.draw(st.booleans()):
            array.pop()
    assert decode_batch(pack([whole.ts, arrays])).batch.events == kept


def cut_to_old_fields(event):
    newer = {"locality", "ownership", "session_id", "lookahead_token_ids"} & set(event.__struct_fields__)
    return msgspec.structs.replace(event, **dict.fromkeys(newer))


def test_time_may_be_any_float() -> None:
    assert math.isnan(decode_batch(pack([math.nan, [], 0])).batch.ts)
