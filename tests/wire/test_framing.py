"""Frames of the engine plane: cut anywhere, read whole; anything else is the one typed error."""

import contextlib
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.errors import WireError
from kvevents_service.testing import make_chain
from kvevents_service.wire.control import LENGTH_BYTES, Hello, Hit, Inspected, Lookup, Residents, Step
from kvevents_service.wire.framing import FrameReader, decode_client, decode_sidecar, encode_message

SECRET = "SECRET-PROMPT"
STEP = Step(1, [make_chain(range(64), 16).offer(range(4), request_id="r-1")], ["done"], ["paused"])
CLIENT = [STEP, Hello(1, "engine", "e"), Lookup(2, "r", bytes(64), 1.5)]
SIDECAR = [Hit(1, 2, 3), Inspected(1, 2, 32, {"blocks": 1}, [Residents("CPU", 0, bytes(32))])]
BODIES = [bytes(encode_message(message)[LENGTH_BYTES:]) for message in [*CLIENT, *SIDECAR]]
STREAM = b"".join(bytes(encode_message(message)) for message in [*CLIENT, *SIDECAR])


def read(reader: FrameReader, data: bytes) -> list[bytes]:
    return list(reader.feed(data))


def decode_anything(body: bytes) -> None:
    """A message, or WireError and nothing else."""
    for decode in (decode_client, decode_sidecar):
        with contextlib.suppress(WireError):
            decode(body)


def test_a_frame_is_its_length_and_its_body() -> None:
    frame = bytes(encode_message(Hit(1, 0)))
    assert frame == b"\x08\0\0\0" + b"\x94\xa3hit\x01\x00\xc0"
    assert read(FrameReader(), frame) == [frame[LENGTH_BYTES:]]


def test_a_stream_read_whole() -> None:
    assert read(FrameReader(), STREAM) == BODIES


def test_a_stream_read_byte_by_byte() -> None:
    reader = FrameReader()
    assert [body for byte in STREAM for body in reader.feed(bytes([byte]))] == BODIES
    assert repr(reader) == f"<FrameReader held=0 limit={reader.limit_bytes}>"


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_a_stream_cut_anywhere(cuts: list[int]) -> None:
    reader, edges = FrameReader(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [body for piece in pieces for body in reader.feed(piece)] == BODIES


@pytest.mark.parametrize("end", range(len(BODIES[1]) + LENGTH_BYTES))
def test_a_truncated_frame_is_waited_for(end: int) -> None:
    frame = bytes(encode_message(CLIENT[1]))
    reader = FrameReader()
    assert read(reader, frame[:end]) == []
    assert read(reader, frame[end:]) == [BODIES[1]]


def test_an_empty_frame_is_a_frame() -> None:
    assert read(FrameReader(), bytes(LENGTH_BYTES)) == [b""]
    with pytest.raises(WireError):
        decode_client(b"")


def test_a_frame_at_the_limit_is_read_and_one_above_it_refused() -> None:
    assert read(FrameReader(8), b"\x08\0\0\0" + bytes(8)) == [bytes(8)]
    with pytest.raises(WireError, match="at most 8 bytes"):
        read(FrameReader(8), b"\x09\0\0\0")


def test_frames_before_an_oversize_one_are_not_lost() -> None:
    reader, bodies = FrameReader(8), []
    with pytest.raises(WireError):
        bodies.extend(iter(reader.feed(b"\x01\0\0\0A\xff\xff\xff\xff")))
    assert bodies == [b"A"]


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_the_typed_error(body: bytes) -> None:
    decode_anything(body)


@pytest.mark.parametrize("body", BODIES)
def test_every_truncation_is_a_message_or_the_typed_error(body: bytes) -> None:
    for end in range(len(body)):
        decode_anything(body[:end])


@pytest.mark.parametrize("body", BODIES)
def test_every_flipped_bit_is_a_message_or_the_typed_error(body: bytes) -> None:
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        decode_anything(bytes(flipped))


@given(st.binary(max_size=60))
def test_random_bytes_in_a_stream_are_frames_or_the_typed_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        for body in FrameReader(1024).feed(data):
            decode_anything(body)


@pytest.mark.parametrize("place", [2, 3, 4])
def test_a_step_of_more_items_than_a_turn_of_the_loop_can_take_is_refused(place: int) -> None:
    elements = ["step", 7, [], [], []]
    elements[place] = [""] * 65537
    with pytest.raises(WireError, match="length <= 65536"):
        decode_client(msgspec.msgpack.encode(elements))


@pytest.mark.parametrize("depth", [10, 500, 10_000, 1_000_000])
def test_deep_nesting_is_a_message_or_the_typed_error(depth: int) -> None:
    keys = msgspec.msgpack.encode(["KEY"]).replace(b"\xa3KEY", b"\x91" * depth + b"\x01")
    offer = msgspec.msgpack.encode(["r", 0, b"", b"", b"", None, None, None])[1:]
    decode_anything(b"\x93\xa4step\x01\x91\x99" + offer + b"\x91" + keys)


@pytest.mark.parametrize(
    "elements",
    [
        ["step", SECRET, []],
        ["step", 1, [["r", 0, b"", b"", b"", None, None, None, [SECRET]]]],
        ["step", 1, [["r", SECRET]]],
        ["lookup", 1, "r", [SECRET]],
        {"type": SECRET},
        SECRET,
        [[SECRET]],
    ],
)
def test_an_error_never_holds_content(elements: object) -> None:
    with pytest.raises(WireError) as caught:
        decode_client(msgspec.msgpack.encode(elements))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_error_never_holds_an_unknown_tag() -> None:
    with pytest.raises(WireError) as caught:
        decode_client(msgspec.msgpack.encode([SECRET, 1]))
    assert SECRET not in str(caught.value)
