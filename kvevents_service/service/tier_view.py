"""Each tier as operators see it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    tier = sidecar.tier
    if tier is None:
        return []
    scheduler, spec = tier.scheduler, tier.scheduler.tier.spec
    stats = scheduler.stats()
    blocks = {state: stats[f"blocks_{state}"] for state in ("resident", "pending", "free")}
    blocks["pinned"] = int(np.count_nonzero(np.frombuffer(scheduler.pool.pins, dtype=np.int32)))
    return [
        TierView(
            medium=spec.medium,
            capacity_blocks=spec.capacity_blocks,
            block_bytes=tier.block_bytes,
            hash_tokens=tier.head.hash_tokens,
            namespace=tier.head.namespace,
            blocks=blocks,
            groups=tier.head.groups,
            stats=stats,
        )
    ]
