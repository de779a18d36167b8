"""Announcements of the core turned into events of the wire: where lists of ints first appear.

Only the publisher calls this, off the submit path. The hash form is vLLM's default: the low 64 bits.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.packing import INT32_BYTES, int32_list

LOCAL = "LOCAL"
MAX_BATCH_TOKENS = 1 << 20
"""About 5 MB of payload."""
_LITTLE = sys.byteorder == "little"


def in_batches(announcements: Sequence[Announcement]) -> Iterator[tuple[Announcement, ...]]:
    """The same announcements, in order, in batches of at most about MAX_BATCH_TOKENS tokens and hashes."""
    if sum(map(_weight, announcements)) <= MAX_BATCH_TOKENS:  # as nearly always
        if announcements:
            yield tuple(announcements)
        return
    batch: list[Announcement] = []
    size = 0
    for piece in (piece for item in announcements for piece in _pieces(item)):
        weight = _weight(piece)
        if batch and size + weight > MAX_BATCH_TOKENS:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(piece)
        size += weight
    if batch:
        yield tuple(batch)


def _weight(item: Announcement) -> int:
    """Numbers that its event will hold."""
    if isinstance(item, BlockStoreMeta):
        return len(item.token_ids) // INT32_BYTES + len(item.block_hashes) // item.hash_bytes
    return len(item.block_hashes) if isinstance(item, RemovedRun) else 0


def _pieces(item: Announcement) -> Iterator[Announcement]:
    """Parts of one announcement, none heavier than a batch may be unless it is a single block."""
    if _weight(item) <= MAX_BATCH_TOKENS:
        yield item
    elif isinstance(item, BlockStoreMeta):
        step = max(1, MAX_BATCH_TOKENS // (item.block_size + 1))
        for start in range(0, item.blocks, step):
            yield item.part(start, min(start + step, item.blocks))
    elif isinstance(item, RemovedRun):
        for start in range(0, len(item.block_hashes), MAX_BATCH_TOKENS):
            hashes = item.block_hashes[start : start + MAX_BATCH_TOKENS]
            yield RemovedRun(item.group, item.medium, hashes, item.inner)


def to_event(announcement: Announcement) -> Event:
    """The wire event of one announcement."""
    if isinstance(announcement, BlockStoreMeta):
        return stored_event(announcement)
    return removed_event(announcement) if isinstance(announcement, RemovedRun) else AllBlocksCleared()


def int_hashes(packed: bytes, hash_bytes: int) -> list[int]:
    """Low 64 bits of each hash, as vLLM publishes them: the last 8 bytes, big endian, unsigned."""
    if len(packed) == hash_bytes:
        return [low64(packed)]
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
    group, parent = meta.group, meta.parent_block_hash
    return BlockStored(
        block_hashes=int_hashes(meta.block_hashes, meta.hash_bytes),  # type: ignore[arg-type]
        parent_block_hash=None if parent is None else low64(parent),
        token_ids=int32_list(meta.token_ids),
        block_size=meta.block_size,
        lora_id=meta.lora_id,
        medium=meta.medium,
        lora_name=meta.lora_name,
        extra_keys=meta.extra_keys,
        group_idx=group.index,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.sliding_window,
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
