"""Models with one to three groups, and what a prefix hit needs of each, said the slow way: token by token."""

from __future__ import annotations

from functools import lru_cache
from itertools import count

from kvevents_service.wire.control import GroupSpec

UNIT = 2
"""Tokens of a hash unit."""

PREFIX = ("full_attention", "mla_attention", "sink_full_attention")
FINE = (*PREFIX, "mamba")
"""Kinds in which a prefix may end inside a block."""

Groups = tuple[GroupSpec, ...]


def groups(*specs: tuple[str, int] | tuple[str, int, int]) -> Groups:
    """Cacheable groups of (kind, block size, window)."""
    return tuple(
        GroupSpec(index, kind, block_size, window[0] if window else None)
        for index, (kind, block_size, *window) in enumerate(specs)
    )


def with_scratch(cacheable: Groups, place: int) -> Groups:
    """The same model with a group at this place that is never stored."""
    specs = [*cacheable]
    specs.insert(place, GroupSpec(0, "mamba", 2, None, False))
    return tuple(
        GroupSpec(index, spec.kind, spec.block_size, spec.sliding_window, spec.cacheable)
        for index, spec in enumerate(specs)
    )


FULL2 = ("full_attention", 2)
MODELS: dict[str, Groups] = {
    "full": with_scratch(groups(FULL2), 1),
    "full of two units": groups(("full_attention", 4)),
    "full and latent": with_scratch(groups(FULL2, ("mla_attention", 2)), 2),
    "full and coarse": groups(FULL2, ("sink_full_attention", 4)),
    "window": with_scratch(groups(("full_attention", 4), ("sliding_window", 2, 5)), 1),
    "coarse window first": groups(("sliding_window_mla", 4, 6), FULL2),
    "window of one token": groups(FULL2, ("sliding_window", 2, 1)),
    "state": groups(FULL2, ("mamba", 4)),
    "wide state": groups(("full_attention", 6), ("mamba", 4)),
    "chunks": groups(FULL2, ("chunked_local_attention", 2, 8)),
    "window and state": with_scratch(groups(("full_attention", 4), ("sliding_window", 2, 4), ("mamba", 4)), 0),
    "two windows": groups(FULL2, ("sliding_window", 2, 7), ("sliding_window", 4, 100)),
    "sixes": groups(("full_attention", 6), ("sliding_window", 2, 8), ("chunked_local_attention", 2, 6)),
}


def cacheable(model: Groups) -> Groups:
    return tuple(group for group in model if group.cacheable)


@lru_cache(None)
def step_tokens(model: Groups) -> int:
    """The smallest number of tokens that is whole blocks in every cacheable group."""
    return next(n for n in count(1) if all(n % group.block_size == 0 for group in cacheable(model)))


def attends(group: GroupSpec, token: int, past: int) -> bool:
    """Whether the token at position `token` reads the key and value of the one at `past`."""
    window = group.sliding_window or 0
    if past > token:
        return False
    if group.kind in ("sliding_window", "sliding_window_mla"):
        return token - past < window
    if group.kind == "chunked_local_attention":
        return token // window == past // window
    assert group.kind in PREFIX
    return True


@lru_cache(None)
def needed(group: GroupSpec, tokens: int, start: int = 0) -> tuple[int, ...]:
    """Blocks from token `start` on that have anything in them which a token at `tokens` or later reads."""
    if group.kind == "mamba":
        blocks = {-(-tokens // group.block_size) - 1} - {-1}
    else:
        later = range(tokens, tokens + 20)
        blocks = {
            past // group.block_size
            for past in range(tokens)
            if any(attends(group, token, past) for token in later)
        }
    return tuple(sorted(block for block in blocks if block * group.block_size >= start))
