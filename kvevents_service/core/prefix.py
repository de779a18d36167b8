"""The longest prefix that every group of a model can serve.

Hashes come in units of `hash_tokens`; block i of a group with k units a block is named by unit (i + 1) * k - 1. In
a prefix kind the loadable blocks are a prefix, found by bisection. In the other kinds a block stands for itself, so
candidates are tried from the longest down, and a missing block rules out every candidate that needs it.
"""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.slots import READY
from kvevents_service.wire.control import GroupSpec


class PrefixQuery(NamedTuple):
    """Hashes of consecutive units from token `start_tokens` on, packed. All sizes in tokens but `hash_bytes`."""

    packed: bytes
    start_tokens: int
    hash_tokens: int
    hash_bytes: int

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + len(self.packed) // self.hash_bytes * self.hash_tokens

    def block_hash(self, group: GroupSpec, block: int) -> bytes:
        """The hash of a logical block at or after `start_tokens`."""
        unit = ((block + 1) * group.block_size - self.start_tokens) // self.hash_tokens - 1
        return self.packed[unit * self.hash_bytes : (unit + 1) * self.hash_bytes]

    def first_units(self, tokens: int) -> bytes:
        """The packed hashes of the units up to `tokens`."""
        return self.packed[: (tokens - self.start_tokens) // self.hash_tokens * self.hash_bytes]


def longest_prefix(pool: BlockPool, groups: tuple[GroupSpec, ...], query: PrefixQuery) -> int:
    """Tokens that every cacheable group can serve, `start_tokens` at least. A local prefix serves what is before.

    0 more if the local prefix does not end where a block of every group does.
    """
    cacheable = [group for group in groups if group.cacheable]
    step = alignment(cacheable)
    if query.start_tokens % step:
        return query.start_tokens
    tokens, before = query.end_tokens // step * step, -1
    while tokens > query.start_tokens and tokens != before:
        before = tokens
        for group in cacheable:
            tokens = _longest(pool, group, query, tokens, step)
    return max(tokens, query.start_tokens)


def _longest(pool: BlockPool, group: GroupSpec, query: PrefixQuery, tokens: int, step: int) -> int:
    if group.kind in PREFIX_KINDS:
        return _longest_chain(pool, group, query, tokens, step)
    while tokens > query.start_tokens:
        missing = _last_missing(pool, group, query, tokens)
        if missing is None:
            return tokens
        tokens = missing * group.block_size // step * step
    return query.start_tokens


def _longest_chain(pool: BlockPool, group: GroupSpec, query: PrefixQuery, tokens: int, step: int) -> int:
    if group.block_size == query.hash_tokens:
        blocks = pool.ready_prefix(group.index, query.first_units(tokens), query.hash_bytes)
    else:
        wanted = needed_blocks(group, tokens, query.start_tokens)
        packed = b"".join(query.block_hash(group, block) for block in wanted)
        blocks = pool.ready_prefix(group.index, packed, query.hash_bytes)
    return (query.start_tokens + blocks * group.block_size) // step * step


def _last_missing(pool: BlockPool, group: GroupSpec, query: PrefixQuery, tokens: int) -> int | None:
    """The last block that a prefix of `tokens` needs and this group cannot load."""
    for block in reversed(needed_blocks(group, tokens, query.start_tokens)):
        if loadable(pool, group, query, block) is None:
            return block
    return None


def loadable(pool: BlockPool, group: GroupSpec, query: PrefixQuery, block: int) -> int | None:
    """The slot of a logical block, if its bytes can be loaded now."""
    slot = pool.slot_of(group.index, query.block_hash(group, block))
    return slot if slot is not None and pool.state_of(slot) == READY else None


def slots_of(pool: BlockPool, group: GroupSpec, query: PrefixQuery, tokens: int) -> list[int] | None:
    """The slots of the blocks that a prefix of `tokens` needs, in order; None if one cannot be loaded any more.

    None, too, where a prefix kind's blocks are no chain: then the pin on the last would not keep the others.
    """
    slots = [loadable(pool, group, query, block) for block in needed_blocks(group, tokens, query.start_tokens)]
    found = [slot for slot in slots if slot is not None]
    if len(found) < len(slots):
        return None
    chained = group.kind in PREFIX_KINDS and bool(found)
    return None if chained and pool.chain(found[-1], len(found)) != found else found
