"""What the doubles share: MessagePack as their programs read it, types checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

REQUIRED = {
    "BlockStored": {
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    },
    "BlockRemoved": {"block_hashes", "medium"},
    "AllBlocksCleared": set(),
}
"""The keys that readers of maps insist on."""


class Refused(Exception):
    """The real program throws the whole batch away, or stops reading this publisher."""


class Message(NamedTuple):
    """One live message: its topic, its number and the value of its payload."""

    topic: str
    seq: int
    value: Any


def refuse_unless(condition: object, why: str) -> None:
    if not condition:
        raise Refused(why)


def read(frames: Sequence[bytes]) -> Message:
    """Three frames, the number 8 bytes big endian, the payload one MessagePack value."""
    refuse_unless(len(frames) == 3, f"{len(frames)} frames")
    topic, seq, payload = frames
    refuse_unless(len(seq) == 8, "seq is not 8 bytes")
    try:
        return Message(topic.decode(), int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(str(error)) from None


def is_int(value: object, low: int = -(1 << 63), limit: int = 1 << 64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < limit


def array(value: object, what: str, sizes: Iterable[int] | None = None) -> list[Any]:
    refuse_unless(isinstance(value, list), f"{what} is no array")
    assert isinstance(value, list)
    refuse_unless(sizes is None or len(value) in sizes, f"{what} has {len(value)} elements")
    return value


def as_map(raw: Any, keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """An event of one of these types. An array has its values in the order of `keys`; what is behind is ignored."""
    event = raw
    if isinstance(raw, list):
        refuse_unless(raw and raw[0] in keys, "unknown event")
        event = {"type": raw[0], **dict(zip(keys[raw[0]], raw[1:], strict=False))}
    refuse_unless(isinstance(event, dict) and event.get("type") in keys, "unknown event")
    return dict(event)


def tokens_of(value: object) -> tuple[int, ...]:
    """Unsigned 32-bit token ids."""
    tokens = array(value, "token_ids")
    refuse_unless(all(is_int(token, 0, 1 << 32) for token in tokens), "a token id is not an unsigned 32-bit int")
    return tuple(tokens)


def optional(value: object, cls: type, what: str) -> Any:
    refuse_unless(value is None or (isinstance(value, cls) and not isinstance(value, bool)), f"{what} is odd")
    return value


def chunks(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Whole blocks of tokens."""
    return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size)]


def leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for flag in flags:
        if not flag:
            return count
        count += 1
    return count
