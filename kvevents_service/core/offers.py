"""Which offered blocks are stored: the checks an offer passes before it gets slots.

Every block that is not stored is counted under one reason:

    bad_lengths     hashes, tokens, block ids or extra keys do not describe the same number of blocks
    bad_hash        the parent hash is not hash_bytes long
    bad_tokens      a token id is negative
    bad_extra_keys  an extra key is no tuple of scalars and flat tuples of scalars
    scratch_group   the group is not cacheable
    parent_absent   the block before the run is not in the tier (I6)
    not_a_chain     hashes repeat, or a later block is known where an earlier one is not
    backlog         too many blocks are already waiting to be copied
    no_room         every block of the tier is in use
    ranks_absent    not every rank of the engine has registered its memory
    store_dropped   the copy failed, the tier was reset meanwhile, the engine died, or the parent's store failed
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from kvevents_service.core.metadata import TOKEN_BYTES, BlockStoreMeta
from kvevents_service.core.pool import BlockPool
from kvevents_service.wire.control import GroupSpec, Offer
from kvevents_service.wire.packing import INT32_BYTES

_SCALARS: Final = (str, bytes, int, float)
DECLINE_REASONS: Final = (
    "bad_lengths",
    "bad_hash",
    "bad_tokens",
    "bad_extra_keys",
    "scratch_group",
    "parent_absent",
    "not_a_chain",
    "backlog",
    "no_room",
    "ranks_absent",
    "store_dropped",
)


def shape_fault(offer: Offer, group: GroupSpec, hash_bytes: int) -> str | None:
    """Why the offer cannot be described exactly, or None. Values are never guessed (I7)."""
    blocks, rest = divmod(len(offer.block_hashes), hash_bytes)
    fits = (
        not rest
        and len(offer.token_ids) == blocks * group.block_size * TOKEN_BYTES
        and len(offer.block_ids) == blocks * INT32_BYTES
        and (offer.extra_keys is None or len(offer.extra_keys) == blocks)
    )
    if not fits:
        return "bad_lengths"
    if offer.parent is not None and len(offer.parent) != hash_bytes:
        return "bad_hash"
    if not offer.token_ids[INT32_BYTES - 1 :: INT32_BYTES].isascii():
        return "bad_tokens"
    if offer.extra_keys is not None and not all(map(_is_plain_key, offer.extra_keys)):
        return "bad_extra_keys"
    return None if group.cacheable else "scratch_group"


def _is_plain_key(entry: object) -> bool:
    """None, or a tuple of scalars and of flat tuples of scalars: what vLLM publishes, and what can be sent on."""
    return entry is None or (isinstance(entry, tuple) and all(_is_flat(value) for value in entry))


def _is_flat(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, _SCALARS) or item is None for item in value)
    return isinstance(value, _SCALARS) or value is None


def split_hashes(packed: bytes, hash_bytes: int) -> list[bytes]:
    """One bytes object per hash: these become the keys of the index."""
    if len(packed) == hash_bytes:
        return [packed]  # the snapshot's own object: no second copy
    return list(struct.unpack(f"{hash_bytes}s" * (len(packed) // hash_bytes), packed))


def runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs [start, stop) of consecutive positions; `positions` rise."""
    for _, group in groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        members = [position for _, position in group]
        yield members[0], members[-1] + 1


def parent_slot(pool: BlockPool, meta: BlockStoreMeta, hashes: list[bytes], known: int) -> int | None:
    """Slot of the block before `hashes[known]`; None if it has none or the pool does not know it."""
    before = hashes[known - 1] if known else meta.parent_block_hash
    return None if before is None else pool.slot_of(meta.group.index, before)


def chain_fault(
    pool: BlockPool, meta: BlockStoreMeta, hashes: list[bytes], known: int, parent: int | None
) -> str | None:
    """Why the unknown rest of a run may not be stored, or None."""
    if parent is None and (known or meta.parent_block_hash is not None):
        return "parent_absent"
    if not pool.is_fresh_chain(meta.group.index, hashes[known:]):
        return "not_a_chain"
    return None
