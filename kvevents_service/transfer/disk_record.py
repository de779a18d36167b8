"""One entry of the index of a kept disk tier: what is announced of a block, and the checksums of its bytes.

    entry = checksum u64 | generation u64 | stamp u64 | length u32 | record | zeros

Little endian. `checksum` is XXH3, seeded with the slot, of all that follows up to the record's end: an entry that
was written in part, or is in another slot's place, does not pass. `stamp` rises with every entry. The record is
msgpack.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvevents_service.core.metadata import TOKEN_BYTES, BlockStoreMeta
from kvevents_service.transfer.disk_layout import KeptLayout

_HEAD = struct.Struct("<QQQI")
_SUM_BYTES = 8
_NAME_ROOM = 24
"""msgpack's own bytes for one name: its array, lengths, adapter and nils."""
_FREE_ROOM = 192
"""For an adapter's name and the extra keys of a block. What needs more is not kept."""
MAX_ENTRY_BYTES = 64 * 1024
_UNIT_BYTES = 64


class Name(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One hash of a block, with all that is announced of it."""

    block_hash: bytes
    parent: bytes | None
    token_ids: bytes
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[Any] | None


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A full block of a group: its own name, each rank's checksum, and names of prefixes that end inside it."""

    group: int
    name: Name
    sums: tuple[int, ...]
    inner: list[Name] = []


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A record with its age, as read from the index."""

    stamp: int
    record: Record


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def entry_bytes(layout: KeptLayout) -> int:
    """Room for any block of this layout, unless its adapter's name or extra keys are long."""
    longest = max(
        _name_bytes(layout, group.block_size) + _inner_bytes(layout, group.block_size)
        for group in layout.groups
        if group.cacheable
    )
    wanted = _HEAD.size + longest + _FREE_ROOM + len(layout.sizes) * (_SUM_BYTES + 1)
    return min(MAX_ENTRY_BYTES, -(-wanted // _UNIT_BYTES) * _UNIT_BYTES)


def _name_bytes(layout: KeptLayout, tokens: int) -> int:
    return 2 * layout.hash_bytes + tokens * TOKEN_BYTES + _NAME_ROOM


def _inner_bytes(layout: KeptLayout, block_size: int) -> int:
    """A name for every hash unit that ends inside a block."""
    return max(0, block_size // layout.hash_tokens - 1) * _name_bytes(layout, layout.hash_tokens)


def name_of(meta: BlockStoreMeta) -> Name:
    """The name that a snapshot of one block has."""
    extra = meta.extra_keys[0] if meta.extra_keys is not None else None
    extra_keys = None if extra is None else list(extra)
    return Name(meta.block_hashes, meta.parent_block_hash, meta.token_ids, meta.lora_id, meta.lora_name, extra_keys)


def pack(slot: int, generation: int, entry: Entry, room: int) -> bytes | None:
    """The entry in `room` bytes; None if it needs more, or has what msgpack cannot say."""
    try:
        body = _encode(entry.record)
    except (OverflowError, TypeError, ValueError):
        return None
    if _HEAD.size + len(body) > room:
        return None
    packed = bytearray(room)
    _HEAD.pack_into(packed, 0, 0, generation, entry.stamp, len(body))
    packed[_HEAD.size : _HEAD.size + len(body)] = body
    struct.pack_into("<Q", packed, 0, _checksum(packed, len(body), slot))
    return bytes(packed)


def unpack(slot: int, generation: int, packed: memoryview) -> Entry | None:
    """The entry, or None if there is none: never written, written in part, or of another generation."""
    checksum, its_generation, stamp, length = _HEAD.unpack_from(packed)
    if its_generation != generation or _HEAD.size + length > len(packed):
        return None
    if checksum != _checksum(packed, length, slot):
        return None
    try:
        return Entry(stamp, _decode(packed[_HEAD.size : _HEAD.size + length]))
    except msgspec.MsgspecError:
        return None


def _checksum(packed: bytearray | memoryview, length: int, slot: int) -> int:
    return xxh3_64_intdigest(memoryview(packed)[_SUM_BYTES : _HEAD.size + length], seed=slot)
