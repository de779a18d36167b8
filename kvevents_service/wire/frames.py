"""The ZeroMQ frames around a payload: live messages, replay requests and replay replies.

Source: vLLM 0.33 (`ZmqEventPublisher`) and, for replies without a topic frame, vLLM before 0.26. A sequence
number is 8 bytes, big endian; those of batches are in [0, 2^63). Frames are not copied and payloads not
looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvevents_service.errors import WireError

SEQ_BYTES: Final = 8
END_SEQ: Final = -1
_SEQ_LIMIT: Final = 2**63

REPLAY_END: Final[list[bytes]] = [b"", b"", END_SEQ.to_bytes(SEQ_BYTES, "big", signed=True), b""]
"""The last reply to every replay request, as a DEALER receives it. Do not change it in place."""

SNAPSHOT_REQUEST: Final = b"snapshot"
SNAPSHOT_EMPTY: Final = -1
"""In place of a number: nothing was numbered so far."""
SNAPSHOT_UNAVAILABLE: Final = -2
PUBLISHER_ID_BYTES: Final = 16


Payload: TypeAlias = bytes | memoryview
"""Of a batch that is sent: a state's lie side by side in larger memory."""


class LiveFrame(NamedTuple):
    """One message: topic (any bytes), seq in [0, 2^63), payload (for `codec.decode_batch`, never empty)."""

    topic: bytes
    seq: int
    payload: bytes


class SnapshotReply(NamedTuple):
    """The state after batch `seq`: the fold of `payloads`, in order. seq -1: no batch yet; < -1: unavailable."""

    seq: int
    publisher_id: bytes
    payloads: list[bytes]


def live_frames(topic: bytes, seq: int, payload: Payload) -> list[Payload]:
    """The three frames a PUB socket sends. Raises WireError for a seq out of range or an empty payload."""
    if not payload:
        raise WireError("payload", "at least one byte")
    return [topic, _pack_seq(seq), payload]


def parse_live(frames: Sequence[bytes]) -> LiveFrame:
    """The three frames a SUB socket receives. Raises WireError with field frames, seq or payload."""
    if len(frames) != 3:
        raise WireError("frames", "3 frames: topic, seq, payload")
    topic, seq_frame, payload = frames
    seq = _unpack_batch_seq(seq_frame)
    if not payload:
        raise WireError("payload", "at least one byte")
    return LiveFrame(topic, seq, payload)


def replay_request(start: int) -> list[bytes]:
    """What a DEALER sends to get all batches from sequence `start` on. Raises WireError if it is out of
    range."""
    return [b"", _pack_seq(start)]


def parse_replay_request(frames: Sequence[bytes]) -> int:
    """The start asked for; `frames` follow the ROUTER's identity, with the empty delimiter or without it.

    Raises WireError with field frames or seq.
    """
    body = frames[1:] if len(frames) == 2 and not frames[0] else frames
    if len(body) != 1:
        raise WireError("frames", "1 frame: seq, after an optional empty one")
    return _unpack_batch_seq(body[0])


def replay_reply(topic: bytes, seq: int, payload: Payload) -> list[Payload]:
    """One replayed batch as a DEALER receives it (a ROUTER puts the identity before). Raises as
    `live_frames`."""
    return [b"", *live_frames(topic, seq, payload)]


def parse_replay_reply(frames: Sequence[bytes]) -> LiveFrame | None:
    """One replayed batch, or None at the end marker.

    Takes `[b"", topic, seq, payload]` and, from vLLM before 0.26, `[b"", seq, payload]` (topic is then b""),
    both also without the delimiter. Raises WireError with field frames, seq or payload.
    """
    live = _with_topic(frames)
    if len(live[1]) == SEQ_BYTES and _unpack(live[1]) == END_SEQ and not live[2]:
        return None
    return parse_live(live)


def snapshot_reply(seq: int, publisher_id: bytes, payloads: Sequence[Payload]) -> list[Payload]:
    """What a REQ receives for `SNAPSHOT_REQUEST`. seq in [-2^63, 2^63)."""
    return [seq.to_bytes(SEQ_BYTES, "big", signed=True), publisher_id, *payloads]


def parse_snapshot_reply(frames: Sequence[bytes]) -> SnapshotReply:
    """The frames a REQ receives. Raises WireError with field frames, seq or publisher_id."""
    if len(frames) < 2:
        raise WireError("frames", "a number, a publisher id, then payloads")
    seq, publisher_id, *payloads = frames
    if len(seq) != SEQ_BYTES:
        raise WireError("seq", f"{SEQ_BYTES} bytes")
    if len(publisher_id) != PUBLISHER_ID_BYTES:
        raise WireError("publisher_id", f"{PUBLISHER_ID_BYTES} bytes")
    return SnapshotReply(_unpack(seq), publisher_id, payloads)


def _with_topic(frames: Sequence[bytes]) -> Sequence[bytes]:
    # Three frames are [topic, seq, payload] or [delimiter, seq, payload]: an empty delimiter is an empty
    # topic.
    if len(frames) == 4 and not frames[0]:
        return frames[1:]
    if len(frames) == 2:
        return [b"", *frames]
    if len(frames) == 3:
        return frames
    raise WireError("frames", "an empty frame, then topic, seq, payload")


def _pack_seq(seq: int) -> bytes:
    if not 0 <= seq < _SEQ_LIMIT:
        raise WireError("seq", "a number in [0, 2^63)")
    return seq.to_bytes(SEQ_BYTES, "big")


def _unpack(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


def _unpack_batch_seq(frame: bytes) -> int:
    if len(frame) != SEQ_BYTES:
        raise WireError("seq", f"{SEQ_BYTES} bytes")
    seq = _unpack(frame)
    if seq < 0:
        raise WireError("seq", "a number in [0, 2^63)")
    return seq
