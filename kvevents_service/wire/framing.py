"""Length-prefixed msgpack frames of the engine protocol: bytes <-> messages, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents_service.errors import WireError
from kvevents_service.wire.control import LENGTH_BYTES, MAX_FRAME_BYTES, ClientMessage, SidecarMessage


class _Head(msgspec.Struct, array_like=True):
    """How a message with an id begins. What follows is skipped, not made into objects."""

    tag: str
    number: int


_TAGS_WITH_ID: Final = ("step", "lookup", "load", "reset", "inspect")
_HEAD: Final = msgspec.msgpack.Decoder(_Head)
_ENCODER: Final = msgspec.msgpack.Encoder()
_CLIENT: Final = msgspec.msgpack.Decoder(ClientMessage)
_SIDECAR: Final = msgspec.msgpack.Decoder(SidecarMessage)


def encode_message(message: msgspec.Struct) -> bytearray:
    """One frame, length prefix included."""
    frame = bytearray(LENGTH_BYTES)
    _ENCODER.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return frame


def decode_client(body: bytes | memoryview) -> ClientMessage:
    """A message of an engine. Raises WireError; the text names the place and never holds content."""
    return _decode(_CLIENT, body)  # type: ignore[no-any-return]


def decode_sidecar(body: bytes | memoryview) -> SidecarMessage:
    """A message of the sidecar. Raises WireError."""
    return _decode(_SIDECAR, body)  # type: ignore[no-any-return]


def _decode(decoder: Any, body: bytes | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise WireError("message", f"a message of the engine protocol{_what(error)}") from None
    except (ValueError, RecursionError, OverflowError, TypeError):
        raise WireError("message", "one msgpack value") from None


def peek_id(body: bytes | memoryview) -> int | None:
    """The id of a step, call or load that could not be understood whole, if it can be read: its second element."""
    try:
        head = _HEAD.decode(body)
    except (ValueError, RecursionError, OverflowError, TypeError):
        return None
    return head.number if head.tag in _TAGS_WITH_ID and -(2**63) <= head.number < 2**63 else None


def _what(error: msgspec.ValidationError) -> str:
    """What msgspec found, unless it quotes the content (an unknown tag, an unknown choice)."""
    text = str(error)
    return "" if text.startswith("Invalid value") else f" ({text})"


class FrameReader:
    """Cuts a byte stream into frame bodies. Holds at most one frame of `limit_bytes` plus one read."""

    __slots__ = ("_buffer", "limit_bytes")

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"<FrameReader held={len(self._buffer)} limit={self.limit_bytes}>"

    def feed(self, data: bytes) -> Iterator[bytes | memoryview]:
        """Frame bodies that `data` completes. Raises WireError when a frame announces more than the limit.

        After that error the stream has no known frame border any more: close it.
        """
        buffer = self._buffer
        if (
            not buffer
            and int.from_bytes(data[:LENGTH_BYTES], "little") == len(data) - LENGTH_BYTES <= self.limit_bytes
        ):
            yield memoryview(data)[LENGTH_BYTES:]  # one whole frame, as nearly always: no copy
            return
        buffer += data
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little")
            if end - LENGTH_BYTES > self.limit_bytes:
                raise WireError("length", f"at most {self.limit_bytes} bytes in a frame")
            if len(buffer) < end:
                return
            body = bytes(memoryview(buffer)[LENGTH_BYTES:end])
            del buffer[:end]
            yield body
