"""Recorded messages: one JSON object a line, its `frames` in hex, as in proto/vectors.

Three frames are a live message, four a replay reply as a DEALER receives it. A line without `frames` is a
header that tells where the recording is from. `source` names the publisher where there are several; other keys
(`note`, `decoded`, ...) are for people and tests.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvevents_service.errors import WireError
from kvevents_service.wire.frames import LiveFrame, parse_live, parse_replay_reply

_FOREIGN: Final = (ValueError, TypeError, RecursionError)


class Recorded(NamedTuple):
    """One recorded message: what the recorder noted ("" if nothing), and the message; None is a replay's
    end. source: the label of the publisher, "" where the recorder had one. replayed: it is a replay's."""

    note: str
    live: LiveFrame | None
    source: str = ""
    replayed: bool = False


class _Line(msgspec.Struct, gc=False):
    note: str = ""
    frames: list[str] | None = None
    source: str = ""


_decoder: Final = msgspec.json.Decoder(_Line)


def parse_recorded_line(line: str) -> Recorded | None:
    """The message on a line; None for a blank line or a header.

    Raises WireError: field "line" for what is not such a JSON object, "frames" or "frames[1]" for frames that
    are not hex or not three or four, "seq" and "payload" as in `frames`. The payload itself is not decoded.
    """
    if not line.strip():
        return None
    recorded = _read(line)
    if recorded.frames is None:
        return None
    live = _parse([_unhex(text, i) for i, text in enumerate(recorded.frames)])
    return Recorded(recorded.note, live, recorded.source, len(recorded.frames) == 4)


def _read(line: str) -> _Line:
    try:
        return _decoder.decode(line)
    except _FOREIGN:
        raise WireError("line", "a JSON object with `frames`, a list of strings") from None


def _unhex(text: str, index: int) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise WireError(f"frames[{index}]", "hex digits") from None


def _parse(frames: list[bytes]) -> LiveFrame | None:
    if len(frames) == 3:
        return parse_live(frames)
    if len(frames) == 4:
        return parse_replay_reply(frames)
    raise WireError("frames", "3 frames (live) or 4 (replay reply)")
