"""Each tier as operators see it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvevents_service.core.tier import Tier
from kvevents_service.service.open_tier import OpenTier
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.wire.control import GroupSpec


class TierView(NamedTuple):
    """blocks: how many slots are in each state. stats: the scheduler's counters. `block_bytes` is of all ranks."""

    medium: str
    capacity_blocks: int
    block_bytes: int
    hash_tokens: int
    namespace: str
    blocks: dict[str, int]
    groups: tuple[GroupSpec, ...]
    stats: dict[str, int]

    def plain(self) -> dict[str, object]:
        groups = [
            {name: getattr(group, name) for name in ("index", "kind", "block_size", "sliding_window", "main")}
            for group in self.groups
        ]
        return {**self._asdict(), "groups": groups}


def tiers_of(sidecar: Sidecar) -> list[TierView]:
    """The fastest first; none before an engine has said its layout."""
    opened = sidecar.tier
    if opened is None:
        return []
    front, *behind = opened.scheduler.tiers
    views = [_view(opened, front, opened.scheduler.stats())]
    return views + [_view(opened, tier, {**tier.counters, **tier.gauges()}) for tier in behind]


def _view(opened: OpenTier, tier: Tier, stats: dict[str, int]) -> TierView:
    blocks = {name.removeprefix("blocks_"): count for name, count in tier.gauges().items()}
    blocks["pinned"] = int(np.count_nonzero(np.frombuffer(tier.pool.pins, dtype=np.int32)))
    return TierView(
        medium=tier.spec.medium,
        capacity_blocks=tier.spec.capacity_blocks,
        block_bytes=opened.block_bytes,
        hash_tokens=opened.head.hash_tokens,
        namespace=opened.head.namespace,
        blocks=blocks,
        groups=opened.head.groups,
        stats=stats,
    )
