"""The longest prefix that every group of a model can serve.

Hashes come in units of `hash_tokens`; block i of a group with k units a block is named by unit (i + 1) * k - 1. In
a prefix kind the loadable blocks are a prefix, found by bisection. In the other kinds a block stands for itself, so
candidates are tried from the longest down, and a missing block rules out every candidate that needs it. No block is
asked for twice, however often the groups disagree: a lookup is linear in the blocks of its prompt.

A fine query may end inside a block, where every group can: in a prefix kind if the block is all there, or has the
inner name of that prefix; a state only if it has that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvevents_service.core.groups import FINE_KINDS, PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.core.slots import READY
from kvevents_service.wire.control import GroupSpec


class Readable(Protocol):
    """What hits are read from: the pool of a tier, or those of two as one. READY slots can be loaded."""

    def ready_prefix(self, group: int, packed: bytes, hash_bytes: int) -> int: ...
    def slot_of(self, group: int, block_hash: bytes) -> int | None: ...
    def ready_slots(self, group: int, hashes: Sequence[bytes]) -> list[int | None]: ...
    def inner_slot(self, group: int, block_hash: bytes) -> int | None: ...
    def state_of(self, slot: int) -> int: ...
    def is_chain(self, slots: list[int]) -> bool: ...
    def ends(self, slots: list[int]) -> list[int]: ...
    def pin(self, slot: int) -> None: ...
    def unpin(self, slot: int) -> None: ...
    def touch(self, slot: int) -> None: ...


class PrefixQuery(NamedTuple):
    """Hashes of consecutive units from token `start_tokens` on, packed. All sizes in tokens but `hash_bytes`."""

    packed: bytes
    start_tokens: int
    hash_tokens: int
    hash_bytes: int
    fine: bool = False

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + len(self.packed) // self.hash_bytes * self.hash_tokens

    def hash_at(self, tokens: int) -> bytes:
        """The hash of the unit that ends at `tokens`, behind `start_tokens`."""
        unit = (tokens - self.start_tokens) // self.hash_tokens - 1
        return self.packed[unit * self.hash_bytes : (unit + 1) * self.hash_bytes]

    def block_hashes(self, group: GroupSpec, blocks: range) -> list[bytes]:
        """The hashes of logical blocks at or after `start_tokens`."""
        packed, size = self.packed, self.hash_bytes
        each = group.block_size // self.hash_tokens * size
        last = ((blocks.start + 1) * group.block_size - self.start_tokens) // self.hash_tokens * size
        return [packed[end - size : end] for end in range(last, last + each * len(blocks), each)]

    def first_units(self, tokens: int) -> bytes:
        """The packed hashes of the units up to `tokens`."""
        return self.packed[: (tokens - self.start_tokens) // self.hash_tokens * self.hash_bytes]


def longest_prefix(pool: Readable, groups: tuple[GroupSpec, ...], query: PrefixQuery) -> int:
    """Tokens that every cacheable group can serve, `start_tokens` at least. A local prefix serves what is before.

    0 more if the local prefix does not end where a block of every group does.
    """
    cacheable = [group for group in groups if group.cacheable]
    step = alignment(cacheable)
    if query.start_tokens % step:
        return query.start_tokens
    tokens = query.end_tokens // step * step
    loose = []
    for group in cacheable:
        if group.kind in PREFIX_KINDS:
            tokens = _longest_chain(pool, group, query, tokens, step)
        else:
            loose.append(_Scan(pool, group, query))
    tokens = _agree(loose, query.start_tokens, tokens, step)
    fine = query.fine and all(group.kind in FINE_KINDS for group in cacheable)
    return _finer(pool, cacheable, query, tokens) if fine else tokens


def _finer(pool: Readable, groups: list[GroupSpec], query: PrefixQuery, tokens: int) -> int:
    """The longest prefix of whole hash units, `tokens` at least."""
    chains = {
        group.index: _longest_chain(pool, group, query, query.end_tokens, group.block_size)
        for group in groups
        if group.kind in PREFIX_KINDS
    }
    most = min(chains[group.index] + group.block_size - 1 for group in groups if group.index in chains)
    most = min(most, query.end_tokens) // query.hash_tokens * query.hash_tokens
    for candidate in range(most, tokens, -query.hash_tokens):
        if all(
            candidate <= chains.get(group.index, 0)
            or loadable(pool, group, query, (candidate - 1) // group.block_size, candidate) is not None
            for group in groups
        ):
            return candidate
    return tokens


def _agree(scans: list[_Scan], start: int, tokens: int, step: int) -> int:
    """The longest candidate that misses nothing in any of these groups."""
    agreed = 0
    while agreed < len(scans) and tokens > start:
        for scan in scans:
            missing = scan.last_missing(tokens)
            if missing is None:
                agreed += 1
            else:
                tokens, agreed = missing * scan.group.block_size // step * step, 0
    return max(tokens, start)


def _longest_chain(pool: Readable, group: GroupSpec, query: PrefixQuery, tokens: int, step: int) -> int:
    if group.block_size == query.hash_tokens:
        blocks = pool.ready_prefix(group.index, query.first_units(tokens), query.hash_bytes)
    else:
        wanted = range(query.start_tokens // group.block_size, tokens // group.block_size)
        packed = b"".join(query.block_hashes(group, wanted))
        blocks = pool.ready_prefix(group.index, packed, query.hash_bytes)
    return (query.start_tokens + blocks * group.block_size) // step * step


class _Scan:
    """One group whose blocks stand for themselves, asked for shorter and shorter candidates."""

    __slots__ = ("_seen", "group", "pool", "query")

    def __init__(self, pool: Readable, group: GroupSpec, query: PrefixQuery) -> None:
        self.pool = pool
        self.group = group
        self.query = query
        self._seen = query.end_tokens // group.block_size
        """From this block on, all that a later candidate may need can be loaded."""

    def last_missing(self, tokens: int) -> int | None:
        """The last block that a prefix of `tokens` needs and this group cannot load."""
        needed = needed_blocks(self.group, tokens, self.query.start_tokens)
        for block in range(min(needed.stop, self._seen) - 1, needed.start - 1, -1):
            if loadable(self.pool, self.group, self.query, block, tokens) is None:
                self._seen = block  # every later candidate ends here or before
                return block
        self._seen = min(self._seen, needed.start)
        return None


def loadable(pool: Readable, group: GroupSpec, query: PrefixQuery, block: int, tokens: int) -> int | None:
    """The slot of a logical block, if its bytes up to `tokens` can be loaded now."""
    end = (block + 1) * group.block_size
    if end <= tokens:
        return _ready(pool, pool.slot_of(group.index, query.hash_at(end)))
    whole = None
    if group.kind in PREFIX_KINDS and end <= query.end_tokens:
        whole = _ready(pool, pool.slot_of(group.index, query.hash_at(end)))
    return _ready(pool, pool.inner_slot(group.index, query.hash_at(tokens))) if whole is None else whole


def _ready(pool: Readable, slot: int | None) -> int | None:
    return slot if slot is not None and pool.state_of(slot) == READY else None


def slots_of(pool: Readable, group: GroupSpec, query: PrefixQuery, tokens: int) -> list[int] | None:
    """The slots of the blocks that a prefix of `tokens` needs, in order; None if one cannot be loaded any more.

    None, too, where a prefix kind's blocks are no chain: then the pin on the last would not keep the others.
    """
    wanted = needed_blocks(group, tokens, query.start_tokens)
    whole = range(wanted.start, max(wanted.start, min(wanted.stop, tokens // group.block_size)))
    slots = pool.ready_slots(group.index, query.block_hashes(group, whole))
    slots += [loadable(pool, group, query, block, tokens) for block in wanted[len(whole) :]]
    found = [slot for slot in slots if slot is not None]
    if len(found) < len(slots):
        return None
    chained = group.kind in PREFIX_KINDS and bool(found)
    return None if chained and not pool.is_chain(found) else found
