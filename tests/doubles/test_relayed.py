"""A model engine, relayed, and every router's double behind it: each holds what the relay says, which is what the
engine holds, or less and said so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from core.engine_model import BLOCK_SIZE, EngineModel, closed, digest, key
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import dynamo, llm_d, sglang, vllm_router
from doubles.test_doubles import DOUBLES, TIERS, feed, held, said
from kvevents_service.core.metadata import Announcement
from kvevents_service.core.residency import key64
from kvevents_service.core.source import StreamSource

MAKE: dict[str, Callable[[], Any]] = {
    "dynamo": lambda: dynamo.Index(BLOCK_SIZE),
    "dynamo relay": lambda: dynamo.Index(BLOCK_SIZE, relay=True),
    "vllm-router": lambda: vllm_router.Index(BLOCK_SIZE),
    "llm-d": lambda: llm_d.Index(BLOCK_SIZE),
    "llm-d, old": lambda: llm_d.Index(BLOCK_SIZE, old=True),
    "sglang": lambda: sglang.Index(BLOCK_SIZE),
}


class Life:
    """An engine and its relay. knows: nothing was lost since the last restart or clear."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.engine = EngineModel(seed)
        self.source = StreamSource()
        self.knows = True

    def steps(self, count: int) -> Iterator[tuple[Announcement, ...]]:
        for _ in range(count):
            yield from self.random.choice(
                [self._run, self._run, self._run, self._lose, self._restart, self._blink]
            )()

    def _run(self) -> Iterator[tuple[Announcement, ...]]:
        yield self.source.apply(self.engine.batch())

    def _lose(self) -> Iterator[tuple[Announcement, ...]]:
        self.engine.batch()
        self.knows = False
        yield self.source.lose()

    def _restart(self) -> Iterator[tuple[Announcement, ...]]:
        yield self.source.doubt()
        self.engine, self.knows = EngineModel(self.random.randrange(1 << 32)), True
        yield self.source.apply(self.engine.batch())
        yield self.source.settle()

    def _blink(self) -> Iterator[tuple[Announcement, ...]]:
        yield self.source.hide()
        yield self.source.apply(self.engine.batch())
        yield self.source.show()

    def shown(self) -> set[int]:
        return {key64(run.hash_at(place)) for run in self.source.cut().runs() for place in range(run.blocks)}


@given(st.integers(0, 1 << 32))
@settings(max_examples=15)
@pytest.mark.parametrize("double", MAKE)
def test_a_router_holds_what_the_engine_holds_or_less_and_was_told_so(double: str, seed: int) -> None:
    life, index, dialect = Life(seed), MAKE[double](), DOUBLES[double][0]
    feed(index, dialect, life.steps(30))
    shown = life.shown()
    paths = [path for path, copies in life.engine.held.items() if copies]
    assert shown <= {key(path) for path in paths}
    if life.knows:
        assert shown == closed(life.engine.held)
    names = said(dialect, [digest(path) for path in paths if key(path) in shown])
    assert held(double, index) == ({TIERS[double]["GPU"]: names} if names else {})
