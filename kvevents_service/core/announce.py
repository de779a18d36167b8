"""Announcements of the core turned into batches of the wire, in any dialect: where lists of ints first appear.

Only the publisher calls this, off the submit path. How the announcements are split into batches is the same for
every dialect, and a batch of which a dialect lets nothing through is an empty one: all have the same numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kvevents_service.core.groups import WINDOW_KINDS
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.wire.codec import encode_own
from kvevents_service.wire.dialects import VLLM, Dialect, Groups
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.extra_keys import plain_extra_keys
from kvevents_service.wire.hashes import hash_in, hashes_in
from kvevents_service.wire.packing import INT32_BYTES, int32_list
from kvevents_service.wire.shapes import shape_of

LOCAL = "LOCAL"
_OF_BLOCKS = (BlockStoreMeta, RemovedRun)  # a union would be made anew for each look
MAX_BATCH_TOKENS = 1 << 20
"""About 5 MB of payload."""
MAX_BATCH_EVENTS = 4096
"""vllm-router refuses a batch of more."""
EVENT_WEIGHT = 16
"""What a block costs beside its tokens, if it is an event of its own: no dialect makes a batch too large."""
NAME_LETTERS = 8
"""So many letters of an adapter's name weigh as much as a token."""


def in_batches(announcements: Sequence[Announcement]) -> Iterator[tuple[Announcement, ...]]:
    """The same announcements, in order, in batches of at most about MAX_BATCH_TOKENS tokens and hashes, and of at
    most MAX_BATCH_EVENTS."""
    few = len(announcements) <= MAX_BATCH_EVENTS
    if few and sum(map(_weight, announcements)) <= MAX_BATCH_TOKENS:  # as nearly always
        if announcements:
            yield tuple(announcements)
        return
    batch: list[Announcement] = []
    size = 0
    for piece in (piece for item in announcements for piece in _pieces(item)):
        weight = _weight(piece)
        if batch and (size + weight > MAX_BATCH_TOKENS or len(batch) == MAX_BATCH_EVENTS):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(piece)
        size += weight
    if batch:
        yield tuple(batch)


def _weight(item: Announcement) -> int:
    """Numbers that its events will hold at most, the maps around them included."""
    if isinstance(item, BlockStoreMeta):
        blocks = len(item.block_hashes) // item.hash_bytes
        return len(item.token_ids) // INT32_BYTES + blocks * _event_weight(item)
    return len(item.block_hashes) * EVENT_WEIGHT if isinstance(item, RemovedRun) else 0


def _event_weight(item: BlockStoreMeta) -> int:
    return EVENT_WEIGHT + len(item.lora_name or "") // NAME_LETTERS


def _pieces(item: Announcement) -> Iterator[Announcement]:
    """Parts of one announcement, none heavier than a batch may be unless it is a single block."""
    if _weight(item) <= MAX_BATCH_TOKENS:
        yield item
    elif isinstance(item, BlockStoreMeta):
        step = max(1, MAX_BATCH_TOKENS // (item.block_size + _event_weight(item)))
        for start in range(0, item.blocks, step):
            yield item.part(start, min(start + step, item.blocks))
    elif isinstance(item, RemovedRun):
        step = MAX_BATCH_TOKENS // EVENT_WEIGHT
        for start in range(0, len(item.block_hashes), step):
            yield RemovedRun(item.group, item.medium, item.block_hashes[start : start + step], item.inner)


def encode(
    dialect: Dialect,
    announcements: Sequence[Announcement],
    ts: float,
    dp_rank: int,
    publisher_id: bytes | None = None,
) -> bytes:
    """The payload of one batch in a dialect. The publisher id goes only into dialects that have a place for it.

    Raises WireError if it is too big, and nothing else for announcements made of messages that engines sent.
    """
    events = [event for item in announcements for event in events_of(dialect, item)]
    sender = publisher_id if dialect.publisher_id else None
    return encode_own(EventBatch(ts, events, dp_rank, sender))  # type: ignore[arg-type]


def encoding_key(dialect: Dialect) -> Hashable:
    """Equal for dialects that write the same bytes, given the same rank and publisher id."""
    return msgspec.structs.replace(dialect, name="", readers="")


def to_event(announcement: Announcement) -> Event:
    """The event of one announcement in the terms of vLLM 0.33."""
    if isinstance(announcement, BlockStoreMeta):
        return stored_event(announcement)
    return removed_event(announcement) if isinstance(announcement, RemovedRun) else AllBlocksCleared()


def stored_event(meta: BlockStoreMeta) -> BlockStored:
    """The announcement of a run, in vLLM 0.33's terms: one event, many hashes."""
    return BlockStored(*stored_values(VLLM, meta, meta.medium, *_lists(VLLM, meta)))


def removed_event(run: RemovedRun) -> BlockRemoved:
    """The announcement that blocks left a tier."""
    return BlockRemoved(*_removed_values(VLLM, run, run.medium))


def events_of(dialect: Dialect, item: Announcement) -> Iterable[msgspec.Struct]:
    """What a dialect says of one announcement: one event, one for each block, or none."""
    shape = shape_of(dialect)
    if not isinstance(item, _OF_BLOCKS):
        return (shape.cleared,)
    medium = let_through(dialect, item)
    if medium is None:
        return ()
    if isinstance(item, BlockStoreMeta):
        stored = stored_values(dialect, item, medium, *_lists(dialect, item))
        return map(shape.stored, _stored_one_by_one(stored)) if dialect.one_hash else (shape.stored(stored),)
    removed = _removed_values(dialect, item, medium)
    return map(shape.removed, _removed_one_by_one(removed)) if dialect.one_hash else (shape.removed(removed),)


def let_through(dialect: Dialect, item: BlockStoreMeta | RemovedRun) -> str | None:
    """The name of the item's medium in this dialect; None if the item is filtered out."""
    if (item.inner and not dialect.inner) or (dialect.groups is Groups.MAIN and not item.group.main):
        return None
    return dialect.medium(item.medium)


def _lists(dialect: Dialect, meta: BlockStoreMeta) -> tuple[list[BlockHash], list[int]]:
    """Its hashes and its tokens."""
    tokens = int32_list(meta.token_ids) if dialect.tokens else []
    return hashes_in(dialect.hashes, meta.block_hashes, meta.hash_bytes), tokens


def stored_values(dialect: Dialect, meta: BlockStoreMeta, medium: str, hashes: Any, tokens: Any) -> tuple[Any, ...]:
    """A value for each of STORED_KEYS."""
    parent, group = meta.parent_block_hash, meta.group
    return (
        hashes,
        None if parent is None else hash_in(dialect.hashes, parent),
        tokens,
        meta.block_size,
        meta.lora_id,
        medium,
        meta.lora_name,
        _extra_keys(dialect, meta),
        group.index,
        group.kind,
        group.sliding_window if group.kind in WINDOW_KINDS else None,  # a chunk is no window
        LOCAL,
    )


def _extra_keys(dialect: Dialect, meta: BlockStoreMeta) -> list[Any] | None:
    if not dialect.tokens:
        return None
    return plain_extra_keys(meta.extra_keys) if dialect.plain_extra_keys else meta.extra_keys


def _removed_values(dialect: Dialect, run: RemovedRun, medium: str) -> tuple[Any, ...]:
    """A value for each of REMOVED_KEYS."""
    packed = b"".join(run.block_hashes)
    return (hashes_in(dialect.hashes, packed, len(run.block_hashes[0])), medium, run.group.index, LOCAL)


def _stored_one_by_one(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The values of each block by itself, out of those of a run."""
    hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, *group = values
    for place, name in enumerate(hashes):
        own_tokens = tokens[place * size : (place + 1) * size]
        own_keys = extra_keys and extra_keys[place : place + 1]
        yield ([name], parent, own_tokens, size, lora_id, medium, lora_name, own_keys, *group)
        parent = name


def _removed_one_by_one(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    return (([name], *values[1:]) for name in values[0])
