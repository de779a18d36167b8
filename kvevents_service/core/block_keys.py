"""What a block is called where the engine's hash function is not known: parts of a key that its content makes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from kvevents_service.errors import WireError
from kvevents_service.wire.packing import pack_int32
from kvevents_service.wire.tokens import TokenIds

TOKEN_BYTES: Final = 4


def packed(token_ids: Sequence[int]) -> bytes | None:
    """Token ids as bytes, 4 each; None if they are not ints of 32 bits."""
    try:
        return pack_int32(token_ids.read() if isinstance(token_ids, TokenIds) else token_ids)
    except (OverflowError, TypeError, WireError):
        return None


def root_key(block_size: int, lora_name: str | None) -> int:
    """What stands before the first block."""
    return hash((block_size, lora_name))


def normal_extra(entry: object, lora_name: str | None) -> Hashable:
    """What went into a block's hash beside tokens and adapter; None for nothing. vLLM puts the adapter first."""
    if entry is None:
        return None
    parts = _frozen(entry)
    rest = parts if isinstance(parts, tuple) else (parts,)
    if lora_name is not None and rest[:1] == (lora_name,):
        rest = rest[1:]
    return rest or None


def _frozen(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((_frozen(name), _frozen(part)) for name, part in value.items())
    return value if isinstance(value, Hashable) else repr(value)


def asked_extras(salt: str | None, extra_keys: Sequence[object] | None) -> list[Hashable]:
    extras = [normal_extra(entry, None) for entry in extra_keys or ()]
    if salt is None:
        return extras
    first = extras[0] if extras else None
    return [(*first, salt) if isinstance(first, tuple) else (salt,), *extras[1:]]
