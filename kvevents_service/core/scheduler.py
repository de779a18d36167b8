"""The offload scheduler: a pure state machine between engines, the block pool and the copies.

Every verb takes what happened and returns the commands that follow, in order. It never waits, and it keeps no
request alive: a store's snapshot rides on its `TransferMeta`. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakValueDictionary

from kvevents_service.core.clearing import Clearing
from kvevents_service.core.commands import Command, Reply
from kvevents_service.core.landings import Landings
from kvevents_service.core.loads import Loads
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.offers import DECLINE_REASONS
from kvevents_service.core.step_parts import StepParts, step_blocks
from kvevents_service.core.stores import Stores
from kvevents_service.core.tier import Limits, Tier, TierSpec
from kvevents_service.wire.control import Hit, Load, Loaded, Lookup, Release, Reset, Step, StepDone

_COUNTED = (
    "blocks_stored",
    "blocks_removed",
    "blocks_loaded",
    "blocks_lost",
    "blocks_known",
    "hit_blocks",
    "lookups",
    "lookup_blocks",
    "lookups_refused",
    "leases_expired",
    "loads_failed",
    "loads_refused",
    "stores_failed",
)


class OffloadScheduler:
    """Decides what is stored, loaded, evicted and announced for one tier."""

    def __init__(self, spec: TierSpec, limits: Limits | None = None) -> None:
        self._build(Tier(spec, limits or Limits()))

    def _build(self, tier: Tier) -> None:
        self.tier = tier
        self.pool = tier.pool
        self.landings = Landings(tier)
        self.stores = Stores(tier, self.landings)
        self.loads = self._make_loads()
        self.clearing = Clearing(self.tiers)
        self._long_steps: WeakValueDictionary[int, StepParts] = WeakValueDictionary()

    def _make_loads(self) -> Loads:
        return Loads(self.tier, self.pool)

    def __repr__(self) -> str:
        return f"<OffloadScheduler {self.pool!r} stores={len(self.landings)} loads={len(self.loads)}>"

    def hello(self, session_id: int, engine_blocks: int) -> None:
        """All ranks of a session are there; block ids are below `engine_blocks`, the fewest that one has."""
        self.tier.engine_blocks[session_id] = engine_blocks

    def rank_gone(self, session_id: int) -> None:
        """A rank's memory is away: until the next hello nothing is copied for the session. Its leases live on."""
        self._void_long_step(session_id)
        if session_id in self.tier.engine_blocks:
            self.tier.engine_blocks[session_id] = 0

    def _void_long_step(self, session_id: int) -> None:
        parts = self._long_steps.pop(session_id, None)
        if parts is not None:
            parts.void = True

    @property
    def tiers(self) -> Sequence[Tier]:
        """Whose blocks are announced, the fastest first."""
        return (self.tier,)

    @property
    def in_use(self) -> bool:
        """A session is here whose memory has taken part."""
        return bool(self.tier.engine_blocks)

    def _all_there(self, session_id: int) -> bool:
        return self.tier.engine_blocks.get(session_id, 0) > 0

    def _serves(self, session_id: int) -> bool:
        return self._all_there(session_id) and not self.clearing.under_way

    def goodbye(self, session_id: int) -> None:
        """The engine is gone: leases end, stores under way announce nothing. What it stored stays."""
        self._void_long_step(session_id)
        self.tier.engine_blocks.pop(session_id, None)
        self.loads.goodbye(session_id)
        self.landings.abandon_session(session_id)

    def step(self, session_id: int, step: Step, now: float, *, void: bool = False) -> list[Command]:
        """Store what is new of a step's offers; end what finished or lost its blocks. ControlError: no change.

        void: it is of a long step, a rank of which has gone meanwhile.
        """
        if self.clearing.under_way:
            commands = self._decline(session_id, step, "store_dropped")
        elif self._all_there(session_id) and not void:
            commands = self.stores.begin(session_id, step, now)
        else:
            commands = self._decline(session_id, step, "ranks_absent")
        for request_id in step.finished:
            self.finish(session_id, request_id)
        for request_id in step.preempted:
            self.preempt(session_id, request_id)
        return commands

    def long_step(self, session_id: int, step: Step) -> StepParts | None:
        """A step that is to be taken in parts; None: it is not long, or nothing of it is stored. ControlError as
        for all of it. The session's other messages wait until its last part has been taken."""
        if not self._serves(session_id) or step_blocks(step) <= self.tier.limits.step_blocks:
            return None
        self.stores.check(session_id, step)
        parts = self._long_steps[session_id] = StepParts(step, self.tier.spec, self.tier.next_id())
        return parts

    def _decline(self, session_id: int, step: Step, reason: str) -> list[Command]:
        blocks = step_blocks(step)
        self.tier.counters[f"declined_{reason}"] += blocks
        return [Reply(session_id, StepDone(step.step_id, 0, 0, blocks))]

    def lookup(self, session_id: int, lookup: Lookup, now: float) -> Hit:
        """The longest loadable prefix of a chain, pinned. ControlError if the message cannot be meant."""
        if not self._serves(session_id):
            self.tier.counters["lookups"] += 1
            return Hit(lookup.call_id, 0)
        return self.loads.lookup(session_id, lookup, now)

    def load(self, session_id: int, load: Load, now: float) -> list[Command]:
        """Copy a leased hit into engine blocks. ControlError if the blocks are not the session's."""
        if not self._serves(session_id):
            self.loads.release(session_id, Release(load.lease_id))
            self.tier.counters["loads_refused"] += 1
            return [Reply(session_id, Loaded(load.load_id, 0))]
        return self.loads.begin(session_id, load, now)

    def release(self, session_id: int, release: Release) -> None:
        """A leased hit will not be loaded."""
        self.loads.release(session_id, release)

    def finish(self, session_id: int, request_id: str) -> None:
        """A request ended, in whatever state it was; unknown ids are fine."""
        self.loads.finish(session_id, request_id)

    def preempt(self, session_id: int, request_id: str) -> None:
        """A request lost its engine blocks: hits it has not loaded are void. It looks up again when it resumes."""
        self.loads.finish(session_id, request_id)

    def complete(self, transfer: TransferMeta) -> list[Command]:
        """A copy has ended well."""
        if transfer.kind == "load":
            return self.loads.end(transfer, good=True)
        return self._landings_of(transfer).end(transfer, good=True)

    def fail(self, transfer: TransferMeta, lost: Collection[int] = ()) -> list[Command]:
        """A copy has ended badly, or was never started. `lost`: slots of it whose bytes are gone for good."""
        gone = self.lose(transfer, lost)
        if transfer.kind == "load":
            return [*gone, *self.loads.end(transfer, good=False)]
        self.tier.counters[f"{transfer.kind}s_failed"] += 1
        return [*gone, *self._landings_of(transfer).end(transfer, good=False)]

    def _landings_of(self, transfer: TransferMeta) -> Landings:
        return self.landings

    def lose(self, transfer: TransferMeta, lost: Collection[int]) -> list[Command]:
        """A rank's load has found that these slots' bytes are gone for good. Other ranks may still be copying."""
        return self.tiers[transfer.tier].lose(lost) if transfer.kind in ("load", "promote") else []

    def reset(self, session_id: int, reset: Reset) -> list[Command]:
        """Forget every block, by explicit removals, and answer; in slices: see `go_on`. Copies under way end
        without an announcement, and loads as misses."""
        for landings in self._all_landings:
            landings.abandon()
        self.loads.void()
        return self.clearing.begin(session_id, reset)

    @property
    def _all_landings(self) -> Sequence[Landings]:
        return (self.landings,)

    @property
    def unfinished(self) -> bool:
        """There is more to do than one call may: `go_on`, soon and after others had their turn."""
        return self.clearing.under_way or any(tier.adopting for tier in self.tiers)

    def go_on(self, now: float) -> list[Command]:
        """A slice of what is unfinished."""
        if self.clearing.under_way:
            return self.clearing.go_on()
        return [command for tier in self.tiers for command in tier.adopt_more()]

    def clear(self) -> tuple[list[Command], int]:
        """Remove every block of every tier; returns the announcements and how many names were removed."""
        cleared = [(tier, tier.pool.clear()) for tier in self.tiers]
        removed = sum(len(names.hashes) for _, gone in cleared for names in gone)
        return [tier.removal(gone) for tier, gone in cleared if gone], removed

    def tick(self, now: float) -> list[Command]:
        """End what is past its deadline. Call it about once a second."""
        self.loads.expire(now)
        return []

    def stats(self) -> dict[str, int]:
        """Counters since start and gauges of now; every declined block is under one `declined_` reason."""
        return {
            **{f"declined_{reason}": 0 for reason in DECLINE_REASONS},
            **dict.fromkeys(_COUNTED, 0),
            **self.tier.counters,
            **self.tier.gauges(),
            "leases": len(self.loads.requests),
            "transfers": len(self.landings) + len(self.loads),
        }
