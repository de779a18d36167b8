"""KV cache groups of a model: which kinds there are, and which blocks of each a prefix hit needs.

The names are vLLM's `kv_cache_spec_kind` values. A prefix of T tokens can be served when every cacheable group has
the blocks from `first_needed` to T:

    full_attention, mla_attention, sink_full_attention   all of them: stored prefix-closed
    sliding_window, sliding_window_mla                   the last window - 1 tokens
    chunked_local_attention                              from the start of the chunk that token T is in
    mamba                                                the one state block that ends at T

In attention over the whole prefix and in mamba T may lie inside a block: the block that T is in is needed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds in which a block needs every block before it: stored prefix-closed, looked up by longest prefix."""
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
CHUNK_KIND = "chunked_local_attention"
STATE_KIND = "mamba"
FINE_KINDS = PREFIX_KINDS | {STATE_KIND}
"""Kinds in which a prefix may end inside a block, at any hash unit."""
KINDS = PREFIX_KINDS | WINDOW_KINDS | {CHUNK_KIND, STATE_KIND}
WINDOWED = WINDOW_KINDS | {CHUNK_KIND}
"""Kinds whose `sliding_window` says how far back, or in chunks of what, they look."""

MAX_GROUPS = 255
MAX_BLOCK_SIZE = 65536


def first_needed(group: GroupSpec, tokens: int) -> int:
    """The first token whose block a prefix of `tokens` tokens needs in this group; `tokens` if it needs none."""
    if group.kind in PREFIX_KINDS:
        return 0
    if group.kind == STATE_KIND:
        return max(0, -(-tokens // group.block_size) - 1) * group.block_size
    window = group.sliding_window or tokens
    if group.kind == CHUNK_KIND:
        return tokens // window * window
    return max(0, tokens - window + 1)


def needed_blocks(group: GroupSpec, tokens: int, start_tokens: int = 0) -> range:
    """Logical block numbers that a prefix of `tokens` tokens needs, those before `start_tokens` left out.

    Both are multiples of the group's block size, but `tokens` may be any number in `FINE_KINDS`.
    """
    first = max(first_needed(group, tokens), start_tokens) // group.block_size
    return range(first, -(-tokens // group.block_size))


def alignment(groups: Sequence[GroupSpec]) -> int:
    """Every hit is a multiple of this many tokens: a whole number of blocks in every cacheable group."""
    return lcm(*(group.block_size for group in groups if group.cacheable))


def check_groups(groups: Sequence[GroupSpec], hash_tokens: int = 0) -> tuple[GroupSpec, ...]:
    """The groups of a hello, or ControlError naming the first one that cannot be served.

    `hash_tokens` is the number of tokens of a hash unit; 0: the block size of the first cacheable group.
    """
    if not groups or len(groups) > MAX_GROUPS:
        raise ControlError("bad_groups", "groups", f"1 to {MAX_GROUPS} groups")
    for position, group in enumerate(groups):
        _check_group(group, position)
    cacheable = [group for group in groups if group.cacheable]
    if not cacheable:
        raise ControlError("bad_groups", "groups", "at least one cacheable group")
    if not any(group.kind in PREFIX_KINDS for group in cacheable):
        raise ControlError("unsupported_group", "groups", f"a cacheable group of {', '.join(sorted(PREFIX_KINDS))}")
    unit = hash_tokens or cacheable[0].block_size
    for group in cacheable:
        if unit < 0 or group.block_size % unit:
            field = f"groups[{group.index}].block_size"
            raise ControlError("bad_groups", field, f"a multiple of the hash unit, {unit} tokens")
    return tuple(groups)


def _check_group(group: GroupSpec, position: int) -> None:
    field = f"groups[{position}]"
    if group.index != position:
        raise ControlError("bad_groups", f"{field}.index", f"{position}, its place in the list")
    if not 0 < group.block_size <= MAX_BLOCK_SIZE:
        raise ControlError("bad_groups", f"{field}.block_size", f"1 to {MAX_BLOCK_SIZE} tokens")
    if group.kind not in KINDS:
        raise ControlError("bad_groups", f"{field}.kind", f"one of {', '.join(sorted(KINDS))}")
    if group.cacheable and group.kind in WINDOWED and not (group.sliding_window or 0) > 0:
        raise ControlError("bad_groups", f"{field}.sliding_window", f"a positive number of tokens for {group.kind}")
    chunked = group.cacheable and group.kind == CHUNK_KIND
    if chunked and (group.sliding_window or 0) % group.block_size:
        raise ControlError("bad_groups", f"{field}.sliding_window", "a multiple of the block size")
