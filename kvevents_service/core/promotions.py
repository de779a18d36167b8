"""Loads over two tiers: what is only in the one behind is promoted to the front one, and loaded from there.

    load -> Copy(promote) -> landed in front, announced there -> Copy(load) -> Reply(Loaded)
        \\-> nothing to promote, or no room -> Copy(load) from each tier -> Reply(Loaded)

Whatever fails on the way makes the load a miss at once. What has been promoted stays, whether it is loaded or not.
"""

from __future__ import annotations

from array import array
from functools import partial

from kvevents_service.core.commands import Command, Copy
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.ladder import Ladder
from kvevents_service.core.landings import Landed, Landings
from kvevents_service.core.loads import Loading, Loads
from kvevents_service.core.metadata import NO_SESSION, TransferMeta
from kvevents_service.core.moves import Move
from kvevents_service.core.slots import PENDING
from kvevents_service.core.tier import Tier
from kvevents_service.wire.control import GroupSpec


class PromotingLoads(Loads):
    """Loads from a ladder of two pools. `landings`: of the front tier."""

    def __init__(self, tier: Tier, ladder: Ladder, landings: Landings) -> None:
        super().__init__(tier, ladder)
        self.ladder = ladder
        self._landings = landings
        self._waiting: set[Loading] = set()

    def _start(self, loading: Loading, ids: array[int], slots: list[list[int]]) -> list[Command]:
        move = self._move(slots)
        flat = [slot for group in slots for slot in group]
        if not len(move):
            return self._load(loading, ids, flat)
        for slot in move.target_pins:
            self.ladder.front.pin(slot)
        loading.pins += tuple(move.target_pins)
        self._waiting.add(loading)
        transfer = TransferMeta(
            self.tier.next_id(), "promote", NO_SESSION, loading.load_id, move.target, move.source,
            loading.deadline, tuple(move.runs), tier=1,
        )  # fmt: skip
        self._landings.begin(transfer, partial(self._landed, loading, ids, flat))
        return [*self.tier.evicted(move.evicted), Copy(transfer)]

    def _move(self, slots: list[list[int]]) -> Move:
        """What of a hit gets room in the front tier; what it needs there is pinned."""
        move, first = Move(), self.ladder.front.capacity
        for group, own in zip(self._groups, slots, strict=True):
            behind = [slot - first for slot in own if slot >= first]
            move.add(self.ladder.back, self._wanted(group, behind), self.tier)
        return move

    def _wanted(self, group: GroupSpec, behind: list[int]) -> list[int]:
        """Which of these blocks are to go in front: none behind a parent that is still being written."""
        front, back = self.ladder.front, self.ladder.back
        if group.kind not in PREFIX_KINDS:
            return [slot for slot in behind if not front.knows(group.index, back.hash_of(slot) or b"")]
        parent = back.parent_of(behind[0]) if behind else None
        before = None if parent is None else front.slot_of(group.index, back.hash_of(parent) or b"")
        written = before is not None and front.state_of(before) == PENDING
        return [] if written else behind

    def _landed(self, loading: Loading, ids: array[int], slots: list[int], landed: Landed) -> list[Command]:
        transfer, blocks = landed
        self._waiting.discard(loading)
        self.tier.counters["blocks_promoted"] += blocks
        if blocks < transfer.blocks or not loading.good:
            loading.good = False
            return [self._finish(loading)]
        behind = self.ladder.front.capacity
        now_in_front = {behind + slot: to for slot, to in zip(transfer.slots, transfer.engine_blocks, strict=True)}
        return self._load(loading, ids, [now_in_front.get(slot, slot) for slot in slots])

    def _load(self, loading: Loading, ids: array[int], slots: list[int]) -> list[Command]:
        """From the tier that each block is in."""
        parts: list[tuple[array[int], array[int]]] = [(array("i"), array("i")), (array("i"), array("i"))]
        for block_id, slot in zip(ids, slots, strict=True):
            tier = self.ladder.is_back(slot)
            parts[tier][0].append(block_id)
            parts[tier][1].append(self.ladder.back_slot(slot) if tier else slot)
        self.tier.counters["blocks_loaded_from_disk"] += len(parts[1][0])
        return [self._copy(loading, *part, tier) for tier, part in enumerate(parts) if part[0]]

    # the ends of sessions and of contents

    def void(self) -> None:
        super().void()
        for loading in self._waiting:
            loading.good = False

    def lose_session(self, session_id: int) -> None:
        """The engine or a rank of it is gone: loads that wait for a promotion are misses."""
        for loading in self._waiting:
            if loading.session_id == session_id:
                loading.good = False
