"""The offload scheduler of two tiers: host memory in front, a disk behind.

                 offers                       hits
                   |                           ^
                   v                           |
    front     [ stored ... cold ]  <--promote--+
                            |                  |
                            +--demote-->  [ behind ]

Each tier has a pool of its own, prefix-closed by itself, and announces its blocks on its own medium: a block may be
on both. Offers go to the front one; what would leave it soon is demoted first; a hit may be read from either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import attrgetter

from kvevents_service.core.commands import Command
from kvevents_service.core.demotions import Demotions
from kvevents_service.core.ladder import Ladder
from kvevents_service.core.landings import Landings
from kvevents_service.core.loads import Loads
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.names import Evicted
from kvevents_service.core.promotions import PromotingLoads
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, Tier, TierSpec
from kvevents_service.wire.control import Load, Step

COUNTED = (
    "blocks_demoted",
    "blocks_promoted",
    "blocks_loaded_from_disk",
    "demotes_failed",
    "promotes_failed",
    "evicted_unsaved",
)
TIER_COUNTED = ("blocks_stored", "blocks_removed", "blocks_lost")


class FrontTier(Tier):
    """The tier that loses its coldest blocks to the one behind."""

    def __init__(self, spec: TierSpec, limits: Limits, back: Tier) -> None:
        super().__init__(spec, limits)
        self._behind = back.pool

    def evicted(self, names: list[Evicted]) -> list[Command]:
        for group, own in groupby((name for name in names if not name.inner), attrgetter("group")):
            hashes = [name.block_hash for name in own]
            self.counters["evicted_unsaved"] += self._behind.ready_slots(group, hashes).count(None)
        return super().evicted(names)


class Cascade(OffloadScheduler):
    """Decides what is stored, demoted, promoted, loaded, evicted and announced for two tiers."""

    def __init__(self, front: TierSpec, back: TierSpec, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.back = Tier(back, limits)
        self.back_landings = Landings(self.back)
        self._build(FrontTier(front, limits, self.back))
        self.demotions = Demotions(self.tier, self.back, self.back_landings)

    def _make_loads(self) -> Loads:
        self.promoting = PromotingLoads(self.tier, Ladder(self.pool, self.back.pool), self.landings)
        return self.promoting

    @property
    def tiers(self) -> Sequence[Tier]:
        return self.tier, self.back

    def goodbye(self, session_id: int) -> None:
        super().goodbye(session_id)
        self.promoting.lose_session(session_id)

    def rank_gone(self, session_id: int) -> None:
        super().rank_gone(session_id)
        self.promoting.lose_session(session_id)

    def step(self, session_id: int, step: Step, now: float, *, void: bool = False) -> list[Command]:
        before = self.pool.allocated
        return [*super().step(session_id, step, now, void=void), *self._demote_after(before, now)]

    def load(self, session_id: int, load: Load, now: float) -> list[Command]:
        before = self.pool.allocated
        return [*super().load(session_id, load, now), *self._demote_after(before, now)]

    def fail(self, transfer: TransferMeta, lost: Collection[int] = ()) -> list[Command]:
        if transfer.kind == "demote":
            self.demotions.rest()
        return super().fail(transfer, lost)

    def tick(self, now: float) -> list[Command]:
        self.demotions.go_on()
        return [*super().tick(now), *self._demote(now)]

    def _demote_after(self, allocated: int, now: float) -> list[Command]:
        """In the same call if that has taken few slots; else it is for `go_on`."""
        return self._demote(now) if 2 * (self.pool.allocated - allocated) < self.tier.limits.slice_blocks else []

    def _demote(self, now: float) -> list[Command]:
        return [] if self.clearing.under_way else self.demotions.begin(now)

    @property
    def unfinished(self) -> bool:
        return super().unfinished or self.promoting.unfinished or self.demotions.unfinished

    def go_on(self, now: float) -> list[Command]:
        if super().unfinished:
            return super().go_on(now)
        return self.promoting.go_on() if self.promoting.unfinished else self._demote(now)

    @property
    def _all_landings(self) -> Sequence[Landings]:
        return self.landings, self.back_landings

    def _landings_of(self, transfer: TransferMeta) -> Landings:
        return self.back_landings if transfer.kind == "demote" else self.landings

    def stats(self) -> dict[str, int]:
        """As of one tier, for the front one; of the one behind the names begin with `disk_`."""
        stats = {**dict.fromkeys(COUNTED, 0), **super().stats()}
        behind = {**{name: self.back.counters[name] for name in TIER_COUNTED}, **self.back.gauges()}
        stats |= {f"disk_{name}": value for name, value in behind.items()}
        stats["transfers"] += len(self.back_landings)
        return stats
