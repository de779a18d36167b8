"""Frames: what is sent is what is parsed, both replay framings, and one typed error for the rest."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_vectors import ALL, CAPTURED

from kvevents_service.errors import WireError
from kvevents_service.wire.frames import (
    REPLAY_END,
    LiveFrame,
    live_frames,
    parse_live,
    parse_replay_reply,
    parse_replay_request,
    replay_reply,
    replay_request,
)

SEQ_7 = bytes(7) + b"\x07"
MINUS_1 = b"\xff" * 8
REPLAYED = [vector for vector in ALL if "replay" in vector.id]
EDGES = [0, 1, 2**32, 2**63 - 1]
OUTSIDE = [-1, 2**63, 2**64]


@pytest.mark.parametrize("vector", CAPTURED, ids=lambda vector: vector.id)
def test_live_frames_of_the_engine(vector) -> None:
    live = parse_live(vector.frames)
    assert live == (vector.frames[0], int(vector.frames[1].hex(), 16), vector.payload)
    assert live_frames(*live) == vector.frames


@pytest.mark.parametrize("vector", REPLAYED, ids=lambda vector: vector.id)
def test_replay_frames_of_the_engine(vector) -> None:
    live = parse_replay_reply(vector.frames)
    assert (REPLAY_END if live is None else replay_reply(*live)) == vector.frames


def test_the_recorded_replay_ends_once_and_last() -> None:
    replies = [parse_replay_reply(vector.frames) for vector in REPLAYED]
    assert [reply and reply.seq for reply in replies] == [2, 3, 4, 5, 6, None]


@pytest.mark.parametrize("seq", EDGES)
def test_a_sequence_at_the_edge(seq: int) -> None:
    live = LiveFrame(b"kv", seq, b"x")
    assert parse_live(live_frames(*live)) == live
    assert parse_replay_reply(replay_reply(*live)) == live
    assert parse_replay_request(replay_request(seq)) == seq


@pytest.mark.parametrize("seq", OUTSIDE)
@pytest.mark.parametrize(
    "send",
    [replay_request, lambda seq: live_frames(b"", seq, b"x"), lambda seq: replay_reply(b"", seq, b"x")],
)
def test_a_sequence_outside_is_not_sent(send, seq: int) -> None:
    with pytest.raises(WireError) as caught:
        send(seq)
    assert caught.value.field == "seq"


def test_an_empty_payload_is_not_sent() -> None:
    with pytest.raises(WireError) as caught:
        live_frames(b"kv", 0, b"")
    assert caught.value.field == "payload"


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "frames"),
        ([b"t"], "frames"),
        ([b"t", SEQ_7], "frames"),
        ([b"t", SEQ_7, b"x", b""], "frames"),
        ([b"t", SEQ_7[1:], b"x"], "seq"),
        ([b"t", SEQ_7 + b"\0", b"x"], "seq"),
        ([b"t", b"", b"x"], "seq"),
        ([b"t", MINUS_1, b"x"], "seq"),
        ([b"t", b"\x80" + bytes(7), b"x"], "seq"),
        ([b"t", SEQ_7, b""], "payload"),
    ],
)
def test_a_live_message_that_is_none(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        parse_live(frames)
    assert caught.value.field == field


@pytest.mark.parametrize("frames", [[b"", SEQ_7], [SEQ_7]])
def test_a_request_with_and_without_delimiter(frames: list[bytes]) -> None:
    assert parse_replay_request(frames) == 7


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "frames"),
        ([b""], "seq"),
        ([b"", b""], "seq"),
        ([b"x", SEQ_7], "frames"),
        ([b"", SEQ_7, b""], "frames"),
        ([b"", SEQ_7[1:]], "seq"),
        ([MINUS_1], "seq"),
    ],
)
def test_a_request_that_is_none(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        parse_replay_request(frames)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("frames", "topic"),
    [
        ([b"", b"kv", SEQ_7, b"x"], b"kv"),
        ([b"kv", SEQ_7, b"x"], b"kv"),
        ([b"", b"", SEQ_7, b"x"], b""),
        ([b"", SEQ_7, b"x"], b""),
        ([SEQ_7, b"x"], b""),
    ],
)
def test_both_reply_framings(frames: list[bytes], topic: bytes) -> None:
    assert parse_replay_reply(frames) == LiveFrame(topic, 7, b"x")


@pytest.mark.parametrize(
    "frames", [REPLAY_END, REPLAY_END[1:], [b"", MINUS_1, b""], [MINUS_1, b""], [b"", b"kv", MINUS_1, b""]]
)
def test_the_end_marker_in_both_framings(frames: list[bytes]) -> None:
    assert parse_replay_reply(frames) is None


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "frames"),
        ([b""], "frames"),
        ([b"id", b"kv", SEQ_7, b"x"], "frames"),
        ([b"", b"", b"kv", SEQ_7, b"x"], "frames"),
        ([b"", b"kv", MINUS_1, b"x"], "seq"),
        ([b"", b"kv", b"\xff" * 7 + b"\xfe", b""], "seq"),
        ([b"", b"kv", b"\xff" * 7, b""], "seq"),
        ([b"", b"kv", SEQ_7, b""], "payload"),
    ],
)
def test_a_reply_that_is_none(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        parse_replay_reply(frames)
    assert caught.value.field == field


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_any_frames_are_parsed_or_refused(frames: list[bytes]) -> None:
    for parse in (parse_live, parse_replay_request, parse_replay_reply):
        with contextlib.suppress(WireError):
            parse(frames)
