"""Loads over two tiers: what is only in the one behind is promoted to the front one, and loaded from there.

    load -> Copy(promote) -> landed in front, announced there -> Copy(load) -> Reply(Loaded)
        \\-> nothing to promote, or no room -> Copy(load) from each tier -> Reply(Loaded)

A long hit is promoted in slices, a copy each: `go_on` asks for the next, and the load follows the last.
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


class Promotion:
    """A load whose blocks come from behind, some at a time. `rest`: what is not asked for yet, of each group.

    `moved`: where in front each slot of the ladder is going; `copies`: how many of its copies are under way.
    """

    __slots__ = ("copies", "ids", "loading", "moved", "rest", "slots")

    def __init__(self, loading: Loading, ids: array[int], slots: list[int], rest: list[list[int]]) -> None:
        self.loading = loading
        self.ids = ids
        self.slots = slots
        self.rest = rest
        self.moved: dict[int, int] = {}
        self.copies = 0


class PromotingLoads(Loads):
    """Loads from a ladder of two pools. `landings`: of the front tier."""

    def __init__(self, tier: Tier, ladder: Ladder, landings: Landings) -> None:
        super().__init__(tier, ladder)
        self.ladder = ladder
        self._landings = landings
        self._waiting: dict[Promotion, None] = {}

    @property
    def unfinished(self) -> bool:
        """A promotion has more to ask for than one call may: `go_on`."""
        return any(promotion.rest for promotion in self._waiting)

    def _start(self, loading: Loading, ids: array[int], slots: list[list[int]]) -> list[Command]:
        first = self.ladder.front.capacity
        behind = [[slot - first for slot in own if slot >= first] for own in slots]
        wanted = [self._wanted(group, own) for group, own in zip(self._groups, behind, strict=True)]
        promotion = Promotion(loading, ids, [slot for group in slots for slot in group], wanted)
        self._waiting[promotion] = None
        return self._ask(promotion)

    def go_on(self) -> list[Command]:
        """A slice more of the promotion that has waited longest."""
        return self._ask(next(promotion for promotion in self._waiting if promotion.rest))

    def _ask(self, promotion: Promotion) -> list[Command]:
        """Have some of the rest copied, and load when nothing of it is left, or gets room."""
        move = self._next_move(promotion)
        if not len(move):
            return [] if promotion.copies else self._promoted(promotion)
        loading = promotion.loading
        for slot in move.target_pins:
            self.ladder.front.pin(slot)
        loading.pins += tuple(move.target_pins)
        first = self.ladder.front.capacity
        promotion.moved |= {first + slot: to for slot, to in zip(move.source, move.target, strict=True)}
        transfer = TransferMeta(
            self.tier.next_id(), "promote", NO_SESSION, loading.load_id, move.target, move.source,
            loading.deadline, tuple(move.runs), tier=1,
        )  # fmt: skip
        promotion.copies += 1
        self._landings.begin(transfer, partial(self._landed, promotion))
        return [*self.tier.evicted(move.evicted), Copy(transfer)]

    def _next_move(self, promotion: Promotion) -> Move:
        """A slice of the rest that gets room in the front tier. What gets none is not asked for again."""
        room = self.tier.limits.slice_blocks
        if any(self.ladder.back.hash_of(slot) is None for own in promotion.rest for slot in own[:room]):
            promotion.loading.good = False  # its bytes were found to be gone, while it waited
        move, room = Move(), room if promotion.loading.good else 0
        left: list[list[int]] = []
        for own in promotion.rest:
            placed = move.add(self.ladder.back, own[:room], self.tier)
            left.append(own[placed:] if placed == len(own[:room]) else [])
            room -= placed
        promotion.rest = left if promotion.loading.good and any(left) else []
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

    def _landed(self, promotion: Promotion, landed: Landed) -> list[Command]:
        transfer, blocks = landed
        promotion.copies -= 1
        self.tier.counters["blocks_promoted"] += blocks
        if blocks < transfer.blocks:
            promotion.loading.good = False
        if not promotion.loading.good:
            promotion.rest = []
        return [] if promotion.copies or promotion.rest else self._promoted(promotion)

    def _promoted(self, promotion: Promotion) -> list[Command]:
        """All that could be is in front, or the load is a miss."""
        del self._waiting[promotion]
        if not promotion.loading.good:
            return [self._finish(promotion.loading)]
        moved = promotion.moved
        return self._load(promotion.loading, promotion.ids, [moved.get(slot, slot) for slot in promotion.slots])

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
        for promotion in self._waiting:
            promotion.loading.good = False

    def lose_session(self, session_id: int) -> None:
        """The engine or a rank of it is gone: loads that wait for a promotion are misses."""
        for promotion in self._waiting:
            if promotion.loading.session_id == session_id:
                promotion.loading.good = False
