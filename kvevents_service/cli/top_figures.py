"""What `kvevents top` shows of a sidecar or a relay: figures out of two of its states."""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.cli.sidecar_state import State
from kvevents_service.cli.top_sources import SourceFigures, source_figures


class Figures(NamedTuple):
    """Rates are of the time between two states, 0 with only one. hit_rate: None if nothing was looked up."""

    up_s: float
    engines: int
    used: float | None
    capacity_bytes: int
    stored_per_s: float
    removed_per_s: float
    loaded_per_s: float
    copied_bytes_per_s: float
    hit_rate: float | None
    subscribers: int
    pending: int
    oldest_s: float
    errors: int
    sources: tuple[SourceFigures, ...] = ()

    def plain(self) -> dict[str, object]:
        """A JSON object."""
        return {**self._asdict(), "sources": [one._asdict() for one in self.sources]}


class _Sums(NamedTuple):
    stored: int
    removed: int
    loaded: int
    copied: int
    hit: int
    asked: int


_NOTHING = _Sums(0, 0, 0, 0, 0, 0)


def figures(before: State | None, state: State) -> Figures:
    """`before` counts only if it is of the same life of the sidecar."""
    if before is not None and before.boot_id != state.boot_id:
        before = None
    now, then = _sums(state), _NOTHING if before is None else _sums(before)
    seconds = 0.0 if before is None else state.now - before.now
    stored, removed, loaded, copied = (
        max(0.0, (new - old) / seconds) if seconds > 0 else 0.0 for new, old in zip(now[:4], then[:4], strict=True)
    )
    capacity = sum(tier.capacity_blocks for tier in state.tiers)
    resident = sum(tier.blocks.get("resident", 0) for tier in state.tiers)
    asked = now.asked - then.asked
    return Figures(
        up_s=state.now - state.started_at,
        engines=len(state.engines),
        used=resident / capacity if capacity else None,
        capacity_bytes=sum(tier.capacity_blocks * tier.block_bytes for tier in state.tiers),
        stored_per_s=stored,
        removed_per_s=removed,
        loaded_per_s=loaded,
        copied_bytes_per_s=copied,
        hit_rate=(now.hit - then.hit) / asked if asked > 0 else None,
        subscribers=sum(output.subscribers for output in state.outputs),
        pending=sum(copies.pending for copies in state.copies),
        oldest_s=state.oldest_copy_s,
        errors=sum(state.errors.values()) + sum(copies.failed for copies in state.copies),
        sources=source_figures(before, state),
    )


def _sums(state: State) -> _Sums:
    def stat(key: str) -> int:
        return sum(tier.stats.get(key, 0) for tier in state.tiers)

    return _Sums(
        stored=stat("blocks_stored"),
        removed=stat("blocks_removed"),
        loaded=stat("blocks_loaded"),
        copied=sum(copies.bytes for copies in state.copies),
        hit=stat("hit_blocks"),
        asked=stat("lookup_blocks"),
    )
