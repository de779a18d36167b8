"""A paged cache that knows what is in each block, and checks every offer of a planner against it.

No bytes: a block holds (group, hash). An offer is right if each of its blocks holds what the offer says, from the
plan to the end of its step, and what it says of them is what their request says.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvevents_service.core.groups import STATE_KIND, WINDOWED, first_needed
from kvevents_service.engine.free_queue import FreeQueue
from kvevents_service.engine.identity import PLAIN, Identity, KeyWalk
from kvevents_service.engine.lazy import BlockRecord, EvictionOrder, LazyPlanner
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.plan import Planner
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.spans import RequestView
from kvevents_service.engine.trace import chain_hashes
from kvevents_service.wire.control import GroupSpec, Offer, Step, StepDone
from kvevents_service.wire.packing import unpack_int32

UNIT = 4
HASH_BYTES = 32

FULL = GroupSpec(0, "full_attention", 4)
WINDOW = GroupSpec(1, "sliding_window", 8, 16)
STATE = GroupSpec(2, "mamba", 8)
SCRATCH = GroupSpec(3, "mamba", 8, None, False)
HYBRID = (FULL, WINDOW, STATE, SCRATCH)

Content = tuple[int, bytes]


class Said(NamedTuple):
    """An offer in plain values."""

    request_id: str
    group: int
    blocks: range
    block_ids: list[int]


class Life:
    """A request with blocks: `computed` tokens have KV."""

    def __init__(self, view: RequestView, groups: Sequence[GroupSpec]) -> None:
        self.view = view
        self.tables: list[list[int | None]] = [[] for _ in groups]
        self.computed = 0

    def held(self) -> list[int]:
        return [block for table in self.tables for block in table if block is not None]


class Toy:
    """An engine's blocks, its planner, and the steps it has sent. `find`: the planner may ask the prefix cache."""

    def __init__(
        self,
        groups: Sequence[GroupSpec] = (FULL,),
        *,
        blocks: int = 256,
        room: int = 128,
        find: bool = True,
        lazy_tokens: int = 0,
    ) -> None:
        self.groups = groups
        self.blocks = blocks
        self.references = [0] * blocks
        self.content: list[Content | None] = [None] * blocks
        self.records: list[BlockRecord | None] = [None] * blocks
        self.cached: dict[Content, int] = {}
        self.queue = FreeQueue(blocks)
        self.views: dict[bytes, tuple[RequestView, int]] = {}
        self.book = OfferBook(self.touch, self.free, room)
        self.planner: Planner[object] = self._planner(find, lazy_tokens)
        self.lives: dict[str, Life] = {}
        self.promised: dict[int, list[tuple[int, Content | None]]] = {}
        self.steps = 0

    def _planner(self, find: bool, lazy_tokens: int) -> Planner[object]:
        if lazy_tokens:
            order = EvictionOrder(self.free_after, self.records.__getitem__)
            return LazyPlanner(self.groups, UNIT, self.book, order, self.find, lazy_tokens)  # type: ignore[return-value]
        return EagerPlanner(self.groups, UNIT, self.book, self.find if find else None)  # type: ignore[return-value]

    # blocks

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self.queue.remove(block)
            self.references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0, f"block {block} given back twice"
            self.references[block] -= 1
            if not self.references[block]:
                self.queue.extend((block,))

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self.cached.get((group, block_hash))

    def free_after(self, cursor: int | None) -> Iterator[tuple[int, bytes | None]]:
        for block in self.queue.after(cursor):
            content = self.content[block]
            yield block, content[1] if content and self.cached.get(content) == block else None

    def allocate(self) -> int:
        block = self.queue.popleft()
        self.references[block] = 1
        content, self.content[block], self.records[block] = self.content[block], None, None
        if content and self.cached.get(content) == block:
            del self.cached[content]
        return block

    # requests

    def view(self, request_id: str, tokens: Sequence[int], identity: Identity = PLAIN) -> RequestView:
        hashes = chain_hashes(array("i", tokens), UNIT, [], identity)
        view = RequestView(request_id, hashes, array("i", tokens), identity)
        self.views.update({name: (view, unit) for unit, name in enumerate(hashes)})
        return view

    def start(self, request_id: str, tokens: Sequence[int] | int, identity: Identity = PLAIN) -> Life:
        """Schedule a request, for the first time or again."""
        tokens = range(tokens) if isinstance(tokens, int) else tokens
        life = self.lives[request_id] = Life(self.view(request_id, tokens, identity), self.groups)
        self.planner.admit(life.view, life.tables)
        return life

    def compute(self, life: Life, tokens: int, *, trim: bool = False, hand_off: bool = True) -> None:
        """Compute up to `tokens` and confirm. `trim`: blocks that leave a window are free at once."""
        before, life.computed = life.computed, tokens
        self.planner.confirm(life.view.request_id, tokens)
        for group, table in zip(self.groups, life.tables, strict=True):
            size = group.block_size
            table += [self.allocate() for _ in range(len(table), -(-tokens // size))]
            for number in range(before // size, tokens // size):
                self._fill(life, group, number)
                if hand_off and group.kind == STATE_KIND:
                    block = table[number]
                    assert block is not None
                    self.planner.hand_off(life.view.request_id, group.index, (number + 1) * size, block)
            if trim and group.kind in WINDOWED:
                for number in range(first_needed(group, tokens) // size):
                    self.drop(life, group.index, number)

    def _fill(self, life: Life, group: GroupSpec, number: int) -> None:
        block = life.tables[group.index][number]
        if block is not None:
            unit = (number + 1) * group.block_size // UNIT - 1
            content = group.index, life.view.unit_hashes[unit]
            self.content[block] = content
            if content not in self.cached:
                self.cached[content] = block
                self.records[block] = BlockRecord(life.view, group.index, number)

    def drop(self, life: Life, group: int, number: int) -> None:
        """The block left the window."""
        block = life.tables[group][number]
        life.tables[group][number] = None
        if block is not None:
            self.free([block])

    def preempt(self, request_id: str) -> None:
        self.planner.preempt(request_id)
        self.free(self.lives.pop(request_id).held())

    def finish(self, request_id: str) -> None:
        """It ends, whether it has blocks or not."""
        life = self.lives.pop(request_id, None)
        self.planner.finish(request_id, life.computed if life else 0)
        if life:
            self.free(life.held())

    # steps

    def send(self, *, dropped: bool = False) -> tuple[list[Said], Step]:
        """The next step: every offer checked, every block of it held until `end`."""
        plan = self.planner.plan()
        offers = plan.offers()
        step = Step(self.steps, offers, plan.finished, plan.preempted)
        said = [self.read(offer) for offer in offers]
        if not plan.empty:
            self.planner.sent(plan, None if dropped else self.steps)
        if not dropped:
            blocks = [block for each in said for block in each.block_ids]
            assert all(self.references[block] for block in blocks)
            self.promised[self.steps] = [(block, self.content[block]) for block in blocks]
            self.steps += 1
        assert self.book.held_blocks <= self.book.max_blocks
        return said, step

    def blocks_of(self, *, dropped: bool = False) -> list[tuple[str, int, list[int]]]:
        """What the next step offers: request, group, logical blocks."""
        return [(each.request_id, each.group, list(each.blocks)) for each in self.send(dropped=dropped)[0]]

    def end(self, step_id: int, *, declined: int = 0) -> None:
        blocks = len(self.promised[step_id])
        self.settle(StepDone(step_id, blocks - declined, 0, declined))

    def settle(self, done: StepDone) -> None:
        for block, content in self.promised.pop(done.step_id):
            assert self.content[block] == content, f"block {block} was reused while a copy read it"
        self.planner.settle([done])

    # the truth

    def read(self, offer: Offer) -> Said:
        """What an offer says; AssertionError if it is not so."""
        group = self.groups[offer.group]
        units = group.block_size // UNIT
        names = [offer.block_hashes[at : at + HASH_BYTES] for at in range(0, len(offer.block_hashes), HASH_BYTES)]
        view, unit = self.views[names[-1]]
        first = (unit + 1) // units - len(names)
        blocks = range(first, first + len(names))
        assert names == [view.unit_hashes[(block + 1) * units - 1] for block in blocks]
        span = slice(first * group.block_size, blocks.stop * group.block_size)
        assert list(unpack_int32(offer.token_ids)) == list(view.token_ids[span])
        assert offer.parent == (view.unit_hashes[first * units - 1] if first else None)
        assert (offer.lora_id, offer.lora_name) == view.identity[:2]
        assert offer.extra_keys == KeyWalk(view.identity, group.block_size).keys(first, blocks.stop)
        block_ids = list(unpack_int32(offer.block_ids))
        assert [self.content[block] for block in block_ids] == [(offer.group, name) for name in names]
        return Said(offer.request_id, offer.group, blocks, block_ids)
