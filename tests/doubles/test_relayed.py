"""A model engine, relayed, and every router's double behind it: each holds what the relay says, which is what the
engine holds, or less and said so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from core.engine_model import BLOCK_SIZE, EngineModel, closed, digest, key, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import aibrix, dynamo, llm_d, mooncake, sglang, vllm_router
from doubles.test_doubles import DOUBLES, TIERS, feed, held, said
from kvevents_service.core.metadata import Announcement
from kvevents_service.core.residency import Residency, key64
from kvevents_service.core.source import StreamSource
from kvevents_service.core.source_holding import SourceLimits
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.frames import parse_live

MAKE: dict[str, Callable[[], Any]] = {
    "dynamo": lambda: dynamo.Index(BLOCK_SIZE),
    "dynamo relay": lambda: dynamo.Index(BLOCK_SIZE, relay=True),
    "vllm-router": lambda: vllm_router.Index(BLOCK_SIZE),
    "llm-d": lambda: llm_d.Index(BLOCK_SIZE),
    "llm-d, old": lambda: llm_d.Index(BLOCK_SIZE, old=True),
    "mooncake": lambda: mooncake.Index(BLOCK_SIZE),
    "aibrix": lambda: aibrix.Index(BLOCK_SIZE),
    "sglang": lambda: sglang.Index(BLOCK_SIZE),
    "vllm": lambda: Folded(),
    "vllm-array": lambda: Folded(),
}
DIALECT_OF = {name: dialect for name, (dialect, _) in DOUBLES.items()} | {
    "vllm": "vllm",
    "vllm-array": "vllm-array",
}
DIGESTS = {"aibrix": (0,)}
"""Its names are the first bytes of whole digests, so the engine has to say those."""


class Folded:
    """A reader of every tier and group: our own fold, which has counted nothing that a true stream never does."""

    def __init__(self) -> None:
        self.fold = Residency()

    def feed(self, frames: list[bytes]) -> None:
        self.fold.apply(decode_batch(parse_live(frames).payload).batch.events)
        self.fold.check()


def held_on_gpu(double: str, index: Any) -> set[Any]:
    """By the names of its dialect."""
    match index:
        case Folded():
            return index.fold.hashes("GPU", 0)
        case mooncake.Index():
            assert not index.stale
            return index.held
        case aibrix.Index():
            return index.tree.held().get(aibrix.POD, set())
    by_tier = held(double, index)
    assert by_tier.keys() <= {TIERS[double]["GPU"]}
    return by_tier.get(TIERS[double]["GPU"], set())


class Life:
    """An engine and its relay. knows: nothing was lost since the last restart or clear."""

    def __init__(self, seed: int, forms: Sequence[int]) -> None:
        self.random = Random(seed)
        self.forms = forms
        self.engine = EngineModel(seed, forms)
        self.source = StreamSource(limits=SourceLimits(slice_blocks=self.random.choice((1, 3, 512))))
        self.knows = True

    def steps(self, count: int) -> Iterator[tuple[Announcement, ...]]:
        for _ in range(count):
            yield from self.random.choice(
                [self._run, self._run, self._run, self._lose, self._restart, self._blink, self._reset]
            )()
            for _ in range(self.random.choice((0, 1, 100))):
                yield self.source.step()
        while self.source.settling:
            yield self.source.step()

    def _reset(self) -> Iterator[tuple[Announcement, ...]]:
        """As vLLM does with a connector: two clears in a batch, and stores between them. Hashes are of one form."""
        stores = [stored(path, form=self.forms[0]) for path in ((0, 1), (0,))]
        yield self.source.apply([AllBlocksCleared(), *stores, AllBlocksCleared()])
        self.engine.held.clear()
        self.knows = True

    def _run(self) -> Iterator[tuple[Announcement, ...]]:
        yield self.source.apply(self.engine.batch())

    def _lose(self) -> Iterator[tuple[Announcement, ...]]:
        self.engine.batch()
        self.knows = False
        yield self.source.lose()

    def _restart(self) -> Iterator[tuple[Announcement, ...]]:
        yield self.source.doubt()
        self.engine, self.knows = EngineModel(self.random.randrange(1 << 32), self.forms), True
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
    life, index, dialect = Life(seed, DIGESTS.get(double, range(3))), MAKE[double](), DIALECT_OF[double]
    feed(index, dialect, life.steps(30))
    shown = life.shown()
    paths = [path for path, copies in life.engine.held.items() if copies]
    assert shown <= {key(path) for path in paths}
    if life.knows:
        assert shown == closed(life.engine.held)
    names = said(dialect, [digest(path) for path in paths if key(path) in shown])
    assert held_on_gpu(double, index) == names
