"""Plans: what the next step says, and what became of the steps before.

    plan = planner.plan()
    planner.sent(plan, client.step(plan.offers(), plan.finished, plan.preempted))
    ...
    planner.settle(client.poll().steps)

`Planner` is what the eager and the lazy one share. A request's verbs may come in any order and for ids that it does
not know: nothing raises, and nothing is held that no step gives back (I12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.spans import RequestView
from kvevents_service.wire.control import Offer, StepDone

MAX_LOSSES = 7
MANY_ENDED = 32
"""So many requests that have ended are worth a message."""

Tables = Sequence[Sequence[int | None]]
"""One block table for each group; None where the request has no block. The engine's own, read at every plan."""
Claim = TypeVar("Claim")
MakeOffer = Callable[[], Offer]
"""An offer that is packed when it is called, in any thread: of a request's own buffers, which only grow."""


class PlannerCounts(msgspec.Struct):
    """Blocks, but for `losses`: steps that were dropped, lost or not stored whole.

    `skipped`: left over when a request ended. `recovered`: null blocks that the prefix cache still had.
    `undescribed`: near eviction, and the engine has no record of it. `orphans`: near eviction, the parents gone.
    `dropped_hand_offs`: states handed over too late, or not where a hash unit ends.
    """

    offered: int = 0
    skipped: int = 0
    recovered: int = 0
    undescribed: int = 0
    orphans: int = 0
    dropped_hand_offs: int = 0
    losses: int = 0


class Patience:
    """After the n-th loss in a row 2^(n-1) - 1 plans pass, 63 at most: a full tier is not asked every step."""

    __slots__ = ("_losses", "_rests_until")

    def __init__(self) -> None:
        self._losses = self._rests_until = 0

    def rests(self, plan_number: int) -> bool:
        return plan_number < self._rests_until

    def lose(self, plan_number: int) -> None:
        """Nothing more before the plan that may try again."""
        self._losses = min(self._losses + 1, MAX_LOSSES)
        self._rests_until = plan_number + (1 << self._losses - 1)

    def recover(self) -> None:
        """All is well again."""
        self._losses = self._rests_until = 0


class Plan(NamedTuple, Generic[Claim]):
    """One step, not sent yet. `block_ids` are to be held once it is, beside what the book keeps for it already.

    `lent`: blocks of it that the requests by these ids hold.
    """

    makers: list[MakeOffer]
    finished: list[str]
    preempted: list[str]
    block_ids: list[int]
    lent: dict[str, list[int]]
    claims: list[Claim]
    blocks: int

    @property
    def empty(self) -> bool:
        """There is nothing to say."""
        return not (self.makers or self.finished or self.preempted)

    def offers(self) -> list[Offer]:
        """Packed now. Makers are called once, in their order, and plan after plan."""
        return [make() for make in self.makers]


class Sent(NamedTuple, Generic[Claim]):
    """What is known of a plan until its step has ended. Its offers are gone."""

    claims: list[Claim]
    blocks: int


class Draft(Generic[Claim]):
    """Offers to be made and what they claim, on the way to a plan. `room` is how many more blocks it may take."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.makers: list[MakeOffer] = []
        self.block_ids: list[int] = []
        self.lent: dict[str, list[int]] = {}
        self.claims: list[Claim] = []

    def add(self, make: MakeOffer, block_ids: Sequence[int], lender: str | None = None) -> None:
        """`lender`: the request that holds these blocks, if it does."""
        self.makers.append(make)
        blocks = self.block_ids if lender is None else self.lent.setdefault(lender, [])
        blocks += block_ids
        self.room -= len(block_ids)


class Planner(Generic[Claim]):
    """One planner an engine. `book` holds the blocks."""

    def __init__(self, book: OfferBook) -> None:
        self.book = book
        self.counts = PlannerCounts()
        self._plans = 0
        self._kept: Draft[Claim] = Draft(0)
        self._finished: list[str] = []
        self._preempted: list[str] = []
        self._sent: dict[int, Sent[Claim]] = {}

    # a request's life

    def admit(self, view: RequestView, tables: Tables) -> None:
        """It is scheduled for the first time, or again after a preemption: with these block tables."""

    def confirm(self, request_id: str, tokens: int, computed: int = 0) -> None:
        """So many tokens have KV that no running step will write. `computed`: with those of running steps."""

    def hand_off(self, request_id: str, group: int, boundary_tokens: int, block_id: int) -> None:
        """This block holds the group's state after `boundary_tokens`.

        It is held from now on, if so many are confirmed and there is room; if not, then it is looked for in the
        prefix cache when they are and there is.
        """

    def preempt(self, request_id: str) -> None:
        """Its blocks are given up."""
        self._preempted.append(request_id)

    def ending(self, request_id: str) -> Sequence[int] | None:
        """It will `finish` soon, and its blocks may be freed before: those that `finish` will offer must be held.

        Returns the first of them in each group's table; None: any of them.
        """
        return None

    def finish(self, request_id: str, tokens: int = 0, computed: int = 0, held: Sequence[int] = ()) -> int:
        """It ends, scheduled or not, `tokens` confirmed. Its blocks may be freed as soon as this returns.

        `held` are blocks of it that are held for this call. Returns how many of them, from the first one on, the
        book gives back from here on.
        """
        self._finished.append(request_id)
        return 0

    # steps

    @property
    def idle(self) -> bool:
        """A plan would be empty, or say no more than that a few requests have ended: that waits for an offer."""
        return not (self._kept.makers or self._preempted or len(self._finished) >= MANY_ENDED)

    def plan(self) -> Plan[Claim]:
        """What is to be said now. If it is not empty `sent` must follow, before any other verb."""
        self._plans += 1
        kept, self._kept = self._kept, Draft(0)
        draft: Draft[Claim] = Draft(self.book.room)
        self._collect(draft)
        ended = self._finished, self._preempted
        self._finished, self._preempted = [], []
        makers, claims = [*kept.makers, *draft.makers], [*kept.claims, *draft.claims]
        blocks = len(kept.block_ids) + len(draft.block_ids) + sum(map(len, draft.lent.values()))
        self.counts.offered += blocks
        return Plan(makers, *ended, draft.block_ids, draft.lent, claims, blocks)

    def sent(self, plan: Plan[Claim], step_id: int | None) -> None:
        """The plan is on its way as this step; None: it was dropped."""
        self.book.hold(step_id, plan.block_ids, plan.lent)
        if step_id is None and plan.blocks:
            self._lose(plan.claims)
        elif step_id is not None and plan.blocks:
            self._sent[step_id] = Sent(plan.claims, plan.blocks)

    def settle(self, done: Iterable[StepDone]) -> None:
        """Steps have ended. What of them is not in the tier now is offered again."""
        for end in done:
            self.book.settle((end,))
            sent = self._sent.pop(end.step_id, None)
            if sent is None:
                continue
            if end.stored + end.known < sent.blocks:
                self._lose(sent.claims)
            else:
                self._win(sent.claims)

    def offer_all_again(self) -> None:
        """Another sidecar, which knows none of our blocks."""

    def reset(self) -> None:
        """What was computed is void: nothing of it is offered any more. Call it beside the client's `reset`."""
        self.book.drop()
        self._kept = Draft(0)
        for sent in self._sent.values():
            sent.claims.clear()

    def _collect(self, draft: Draft[Claim]) -> None:
        """Fill the draft."""
        raise NotImplementedError

    def _lose(self, claims: Sequence[Claim]) -> None:
        """Not all of a step was stored."""
        self.counts.losses += 1

    def _win(self, claims: Sequence[Claim]) -> None:
        """All of a step is in the tier."""
