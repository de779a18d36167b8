"""Both planners beside a real tier, under every order of events that hypothesis can think of (I1, I6, I9, I12).

`Toy` checks each offer against its request, and that no block of a pending step is reused. At the end the tier has
every block that could be offered, and nothing is held.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.toy import FULL, HYBRID, WINDOW, Life, Toy
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.engine.identity import PLAIN, Identity, MediaItem
from kvevents_service.testing import HeldCopies
from kvevents_service.wire.control import GroupSpec, Reset, SidecarMessage, Step, StepDone

SESSION = 1
BLOCKS = 96
MAX_TOKENS = 48
IDENTITIES = (
    PLAIN,
    Identity(1, "adapter"),
    Identity(salt="tenant", media=(MediaItem("cat", 6, 11), MediaItem("dog", 17, 9))),
)
GROUPS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "hybrid": HYBRID,
    "coarse": (
        GroupSpec(0, "sliding_window", 4, 10),
        GroupSpec(1, "full_attention", 12),
        GroupSpec(2, "mamba", 12),
    ),
}

ids = st.sampled_from(["a", "b", "c"])


class Planning(RuleBasedStateMachine):
    """One engine, one sidecar."""

    groups: tuple[GroupSpec, ...] = (FULL,)
    lazy = False

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy(self.groups, blocks=BLOCKS, room=24, lazy_tokens=24 if self.lazy else 0)
        self.prompts: dict[str, tuple[list[int], Identity]] = {}
        self.last_id = 0
        self.connect()

    def connect(self) -> None:
        spec = TierSpec("CPU", 1024, 32, self.groups, 4)
        self.scheduler = OffloadScheduler(spec, Limits(max_pending_blocks=40))
        self.scheduler.hello(SESSION, BLOCKS)
        self.copies = HeldCopies(self.scheduler)

    # requests

    @rule(name=ids, prompt=st.integers(0, 2), shared=st.integers(0, 24), identity=st.sampled_from(IDENTITIES))
    def start(self, name: str, prompt: int, shared: int, identity: Identity) -> None:
        if name not in self.toy.lives:
            tokens = [*range(shared), *range(100 * (prompt + 1), 100 * (prompt + 1) + MAX_TOKENS - shared)]
            self.prompts[name] = tokens, identity
            self.toy.start(name, tokens, identity)

    @rule(name=ids, tokens=st.integers(1, 20), trim=st.booleans())
    def compute(self, name: str, tokens: int, trim: bool) -> None:
        life = self.toy.lives.get(name)
        if life is not None and len(self.toy.queue) > 40:
            self.toy.compute(life, min(MAX_TOKENS, life.computed + tokens), trim=trim)

    @rule(name=ids)
    def preempt(self, name: str) -> None:
        if name in self.toy.lives:
            self.toy.preempt(name)

    @rule(name=ids)
    def resume(self, name: str) -> None:
        if name in self.prompts and name not in self.toy.lives:
            self.toy.start(name, *self.prompts[name])

    @rule(name=ids)
    def finish(self, name: str) -> None:
        self.toy.finish(name)

    # steps

    @rule(dropped=st.sampled_from([False, False, False, True]))
    def send(self, dropped: bool) -> None:
        _, step = self.toy.send(dropped=dropped)
        if not dropped:
            self.take(step)

    def take(self, step: Step) -> None:
        self.hear(self.copies.perform(self.scheduler.step(SESSION, step, 0.0)))

    def hear(self, replies: list[SidecarMessage]) -> None:
        for reply in replies:
            if isinstance(reply, StepDone):
                self.toy.settle(reply)

    @precondition(lambda self: self.copies.pending)
    @rule(data=st.data(), good=st.sampled_from([True, True, False]))
    def end_copy(self, data: Any, good: bool) -> None:
        position = data.draw(st.integers(0, len(self.copies.pending) - 1))
        self.hear((self.copies.complete if good else self.copies.fail)(position))

    @rule()
    def reset(self) -> None:
        """The engine's prefix cache is emptied, what runs is preempted."""
        self.last_id += 1
        self.copies.perform(self.scheduler.reset(SESSION, Reset(self.last_id)))
        self.toy.planner.reset()
        for name in list(self.toy.lives):
            self.toy.preempt(name)
        self.toy.cached.clear()
        self.toy.records[:] = [None] * BLOCKS

    @rule()
    def new_sidecar(self) -> None:
        """EOF: no copy touches our blocks any more, everything outstanding ends."""
        self.connect()
        self.hear([StepDone(step_id, 0, 0, 0) for step_id in list(self.toy.promised)])
        self.toy.planner.offer_all_again()

    @invariant()
    def the_book_counts_what_is_referenced(self) -> None:
        held = sum(len(life.held()) for life in self.toy.lives.values())
        assert sum(self.toy.references) == held + self.toy.book.held_blocks

    # the end

    def teardown(self) -> None:
        for _ in range(90):
            while self.copies.pending:
                self.hear(self.copies.complete(0))
            self.take(self.toy.send()[1])
        self.hear([reply for _ in list(self.copies.pending) for reply in self.copies.complete(0)])
        if self.lazy:
            self.check_what_is_cached()
        else:
            for life in self.toy.lives.values():
                self.check_life(life)
        for name in list(self.toy.lives):
            self.toy.finish(name)
        self.take(self.toy.send()[1])
        self.hear([reply for _ in list(self.copies.pending) for reply in self.copies.complete(0)])
        assert not any(self.toy.references)
        self.scheduler.pool.check()

    def resident(self, group: int, name: bytes) -> bool:
        return name in self.scheduler.pool.index[group]

    def check_life(self, life: Life) -> None:
        """Every confirmed block of a running request that is still in its table is in the tier."""
        for group, table in zip(self.groups, life.tables, strict=True):
            for number in range(life.computed // group.block_size if group.cacheable else 0):
                name = life.view.unit_hashes[(number + 1) * group.block_size // 4 - 1]
                here = table[number] is not None and self.toy.cached.get((group.index, name)) is not None
                assert not here or self.resident(group.index, name), (group.kind, number)

    def check_what_is_cached(self) -> None:
        """Every free block with content is in the tier, unless a parent of it is nowhere any more."""
        for block in self.toy.queue.after(None):
            record, content = self.toy.records[block], self.toy.content[block]
            if record is None or content is None or not self.groups[record.group].cacheable:
                continue
            group, units = self.groups[record.group], self.groups[record.group].block_size // 4
            parents = range(record.number if group.kind in PREFIX_KINDS else 0)
            names = [record.view.unit_hashes[(number + 1) * units - 1] for number in parents]
            whole = all(
                (group.index, name) in self.toy.cached or self.resident(group.index, name) for name in names
            )
            assert not whole or self.resident(group.index, content[1]), (group.kind, record.number)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("model", sorted(GROUPS))
def test_any_order_of_events(model: str, lazy: bool) -> None:
    machine = type("Planning", (Planning,), {"groups": GROUPS[model], "lazy": lazy})
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None, phases=phases)
    )
