"""Announcements of the core turned into events of the wire: where lists of ints first appear.

Only the publisher calls this, off the submit path. The hash form is vLLM's default: the low 64 bits.
"""

from __future__ import annotations

import sys
from array import array

from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.packing import unpack_int32

LOCAL = "LOCAL"
_LITTLE = sys.byteorder == "little"


def to_event(announcement: Announcement) -> Event:
    """The wire event of one announcement."""
    match announcement:
        case BlockStoreMeta():
            return stored_event(announcement)
        case RemovedRun():
            return removed_event(announcement)
        case _:
            return AllBlocksCleared()


def int_hashes(packed: bytes, hash_bytes: int) -> list[int]:
    """Low 64 bits of each hash, as vLLM publishes them: the last 8 bytes, big endian, unsigned."""
    if hash_bytes % 8:
        return [
            int.from_bytes(packed[end - 8 : end], "big") for end in range(hash_bytes, len(packed) + 1, hash_bytes)
        ]
    words = array("Q", packed)
    words = words[hash_bytes // 8 - 1 :: hash_bytes // 8]
    if _LITTLE:
        words.byteswap()
    return words.tolist()


def low64(block_hash: bytes) -> int:
    """Low 64 bits of one hash."""
    return int.from_bytes(block_hash[-8:], "big")


def stored_event(meta: BlockStoreMeta) -> BlockStored:
    """The announcement of a run, in vLLM 0.33's terms: one event, many hashes."""
    return BlockStored(
        block_hashes=int_hashes(meta.block_hashes, meta.hash_bytes),  # type: ignore[arg-type]
        parent_block_hash=None if meta.parent_block_hash is None else low64(meta.parent_block_hash),
        token_ids=unpack_int32(meta.token_ids).tolist(),
        block_size=meta.group.block_size,
        lora_id=meta.lora_id,
        medium=meta.medium,
        lora_name=meta.lora_name,
        extra_keys=meta.extra_keys,
        group_idx=meta.group.index,
        kv_cache_spec_kind=meta.group.kind,
        kv_cache_spec_sliding_window=meta.group.sliding_window,
        locality=LOCAL,
    )


def removed_event(run: RemovedRun) -> BlockRemoved:
    """The announcement that blocks left a tier."""
    return BlockRemoved(
        block_hashes=int_hashes(b"".join(run.block_hashes), len(run.block_hashes[0])),  # type: ignore[arg-type]
        medium=run.medium,
        group_idx=run.group.index,
        locality=LOCAL,
    )
