"""Events as plain JSON values, for people and their tools (`kvevents tail --json`).

Hashes are strings: most JSON readers lose an integer above 2^53. Bytes are hex. Tokens are prompt text in
another alphabet, so they are left out unless asked for.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Final, TypeAlias

import msgspec

from kvevents_service.wire.events import BlockHash, Event
from kvevents_service.wire.tokens import TokenIds

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_MAX_DEPTH: Final = 32
TOO_DEEP: Final = "(nested too deep)"


def hash_text(block_hash: BlockHash) -> str:
    """A hash as people see it: an int in decimal, bytes in hex."""
    return block_hash.hex() if isinstance(block_hash, bytes) else str(block_hash)


def event_to_json(event: Event, *, tokens: bool) -> dict[str, Json]:
    """`type`, then the fields as on the wire: the required ones always, an optional one if it is not None.

    tokens: with True `token_ids` (and `lookahead_token_ids`) as they are; else `token_count`, how many
    token_ids there are, and no token at all. extra_keys become plain: bytes hex, NaN and infinities strings,
    what is nested over 32 levels the text `TOO_DEEP`. Any JSON encoder takes the result. Raises nothing, but with
    True what reading `TokenIds` raises.
    """
    plain: dict[str, Json] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None or name in _required(event):
            plain |= _field(name, value, tokens)
    return plain


def _required(event: Event) -> tuple[str, ...]:
    fields = event.__struct_fields__
    return fields[: len(fields) - len(event.__struct_defaults__)]


def _field(name: str, value: object, tokens: bool) -> dict[str, Json]:
    if name == "token_ids" and not tokens and isinstance(value, list | TokenIds):
        return {"token_count": len(value)}
    if name == "lookahead_token_ids" and not tokens:
        return {}
    if name == "block_hashes" and isinstance(value, list):
        return {name: [hash_text(block_hash) for block_hash in value]}
    if name == "parent_block_hash" and isinstance(value, int | bytes):
        return {name: hash_text(value)}
    return {name: to_plain(value)}


def to_plain(value: object, depth: int = 0) -> Json:
    """Any MessagePack value as JSON: map keys become text, extension types `{"ext": code, "hex": data}`."""
    if isinstance(value, list | tuple | TokenIds):
        return TOO_DEEP if depth >= _MAX_DEPTH else [to_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return TOO_DEEP if depth >= _MAX_DEPTH else _plain_map(value, depth + 1)
    return _plain_scalar(value)


def _plain_map(value: dict[object, object], depth: int) -> Json:
    return {_key(key): to_plain(item, depth) for key, item in value.items()}


def _key(value: object) -> str:
    return value if isinstance(value, str) else str(to_plain(value))


def _plain_scalar(value: object) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return value.hex()
    return _plain_other(value)


def _plain_other(value: object) -> Json:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, msgspec.msgpack.Ext):
        return {"ext": value.code, "hex": bytes(value.data).hex()}
    return f"({type(value).__name__})"
