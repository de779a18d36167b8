"""The scheduler half under every order of a vLLM's doings that hypothesis can think of (I1, I9, I12).

`ToyVllm` checks that an offered block holds what is offered, from the offer to the end of its copy, and a loaded
one what its request wants. At the end every request has ended, and no block is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine.vllm_toy import FULL, WINDOW, ToyVllm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvevents_service.wire.control import GroupSpec

NAMES = "abcd"
names = st.sampled_from(NAMES)


class Serving(RuleBasedStateMachine):
    """One vLLM with up to three steps in flight, and one sidecar after the other."""

    groups: Sequence[GroupSpec] = (FULL,)
    lazy = False
    batch = 1
    blocks = 36
    last_steps = False

    def __init__(self) -> None:
        super().__init__()
        self.vllm = ToyVllm(
            self.groups, blocks=self.blocks, lazy=self.lazy, lag=1, batch=self.batch, last_steps=self.last_steps
        )

    @rule(name=names, start=st.integers(0, 2), length=st.integers(1, 40), more=st.integers(0, 9))
    def add(self, name: str, start: int, length: int, more: int) -> None:
        if name not in self.vllm.requests and name not in self.vllm.loading:
            self.vllm.add(name, range(start, start + length), more)

    @precondition(lambda self: len(self.vllm.flights) < 3)
    @rule(chunk=st.integers(1, 20))
    def schedule(self, chunk: int) -> None:
        self.vllm.schedule(chunk)

    @rule()
    def run(self) -> None:
        self.vllm.run()

    @rule(steps=st.integers(2, 5))
    def go_on(self, steps: int) -> None:
        """So far that there is something to offer."""
        for _ in range(steps):
            self.vllm.step()

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.vllm.abort(name)

    @rule(name=names)
    def preempt(self, name: str) -> None:
        self.vllm.preempt(name)

    @rule()
    def preempt_all(self) -> None:
        """A reset of running requests alone: nobody is asked."""
        for name in NAMES:
            self.vllm.preempt(name, asked=False)
        self.vllm.pool.reset()

    @rule()
    def deaf(self) -> None:
        self.vllm.client.deaf = not self.vllm.client.deaf

    @rule()
    def slow(self) -> None:
        self.vllm.client.sluggish = not self.vllm.client.sluggish

    @rule(position=st.integers(0, 9), good=st.booleans())
    def end_copy(self, position: int, good: bool) -> None:
        self.vllm.client.end_copy(position, good=good)

    @rule(seconds=st.sampled_from([0.5, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.vllm.clock.advance(seconds)

    @rule()
    def evict(self) -> None:
        """The engine's own cache forgets, if nothing is in use."""
        self.vllm.pool.reset()

    @rule()
    def reset(self) -> None:
        if self.vllm.pool.reset():
            self.vllm.half.reset()

    @rule()
    def sidecar_leaves(self) -> None:
        self.vllm.client.away = True
        self.vllm.client.connect()

    @rule()
    def sidecar_comes(self) -> None:
        self.vllm.client.away = False

    def teardown(self) -> None:
        self.vllm.client.away = self.vllm.client.deaf = False
        self.vllm.drain()


class Windowed(Serving):
    groups = (FULL, WINDOW)


class Lazy(Serving):
    lazy = True


class LazyWindowed(Windowed):
    lazy = True


class Batched(Serving):
    batch = 8


class BatchedByThree(Serving):
    batch = 3
    last_steps = True


class BatchedWindowed(Windowed):
    batch = 8
    last_steps = True


class Narrow(Serving):
    """A block that one request gives up is the next one's at once."""

    blocks = 24
    batch = 3


MACHINES = [Narrow, Serving, Windowed, Lazy, LazyWindowed, Batched, BatchedByThree, BatchedWindowed]


@pytest.mark.parametrize("machine", MACHINES)
def test_whatever_happens_bytes_are_right_and_blocks_come_back(machine: type[Serving]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
