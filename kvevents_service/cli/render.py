"""An event stream as lines: for people (`HumanLines`) and for programs (`JsonLines`). Pure; no line has an end.

What a peer sent never reaches a terminal as it is: human lines show control and invisible characters as escapes,
JSON lines are ASCII.
"""

from __future__ import annotations

import json
from datetime import datetime, tzinfo
from typing import Final, NamedTuple, Protocol

from kvevents_service.subscriber import Back, Gap, Restart, Resync, Stale, Undecodable
from kvevents_service.wire.codec import Skipped
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvevents_service.wire.jsonform import Json, event_to_json, to_plain
from kvevents_service.wire.media import canonical_medium

MAX_TEXT_CHARS: Final = 80
RED, GREEN, YELLOW, DIM = "31", "32", "33", "2"
_MASK64: Final = (1 << 64) - 1
_NO_TIME: Final = "--:--:--.---"


class Look(NamedTuple):
    """How lines look. zone: of the time of day, None for this machine's."""

    color: bool = False
    tokens: bool = False
    full_hashes: bool = False
    zone: tzinfo | None = None


class Origin(NamedTuple):
    """The batch an event is from. ts: seconds since the epoch, as the peer said: any float."""

    seq: int
    ts: float
    topic: bytes
    dp_rank: int | None


class Invalid(NamedTuple):
    """A line of a recording that is no message. `note` is the recorder's."""

    line: int
    note: str
    field: str
    expected: str


class Lines(Protocol):
    """One line for each thing that a stream or a recording may hold."""

    look: Look

    def event(self, origin: Origin, event: Event) -> str: ...
    def skipped(self, origin: Origin, skipped: Skipped) -> str: ...
    def gap(self, gap: Gap) -> str: ...
    def restart(self, restart: Restart) -> str: ...
    def resync(self, resync: Resync) -> str: ...
    def stale(self, stale: Stale) -> str: ...
    def back(self, back: Back) -> str: ...
    def undecodable(self, message: Undecodable) -> str: ...
    def replay_end(self) -> str: ...
    def invalid(self, invalid: Invalid) -> str | None: ...


class HumanLines:
    """Aligned columns: time, number, what, where, how much, hashes. An `Invalid` has none: it goes to stderr."""

    def __init__(self, look: Look | None = None) -> None:
        self.look = look or Look()

    def event(self, origin: Origin, event: Event) -> str:
        match event:
            case BlockStored():
                return self._line(origin, "stored", GREEN, self._stored(event))
            case BlockRemoved():
                return self._line(origin, "removed", YELLOW, self._blocks(event))
            case AllBlocksCleared():
                return self._line(origin, "cleared", RED, "all tiers")

    def skipped(self, origin: Origin, skipped: Skipped) -> str:
        what = self._line(origin, "skipped", "", f"{escape(skipped.type)} ({skipped.reason})")
        return self._paint(DIM, what)

    def gap(self, gap: Gap) -> str:
        missing = gap.got - gap.expected
        if not missing:
            return self._paint(RED, f"gap: the state told before #{gap.got} is not whole")
        which = f"{gap.expected}..{gap.got - 1}" if missing > 1 else f"{gap.expected}"
        return self._paint(RED, f"gap: {plural(missing, 'batch', 'batches')} missing ({which})")

    def restart(self, restart: Restart) -> str:
        return self._paint(RED, f"restart: the publisher began anew (#{restart.last}, then #{restart.seq})")

    def resync(self, resync: Resync) -> str:
        return self._paint(
            YELLOW, f"resync: the whole state comes anew (#{resync.got}, expected #{resync.expected})"
        )

    def stale(self, stale: Stale) -> str:
        return self._paint(RED, f"stale: nothing came for {stale.silent_s:.1f} s")

    def back(self, back: Back) -> str:
        return self._paint(DIM, "back: messages come again")

    def undecodable(self, message: Undecodable) -> str:
        number = "" if message.seq is None else f" #{message.seq}"
        return self._paint(RED, f"undecodable:{number} {message.error}")

    def replay_end(self) -> str:
        return self._paint(DIM, "replay end")

    def invalid(self, invalid: Invalid) -> str | None:
        return None

    def _line(self, origin: Origin, verb: str, color: str, rest: str) -> str:
        number = f"#{origin.seq}"
        time = clock_time(origin.ts, self.look.zone)
        return f"{time} {number:<6} {self._paint(color, f'{verb:<7}')}  {rest}".rstrip()

    def _stored(self, event: BlockStored) -> str:
        parts = [self._blocks(event)]
        if event.parent_block_hash is not None:
            parts.append(f"parent {self._hash(event.parent_block_hash)}")
        parts.append(plural(len(event.token_ids), "token"))
        if event.lora_name is not None:
            parts.append(f"lora={escape(event.lora_name)}")
        if self.look.tokens:
            parts.append(f"tokens={','.join(map(str, event.token_ids))}")
        return "  ".join(parts)

    def _blocks(self, event: BlockStored | BlockRemoved) -> str:
        medium = escape(canonical_medium(event.medium))
        count = plural(len(event.block_hashes), "block")
        return f"{medium:<7} g{event.group_idx or 0:<2} {count:>11}  {self._hashes(event.block_hashes)}"

    def _hashes(self, hashes: list[BlockHash]) -> str:
        if self.look.full_hashes:
            return ",".join(map(self._hash, hashes))
        ends = hashes[:1] + hashes[1:][-1:]
        return f"{'..'.join(map(self._hash, ends)):<18}"

    def _hash(self, block_hash: BlockHash) -> str:
        return full_hash(block_hash) if self.look.full_hashes else short_hash(block_hash)

    def _paint(self, color: str, text: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self.look.color and color else text


class JsonLines:
    """One object a line. An event has seq, ts, topic and dp_rank, then what `event_to_json` says of it."""

    def __init__(self, look: Look | None = None) -> None:
        self.look = look or Look()

    def event(self, origin: Origin, event: Event) -> str:
        return _dump({**_origin(origin), **event_to_json(event, tokens=self.look.tokens)})

    def skipped(self, origin: Origin, skipped: Skipped) -> str:
        what: dict[str, Json] = {"event_type": skipped.type, "reason": skipped.reason}
        return _dump({**_origin(origin), "type": "Skipped", **what})

    def gap(self, gap: Gap) -> str:
        return _dump({"type": "Gap", "expected": gap.expected, "got": gap.got})

    def restart(self, restart: Restart) -> str:
        return _dump({"type": "Restart", "last": restart.last, "seq": restart.seq})

    def resync(self, resync: Resync) -> str:
        return _dump({"type": "Resync", "expected": resync.expected, "got": resync.got})

    def stale(self, stale: Stale) -> str:
        return _dump({"type": "Stale", "silent_s": stale.silent_s})

    def back(self, back: Back) -> str:
        return _dump({"type": "Back"})

    def undecodable(self, message: Undecodable) -> str:
        where: dict[str, Json] = {"seq": message.seq, "topic": topic_text(message.topic)}
        error = message.error
        return _dump({"type": "Undecodable", **where, "field": error.field, "expected": error.expected})

    def replay_end(self) -> str:
        return _dump({"type": "ReplayEnd"})

    def invalid(self, invalid: Invalid) -> str | None:
        return _dump({"type": "Invalid", **invalid._asdict()})


def _origin(origin: Origin) -> dict[str, Json]:
    where: dict[str, Json] = {"seq": origin.seq, "ts": to_plain(origin.ts), "topic": topic_text(origin.topic)}
    return {**where, "dp_rank": origin.dp_rank}


def _dump(plain: dict[str, Json]) -> str:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def escape(text: str) -> str:
    """Text of a peer, safe for a terminal and on one line, at most `MAX_TEXT_CHARS` characters of it."""
    shown = text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def topic_text(topic: bytes) -> str:
    """A topic as text; bytes that are not UTF-8 as escapes."""
    return topic.decode(errors="backslashreplace")


def clock_time(ts: float, zone: tzinfo | None = None) -> str:
    """Time of day to the millisecond, dashes for what is no time."""
    try:
        return datetime.fromtimestamp(ts, zone).strftime("%H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return _NO_TIME


def full_hash(block_hash: BlockHash) -> str:
    """A hash in hex: bytes whole, an int as 16 digits, equal for its signed and unsigned form."""
    return block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash & _MASK64:016x}"


def short_hash(block_hash: BlockHash) -> str:
    """The upper half of a hash's low 64 bits: 8 digits, the same for every form of one hash."""
    return full_hash(block_hash)[-16:][:8]


def plural(count: int, noun: str, nouns: str = "") -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
