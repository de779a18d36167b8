"""Demotion ahead of eviction: what will leave the front tier soon is copied to the tier behind while it is there.

    begin -> Copy(demote) -> landed in the tier behind, announced there -> unpinned

A look at the coldest blocks is taken while the front tier has little room: once a quarter of the headroom has been
used since the last one, when more was cold than could be copied, and at every tick. It copies a slice at a time.
What is behind already is only touched there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

from kvevents_service.core.commands import Command, Copy
from kvevents_service.core.landings import Landed, Landings
from kvevents_service.core.metadata import NO_SESSION, TransferMeta
from kvevents_service.core.moves import Move
from kvevents_service.core.slots import NO_SLOT
from kvevents_service.core.tier import Tier

COPY_BLOCKS = 64
"""A copy takes no further chain once it has so many blocks."""


class _Rest(NamedTuple):
    """What is still to be copied of the chain that ends in a leaf, used then: parents first."""

    leaf: int
    used_at: int
    slots: list[int]


class Demotions:
    """Copies from the front tier to the one behind. Both pools are prefix-closed at every moment."""

    def __init__(self, front: Tier, back: Tier, landings: Landings) -> None:
        self.front = front
        self.back = back
        self._landings = landings
        limits, part = front.limits, max(1, front.spec.capacity_blocks // front.limits.headroom_divisor)
        self._headroom = min(limits.max_headroom_blocks, part)
        self._most = min(limits.max_demoting_blocks, part)
        self._looked_at = 0
        self._unfinished = False
        self._resting = False
        self._rest = _Rest(NO_SLOT, 0, [])

    def begin(self, now: float) -> list[Command]:
        """Copy cold blocks if the front tier is short of room. Nothing waits for it."""
        if not self.unfinished:
            return []
        self._looked_at, self._unfinished = self.front.pool.allocated, False
        commands: list[Command] = []
        for move in self._moves(min(self.front.limits.slice_blocks, self._most - self._landings.pending_blocks)):
            commands += [*self.back.evicted(move.evicted), Copy(self._transfer(move, now))]
        return commands

    @property
    def unfinished(self) -> bool:
        """More was cold than one call may copy, or a look is due, and it could be copied now."""
        used = self.front.pool.allocated - self._looked_at
        return (self._unfinished or 4 * used >= self._headroom) and self._possible

    @property
    def _possible(self) -> bool:
        short = self.front.pool.free_slots < self._headroom
        return short and not self._resting and 2 * self._landings.pending_blocks <= self._most

    def _moves(self, room: int) -> Iterator[Move]:
        """At most `room` blocks, coldest first."""
        pool, move = self.front.pool, Move()
        with closing(pool.coldest(self._headroom)) as coldest:
            for leaf in coldest:
                if not (missing := self._missing(leaf)):
                    continue
                placed = move.add(pool, missing[:room], self.back)
                self._rest = _Rest(leaf, pool.used_at(leaf), missing[placed:])
                self._resting |= placed < len(missing[:room])
                room -= placed
                self._unfinished |= not room
                if len(move) >= COPY_BLOCKS:
                    yield move
                    move = Move()
                if not room or self._resting:
                    break
        if len(move):
            yield move

    def _missing(self, leaf: int) -> list[int]:
        """What the tier behind lacks of the chain that ends here, parents first. What it has is kept there."""
        pool, behind = self.front.pool, self.back.pool
        group = pool.group_of(leaf, self.front.spec.groups).index
        if behind.knows(group, pool.hash_of(leaf) or b""):
            self._keep(group, pool.hash_of(leaf) or b"")
            return []
        rest = self._rest
        if (rest.leaf, rest.used_at) == (leaf, pool.used_at(leaf)) and self._is_next(group, rest.slots):
            return rest.slots
        return pool.missing_in(behind, leaf)

    def _is_next(self, group: int, slots: list[int]) -> bool:
        """Whether what is missing behind begins with the first of these."""
        pool, behind = self.front.pool, self.back.pool
        if not slots or behind.knows(group, pool.hash_of(slots[0]) or b""):
            return False
        parent = pool.parent_of(slots[0])
        return parent is None or behind.knows(group, pool.hash_of(parent) or b"")

    def _keep(self, group: int, block_hash: bytes) -> None:
        """Its copy in the front tier leaves soon: the order in which blocks leave there goes on behind."""
        behind = self.back.pool
        slot = behind.slot_of(group, block_hash)
        slot = behind.inner_slot(group, block_hash) if slot is None else slot
        if slot is not None:
            behind.touch(slot)

    def _transfer(self, move: Move, now: float) -> TransferMeta:
        for slot in move.pins:
            self.front.pool.pin(slot)
        transfer = TransferMeta(
            self.front.next_id(), "demote", NO_SESSION, 0, move.source, move.target,
            now + self.front.limits.transfer_deadline_s, tuple(move.runs), tier=1,
        )  # fmt: skip
        self._landings.begin(transfer, partial(self._landed, move.pins))
        return transfer

    def _landed(self, pins: list[int], landed: Landed) -> list[Command]:
        for slot in pins:
            self.front.pool.unpin(slot)
        self.front.counters["blocks_demoted"] += landed.blocks
        return []

    def rest(self) -> None:
        """A copy has failed: no new ones for now."""
        self._resting = True

    def go_on(self) -> None:
        """Some time has passed: look again, whatever was found before."""
        self.front.pool.look_anew()
        self._resting = False
        self._unfinished = True
