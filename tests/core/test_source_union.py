"""Several sources of one rank: what is announced is what any of them holds, each block once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine_model import EngineModel, key, stored
from kvevents_service.core.announce import to_event
from kvevents_service.core.metadata import Announcement
from kvevents_service.core.residency import Residency
from kvevents_service.core.source import StreamSource
from kvevents_service.core.source_holding import SourceLimits
from kvevents_service.core.source_union import SourceUnion
from kvevents_service.wire.events import BlockRemoved

A, AB, ABC = (0,), (0, 1), (0, 1, 1)


class Life:
    """Engines with sources that are one, and what a reader knows."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = Random(seed)
        self.engines = [EngineModel(seed + number) for number in range(count)]
        limits = SourceLimits(slice_blocks=self.random.choice((1, 4, 512)))
        self.sources = [StreamSource(limits=limits) for _ in range(count)]
        self.union = SourceUnion(self.sources)
        self.fold = Residency()

    def step(self) -> None:
        place = self.random.randrange(len(self.sources))
        source, engine = self.sources[place], self.engines[place]
        turn = self.random.choice(["run"] * 6 + ["lose", "hide", "show", "step", "step"])
        self.say(source, source.apply(engine.batch()) if turn == "run" else getattr(source, turn)())

    def say(self, source: StreamSource, said: Sequence[Announcement]) -> None:
        self.fold.apply(map(to_event, self.union.told_of(source, said)))
        self.fold.check()

    def check(self) -> None:
        """The reader knows the union, and so does one that comes now."""
        shown: set[int] = set()
        for source in self.sources:
            own = Residency()
            own.apply(map(to_event, source.cut().runs()))
            shown |= own.hashes("GPU", 0)
        assert self.fold.hashes("GPU", 0) == shown
        late, cut = Residency(), self.union.cut()
        late.apply(map(to_event, cut.runs()))
        late.check()
        assert late.hashes("GPU", 0) == shown
        assert sum(blocks for blocks, _ in cut.sizes()) >= len(shown)


@given(st.integers(0, 1 << 32), st.integers(2, 3))
@settings(max_examples=40, deadline=None)
def test_what_is_announced_is_what_any_of_them_holds(seed: int, count: int) -> None:
    life = Life(seed, count)
    for _ in range(60):
        life.step()
        life.check()


def test_a_block_goes_with_the_last_that_has_it() -> None:
    one, other = StreamSource(), StreamSource()
    union = SourceUnion([one, other])
    assert len(union.told_of(one, one.apply([stored(AB, 2)]))) == 1
    (rest,) = union.told_of(other, other.apply([stored(ABC, 3)]))
    assert (rest.blocks, rest.parent_block_hash is not None) == (1, True)  # type: ignore[union-attr]
    gone = BlockRemoved([key(AB), key(A)], "GPU")
    assert union.told_of(one, one.apply([gone])) == ()
    (last,) = union.told_of(other, other.apply([BlockRemoved([key(ABC), key(AB), key(A)], "GPU")]))
    assert len(last.block_hashes) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("medium", ["CPU", "GPU"])
def test_another_tier_of_another_source_is_its_own(medium: str) -> None:
    one, other = StreamSource(), StreamSource()
    union = SourceUnion([one, other])
    union.told_of(one, one.apply([stored(AB, 2)]))
    said = union.told_of(other, other.apply([stored(AB, 2, medium=medium)]))
    assert bool(said) == (medium == "CPU")
