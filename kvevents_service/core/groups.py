"""KV cache groups of a model: which kinds there are, and which a tier can hold today.

The names are vLLM's `kv_cache_spec_kind` values.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec

KINDS = frozenset(
    {
        "full_attention",
        "mla_attention",
        "sink_full_attention",
        "sliding_window",
        "sliding_window_mla",
        "chunked_local_attention",
        "mamba",
    }
)
PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds in which a block needs every block before it: stored prefix-closed, looked up by longest prefix."""

MAX_GROUPS = 255
MAX_BLOCK_SIZE = 65536


def check_groups(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """The groups of a hello, or ControlError naming the first one that cannot be served."""
    if not groups or len(groups) > MAX_GROUPS:
        raise ControlError("bad_groups", "groups", f"1 to {MAX_GROUPS} groups")
    for position, group in enumerate(groups):
        _check_group(group, position)
    cacheable = [group for group in groups if group.cacheable]
    if not cacheable:
        raise ControlError("bad_groups", "groups", "at least one cacheable group")
    _check_one_block_size(cacheable)
    return tuple(groups)


def _check_one_block_size(groups: list[GroupSpec]) -> None:
    """A lookup names one chain for all groups: with two sizes of block it could never hit in both."""
    size = groups[0].block_size
    for group in groups:
        if group.block_size != size:
            raise ControlError(
                "unsupported_group", f"groups[{group.index}].block_size", f"{size}, as in the others"
            )


def _check_group(group: GroupSpec, position: int) -> None:
    field = f"groups[{position}]"
    if group.index != position:
        raise ControlError("bad_groups", f"{field}.index", f"{position}, its place in the list")
    if not 0 < group.block_size <= MAX_BLOCK_SIZE:
        raise ControlError("bad_groups", f"{field}.block_size", f"1 to {MAX_BLOCK_SIZE} tokens")
    if group.kind not in KINDS:
        raise ControlError("bad_groups", f"{field}.kind", f"one of {', '.join(sorted(KINDS))}")
    if group.cacheable and group.kind not in PREFIX_KINDS:
        raise ControlError(
            "unsupported_group",
            f"{field}.kind",
            f"one of {', '.join(sorted(PREFIX_KINDS))}, or cacheable=false",
        )
