"""Copies into a tier's slots: what has arrived is announced, what has not is given up.

    begin -> Copy -> end(good) -> Publish(BlockStored), Keep, then(Landed)
                 \\-> end(bad), reset or session gone -> then(Landed), nothing announced (I2)

A run is announced only behind its parent. A copy that ends before its parent's copy is held until that is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvevents_service.core.commands import Command, Keep, Publish
from kvevents_service.core.metadata import StoreRun, TransferMeta
from kvevents_service.core.slots import PENDING, READY
from kvevents_service.core.tier import Tier


class Landed(NamedTuple):
    """A copy whose end is decided: how many of its blocks can be loaded now."""

    transfer: TransferMeta
    blocks: int


Then = Callable[[Landed], list[Command]]
"""What follows the announcement."""


class Landings:
    """Every copy into the slots of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.pending_blocks = 0
        self._open: dict[TransferMeta, Then] = {}
        self._held: list[TransferMeta] = []
        self._abandoned: set[TransferMeta] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, transfer: TransferMeta, then: Then) -> None:
        """This copy is started; `then` is called once, at its end."""
        self._open[transfer] = then
        self.pending_blocks += transfer.blocks

    def end(self, transfer: TransferMeta, *, good: bool) -> list[Command]:
        """The copy has ended, or was never started (not good)."""
        if not good:
            return [*self._land(transfer, good=False), *self._settle()]
        self._held.append(transfer)
        return self._settle()

    def abandon_session(self, session_id: int) -> None:
        """The engine is gone: its copies under way will announce nothing."""
        self._abandoned.update(t for t in self._open if t.session_id == session_id)

    def _settle(self) -> list[Command]:
        """End every copy whose parents are decided, until none is left that can be."""
        commands: list[Command] = []
        while ready := [held for held in self._held if not self._waits_for_parent(held)]:
            self._held = [held for held in self._held if held not in ready]
            for transfer in ready:
                commands += self._land(transfer, good=True)
        return commands

    def _waits_for_parent(self, transfer: TransferMeta) -> bool:
        pool = self.tier.pool
        own = {slot for run in transfer.runs for slot in run.slots}
        parents = {pool.parent_of(run.slots[0]) for run in transfer.runs}.difference(own)
        return any(parent is not None and pool.state_of(parent) == PENDING for parent in parents)

    def _land(self, transfer: TransferMeta, *, good: bool) -> list[Command]:
        then = self._open.pop(transfer)
        good = good and transfer not in self._abandoned
        self._abandoned.discard(transfer)
        self.pending_blocks -= transfer.blocks
        kept = [run for run in transfer.runs if self._land_run(run, good=good)]
        announced = tuple(meta for run in kept for meta in (run.meta, *run.inner))
        self.tier.counters["blocks_stored"] += sum(meta.blocks for meta in announced)
        following = then(Landed(transfer, sum(len(run.slots) for run in kept)))
        if not announced:
            return following
        keeping = [Keep(tuple(kept))] if self.tier.spec.keeps else []
        return [Publish(announced), *keeping, *following]

    def _land_run(self, run: StoreRun, *, good: bool) -> bool:
        """Commit a run if its copy is good, no reset came in between, and its parent made it."""
        pool = self.tier.pool
        parent = pool.parent_of(run.slots[0])
        wanted = pool.state_of(run.slots[0]) == PENDING
        if good and wanted and (parent is None or pool.state_of(parent) == READY):
            pool.commit(run.slots)
            return True
        pool.abandon(run.slots)
        return False
