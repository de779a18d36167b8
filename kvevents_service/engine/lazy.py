"""The lazy planner: cached blocks are offered when the engine is about to reuse them.

It walks the engine's free queue in the order of eviction. The request of a block is long gone: the engine keeps a
`BlockRecord` of every cached block, and so the events of a lazy store say as much as those of an eager one. A block
of a prefix kind is offered behind its ancestors, which the prefix cache still has: they are evicted after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS, STATE_KIND, WINDOW_KINDS
from kvevents_service.core.offers import runs
from kvevents_service.engine.identity import KeyWalk
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.plan import Draft, Patience, Planner
from kvevents_service.engine.planner import Find
from kvevents_service.engine.spans import RequestView, Spans
from kvevents_service.wire.control import GroupSpec

MAX_KNOWN = 1 << 18

LazyClaim = tuple[int, bytes]
"""Group index and block hash of a block that was offered."""


class BlockRecord(NamedTuple):
    """What a cached block is: logical block `number` of this request in this group."""

    view: RequestView
    group: int
    number: int


class EvictionOrder(NamedTuple):
    """The free blocks of the engine, the one that is reused next first.

    `after(cursor)` yields (block id, name) in the order of eviction, None as the name of a block without content;
    from the head if the cursor is None or no longer free. `describe` gives a block's record, None if there is none.
    """

    after: Callable[[int | None], Iterator[tuple[int, bytes | None]]]
    describe: Callable[[int], BlockRecord | None]


def lazy_target(groups: Sequence[GroupSpec], step_tokens: int) -> int:
    """Blocks of the free queue that each plan makes safe to reuse: twice what a step may take.

    The estimate is that of vLLM 0.33: two states, a window and one block, or else all tokens of the step.
    """
    return 2 * sum(_step_blocks(group, step_tokens) for group in groups if group.cacheable)


def _step_blocks(group: GroupSpec, step_tokens: int) -> int:
    if group.kind == STATE_KIND:
        return 2
    if group.kind in WINDOW_KINDS:
        return -(-(group.sliding_window or 0) // group.block_size) + 1
    return -(-step_tokens // group.block_size)


class Loose:
    """Blocks of one walk that stand for themselves, by request and group: consecutive ones become one offer."""

    def __init__(self) -> None:
        self.blocks = 0
        self.of: dict[tuple[int, int], tuple[BlockRecord, dict[int, int]]] = {}

    def add(self, record: BlockRecord, block_id: int) -> None:
        self.blocks += 1
        self.of.setdefault((id(record.view), record.group), (record, {}))[1][record.number] = block_id


class LazyPlanner(Planner[LazyClaim]):
    """`step_tokens`: what one engine step may schedule. A plan walks `target` blocks, from where the last stopped.

    It remembers the last `MAX_KNOWN` blocks that it offered: what the tier evicted meanwhile is offered again only
    when it is forgotten here, or when a step was declined. What it cannot offer is counted once, and passed until
    the block holds something else.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        hash_tokens: int,
        book: OfferBook,
        queue: EvictionOrder,
        find: Find,
        step_tokens: int,
    ) -> None:
        super().__init__(book)
        self.spans = [Spans(group, hash_tokens) for group in groups]
        self.target = lazy_target(groups, step_tokens)
        self._queue = queue
        self._find = find
        self._cursor: int | None = None
        self._known: dict[LazyClaim, None] = {}
        self._passed: dict[int, bytes | None] = {}
        self._hopeless: set[LazyClaim] = set()
        self._patience = Patience()

    def __repr__(self) -> str:
        return f"<LazyPlanner target={self.target} cursor={self._cursor} known={len(self._known)}>"

    # steps

    @property
    def idle(self) -> bool:
        """Only a walk can tell."""
        return False

    def _collect(self, draft: Draft[LazyClaim]) -> None:
        if self._patience.rests(self._plans):
            return
        self._hopeless.clear()
        loose = Loose()
        self._walk(draft, loose)
        for record, blocks in loose.of.values():
            for first, stop in runs(sorted(blocks)):
                self._offer(draft, record, first, [blocks[number] for number in range(first, stop)])

    def _walk(self, draft: Draft[LazyClaim], loose: Loose) -> None:
        """The next blocks of the queue. The cursor rests on one that stays in it; from the end it starts over."""
        left = self.target
        for block_id, name in islice(self._queue.after(self._cursor), self.target):
            left -= 1
            claims = len(draft.claims)
            wanted = name is not None and self._passed.get(block_id) != name
            if wanted and not self._take(draft, loose, block_id, name):
                return
            if len(draft.claims) == claims:
                self._cursor = block_id
        if left:
            self._cursor = None

    def _take(self, draft: Draft[LazyClaim], loose: Loose, block_id: int, name: bytes | None) -> bool:
        """Offer this block, if the tier should not have it yet. False: there is no room."""
        record = self._queue.describe(block_id)
        if record is None:
            self.counts.undescribed += 1
        elif self.spans[record.group].group.cacheable:
            if self._claim(record, record.number) in self._known:
                return True
            if self.spans[record.group].group.kind not in PREFIX_KINDS:
                return self._take_loose(draft, loose, record, block_id)
            before = self._unknown_before(record)
            if before is not None:
                return self._take_chain(draft, draft.room - loose.blocks, record, [*before, block_id])
            self.counts.orphans += 1
        self._passed[block_id] = name
        return True

    def _take_loose(self, draft: Draft[LazyClaim], loose: Loose, record: BlockRecord, block_id: int) -> bool:
        if draft.room <= loose.blocks:
            return False
        self._note(draft, record, record.number, 1)
        loose.add(record, block_id)
        return True

    def _take_chain(self, draft: Draft[LazyClaim], room: int, record: BlockRecord, chain: list[int]) -> bool:
        """The chain that ends with this block, as much of it as there is room for."""
        first, run = record.number + 1 - len(chain), chain[: max(0, room)]
        if run:
            self._note(draft, record, first, len(run))
            self._offer(draft, record, first, run)
        return len(run) == len(chain)

    def _unknown_before(self, record: BlockRecord) -> list[int] | None:
        """The blocks between the last known one and this; None if one of them is nowhere any more."""
        blocks: list[int] = []
        for number in range(record.number - 1, -1, -1):
            claim = self._claim(record, number)
            if claim in self._known:
                break
            block_id = None if claim in self._hopeless else self._find(*claim)
            if block_id is None:
                self._hopeless.update(self._claim(record, each) for each in range(number, record.number))
                return None
            blocks.append(block_id)
        return blocks[::-1]

    def _claim(self, record: BlockRecord, number: int) -> LazyClaim:
        return record.group, self.spans[record.group].name(record.view.unit_hashes, number)

    def _note(self, draft: Draft[LazyClaim], record: BlockRecord, first: int, blocks: int) -> None:
        """These are on their way to the tier."""
        claims = [self._claim(record, number) for number in range(first, first + blocks)]
        draft.claims += claims
        self._known.update(dict.fromkeys(claims))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _offer(self, draft: Draft[LazyClaim], record: BlockRecord, first: int, block_ids: list[int]) -> None:
        spans, view = self.spans[record.group], record.view
        walk = KeyWalk(view.identity, spans.block_size)
        draft.add(view.later(partial(spans.offer, view, walk, first, block_ids)), block_ids)

    # what became of steps

    def _lose(self, claims: Sequence[LazyClaim]) -> None:
        """Which block was declined, or whether its parent is missing, is not told: nothing is known any more."""
        super()._lose(claims)
        if claims:
            self._patience.lose(self._plans)
            self._forget()

    def _win(self, claims: Sequence[LazyClaim]) -> None:
        if claims:
            self._patience.recover()

    def _forget(self) -> None:
        self._known.clear()
        self._passed.clear()
        self._cursor = None

    def offer_all_again(self) -> None:
        self._patience.recover()
        self._forget()

    def reset(self) -> None:
        """The engine's prefix cache is reset too: what it holds from here on is new."""
        super().reset()
        self._forget()
