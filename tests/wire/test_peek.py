"""What is read of a batch without decoding it is what decoding says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.errors import WireError
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, EventBatch
from kvevents_service.wire.peek import Header, Snapshot, parse_snapshot, peek, publisher_id, starts_anew

ID = bytes(range(16))
CLEAR, REMOVED = AllBlocksCleared(), BlockRemoved([1], "CPU")


@given(
    st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=3),
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.integers(0, 255),
    st.none() | st.binary(min_size=16, max_size=16),
)
def test_rank_and_publisher_of_any_batch(hashes: list[int], rank: int | None, publisher: bytes | None) -> None:
    payload = encode_batch(EventBatch(1.0, [BlockRemoved(hashes, None)], rank, publisher))
    assert peek(payload) == Header(rank, publisher)
    assert publisher_id(payload) == publisher


@pytest.mark.parametrize("rank", [None, 0, 127, 128, 255, 256, 65535, 2**16, 2**32, -1, -33, -200])
@pytest.mark.parametrize("medium", ["CPU", "\u00cc"])
def test_ranks_of_every_width(rank: int | None, medium: str) -> None:
    assert peek(encode_batch(EventBatch(1.0, [BlockRemoved([0xCC], medium)], rank))) == Header(rank)


@pytest.mark.parametrize(
    ("payload", "header"),
    [
        (b"\x92\xca\0\0\0\0\x90", Header(None)),  # two elements
        (b"\x82\xa2ts\x01\xa6events\x90", Header(None)),  # a map
        (b"\x83\xa2ts\x01\xa6events\x90\xb2data_parallel_rank\x05", Header(5)),
        (b"\xc1", None),
        (b"\x94\x01\x90", None),
    ],
)
def test_other_layouts(payload: bytes, header: Header | None) -> None:
    assert peek(payload) == header


@given(st.binary(min_size=1, max_size=40))
def test_any_bytes(payload: bytes) -> None:
    try:
        batch, _ = decode_batch(payload)
    except WireError:
        peek(payload)
    else:
        assert peek(payload) == Header(batch.data_parallel_rank, batch.publisher_id)
    starts_anew(payload)


@pytest.mark.parametrize(
    ("events", "anew"),
    [([], False), ([CLEAR], True), ([CLEAR, REMOVED], True), ([REMOVED, CLEAR], False), ([REMOVED], False)],
)
def test_a_clear_at_the_start(events: list[object], anew: bool) -> None:
    assert starts_anew(encode_batch(EventBatch(1.0, events, 0))) is anew


def test_a_clear_behind_an_unknown_event_is_not_at_the_start() -> None:
    assert not starts_anew(b"\x93\x01\x92\x91\xa1X\x91\xb0AllBlocksCleared\x00")
    assert starts_anew(b"\x93\x01\x92\x91\xb0AllBlocksCleared\x91\xa1X\x00")


SEQ = (7).to_bytes(8, "big")


@pytest.mark.parametrize(
    ("frames", "snapshot"),
    [
        ([SEQ, ID, b"a", b"b"], Snapshot(7, ID, (b"a", b"b"))),
        ([b"", SEQ, ID], Snapshot(7, ID, ())),
        ([b"\xff" * 8, ID], Snapshot(-1, ID, ())),
        ([b"\xff" * 7 + b"\xfe"], None),
    ],
)
def test_snapshots(frames: list[bytes], snapshot: Snapshot | None) -> None:
    assert parse_snapshot(frames) == snapshot


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "seq"),
        ([b""], "seq"),
        ([b"short"], "seq"),
        ([SEQ], "publisher_id"),
        ([SEQ, b"x"], "publisher_id"),
        ([SEQ, ID, b""], "payload"),
    ],
)
def test_bad_snapshots(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as raised:
        parse_snapshot(frames)
    assert raised.value.field == field
