"""Which offered blocks are stored: the checks an offer passes before it gets slots.

Every block that is not stored is counted under one reason:

    bad_lengths     hashes, tokens, block ids or extra keys do not describe the same number of blocks
    bad_hash        the parent hash is not hash_bytes long
    bad_tokens      a token id is negative
    bad_lora        the adapter's number is negative or not below 2^63: routers refuse what holds it; or its name
                    has more than MAX_NAME_LETTERS
    bad_extra_keys  an extra key is no tuple of scalars and flat tuples of scalars, or too large
    bad_inner       an inner hash lies in no block or where another does, is not hash_bytes long, or the group's
                    blocks have none
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

from kvevents_service.core.groups import FINE_KINDS, PREFIX_KINDS
from kvevents_service.core.metadata import TOKEN_BYTES, BlockStoreMeta
from kvevents_service.core.pool import BlockPool
from kvevents_service.wire.control import GroupSpec, InnerHash, Offer
from kvevents_service.wire.packing import INT32_BYTES

MAX_LORA_ID: Final = 1 << 63
MAX_NAME_LETTERS: Final = 1024
MAX_KEY_LETTERS: Final = 2048
KEY_LETTERS_A_TOKEN: Final = 8
"""Of the extra keys of one block: letters, bytes, and 9 for a number. No snapshot of larger ones could be sent."""
_NUMBER_LETTERS: Final = 9
_SCALARS: Final = (str, bytes, int, float)
DECLINE_REASONS: Final = (
    "bad_lengths",
    "bad_hash",
    "bad_tokens",
    "bad_lora",
    "bad_extra_keys",
    "bad_inner",
    "scratch_group",
    "parent_absent",
    "not_a_chain",
    "backlog",
    "no_room",
    "ranks_absent",
    "store_dropped",
)


def tail_of(offer: Offer, hash_bytes: int) -> InnerHash | None:
    """The name of the tail: an offer with a block more than it has hashes ends in one."""
    named = len(offer.block_hashes) // hash_bytes
    if len(offer.block_ids) != (named + 1) * INT32_BYTES or not offer.inner:
        return None
    last = offer.inner[-1]
    return last if last.block == named else None


def shape_fault(offer: Offer, group: GroupSpec, hash_bytes: int, hash_tokens: int) -> str | None:
    """Why the offer cannot be described exactly, or None. Values are never guessed (I7)."""
    if not _lengths_fit(offer, group, hash_bytes, hash_tokens):
        return "bad_lengths"
    if offer.inner and not _inner_fits(offer, group, hash_bytes, group.block_size // hash_tokens):
        return "bad_inner"
    return _value_fault(offer, hash_bytes, group.block_size) or (None if group.cacheable else "scratch_group")


def _value_fault(offer: Offer, hash_bytes: int, block_size: int) -> str | None:
    if offer.parent is not None and len(offer.parent) != hash_bytes:
        return "bad_hash"
    if not offer.token_ids[INT32_BYTES - 1 :: INT32_BYTES].isascii():
        return "bad_tokens"
    if not 0 <= (offer.lora_id or 0) < MAX_LORA_ID or len(offer.lora_name or "") > MAX_NAME_LETTERS:
        return "bad_lora"
    good = all(_is_plain_key(entry, block_size) for entry in offer.extra_keys or ())
    return None if good else "bad_extra_keys"


def _lengths_fit(offer: Offer, group: GroupSpec, hash_bytes: int, hash_tokens: int) -> bool:
    blocks, rest = divmod(len(offer.block_hashes), hash_bytes)
    tail = tail_of(offer, hash_bytes)
    tokens = blocks * group.block_size + (0 if tail is None else tail.units * hash_tokens)
    return (
        not rest
        and len(offer.token_ids) == tokens * TOKEN_BYTES
        and len(offer.block_ids) == (blocks + (tail is not None)) * INT32_BYTES
        and (offer.extra_keys is None or len(offer.extra_keys) == blocks)
    )


def _inner_fits(offer: Offer, group: GroupSpec, hash_bytes: int, units: int) -> bool:
    """Every inner hash has a place of its own, inside a block that has such.

    A state block has but one name: it can only be a tail.
    """
    names = offer.inner or ()
    blocks = len(offer.block_hashes) // hash_bytes if group.kind in PREFIX_KINDS else 0
    tail = tail_of(offer, hash_bytes) if group.kind in FINE_KINDS else None
    return len({(name.block, name.units) for name in names}) == len(names) and all(
        (0 <= name.block < blocks or name is tail)
        and 0 < name.units < units
        and len(name.block_hash) == hash_bytes
        and (name.parent is None) == (offer.parent is None and name.block == 0 and name.units == 1)
        and len(name.parent or name.block_hash) == hash_bytes
        and _is_plain_key(name.extra_keys, group.block_size)
        for name in names
    )


def _is_plain_key(entry: object, block_size: int) -> bool:
    """None, or a tuple of scalars and of flat tuples of scalars: what vLLM publishes, and what can be sent on."""
    if entry is None:
        return True
    plain = isinstance(entry, tuple) and all(_is_flat(value) for value in entry)
    return plain and _letters(entry) <= MAX_KEY_LETTERS + KEY_LETTERS_A_TOKEN * block_size


def _letters(value: object) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_letters, value))
    return len(value) if isinstance(value, str | bytes) else _NUMBER_LETTERS


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
