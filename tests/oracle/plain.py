"""Events as plain JSON, the same for vLLM's structs and for ours: their attributes have the same names.

Imports nothing, because the vLLM side runs in another virtual environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def plain_event(event: Any) -> dict[str, Any]:
    """One event. Hashes are the 16 hex digits of their low 64 bits, digests among extra keys are hex."""
    name = type(event).__name__
    if name == "BlockStored":
        return {"type": name, "hashes": _hashes(event.block_hashes), **_place(event), **_metadata(event)}
    if name == "BlockRemoved":
        return {"type": name, "hashes": _hashes(event.block_hashes), **_place(event)}
    return {"type": name}


def plain_key(value: Any) -> Any:
    """An extra key, however deep: tuples are lists, bytes are hex."""
    if isinstance(value, list | tuple):
        return [plain_key(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def hex64(block_hash: int | bytes) -> str:
    """The low 64 bits of a hash."""
    if isinstance(block_hash, bytes):
        return block_hash[-8:].hex()
    return f"{block_hash % 2**64:016x}"


def _hashes(values: Iterable[int | bytes]) -> list[str]:
    return [hex64(value) for value in values]


def _place(event: Any) -> dict[str, Any]:
    return {"medium": event.medium, "group": event.group_idx, "locality": event.locality}


def _metadata(event: Any) -> dict[str, Any]:
    parent = event.parent_block_hash
    return {
        "parent": None if parent is None else hex64(parent),
        "tokens": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": event.lora_id,
        "lora_name": event.lora_name,
        "extra_keys": plain_key(event.extra_keys),
        "kind": event.kv_cache_spec_kind,
        "window": event.kv_cache_spec_sliding_window,
    }
