"""A model engine with copies, losses, restarts and resets on one side; the fold of what is announced on the other.

What is announced is what the source was told and holds, its parents included: exactly that, at every batch (I4),
parents first (I6), once (I8). It is never more than the engine holds, but for the time of a restatement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.engine_model import DEPTH, WIDTH, EngineModel, Path, closed, key, stored
from kvevents_service.core.announce import to_event
from kvevents_service.core.metadata import Announcement, Cleared
from kvevents_service.core.residency import Residency, keys64
from kvevents_service.core.source import SourceLimits, StreamSource
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


def all_paths(path: Path = ()) -> Iterator[Path]:
    for step in range(WIDTH if len(path) < DEPTH else 0):
        yield (*path, step)
        yield from all_paths((*path, step))


PATHS = {key(path): path for path in all_paths()}


def paths_of(event: BlockStored | BlockRemoved) -> list[Path]:
    return [PATHS[name] for name in keys64(event.block_hashes)]


class SourceMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 32))
    def start(self, seed: int) -> None:
        self.engine = EngineModel(seed)
        self.source = StreamSource(limits=SourceLimits(orphans=10_000))
        self.fold = Residency()
        self.told: Counter[Path] = Counter()
        """What the source was told of and holds, as an engine counts."""

    def hear(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.told.update(paths_of(event))
                case BlockRemoved():
                    for path in paths_of(event):
                        self.told[path] = max(0, self.told[path] - 1)
                case AllBlocksCleared():
                    self.told.clear()
        self.say(self.source.apply(events))

    def say(self, announcements: tuple[Announcement, ...]) -> None:
        assert not any(isinstance(item, Cleared) for item in announcements)
        self.fold.apply(map(to_event, announcements))

    @rule(batches=st.integers(1, 8))
    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.hear(self.engine.batch())

    @rule(batches=st.integers(1, 4))
    def lose(self, batches: int) -> None:
        """Batches that nobody can tell any more."""
        for _ in range(batches):
            self.engine.batch()
        self.told.clear()
        self.say(self.source.lose())

    @rule()
    def tell_nothing_known(self) -> None:
        """Removals and a clear of a tier of ours must not touch it."""
        before = len(self.fold)
        self.say(self.source.apply([BlockRemoved([12345], "GPU"), BlockRemoved([12345], "CPU")]))
        assert len(self.fold) == before

    @rule(seed=st.integers(0, 1 << 32), batches=st.integers(0, 6), cleared=st.booleans())
    def restart(self, seed: int, batches: int, cleared: bool) -> None:
        """Another engine, which tells all it did so far."""
        before = set(self.fold.hashes("GPU", 0))
        self.engine = EngineModel(seed)
        self.say(self.source.doubt())
        assert self.source.hidden or self.fold.hashes("GPU", 0) == before
        self.told.clear()
        if cleared:
            self.hear([AllBlocksCleared()])
        for _ in range(batches):
            self.hear(self.engine.batch())
        self.settle()

    @rule()
    def tell_again(self) -> None:
        """The whole state, as one that has snapshots tells it: nothing may be missing meanwhile."""
        shown = closed(self.told) if not self.source.hidden else set()
        self.say(self.source.doubt())
        self.engine.held = Counter({path: 1 for path, copies in self.engine.held.items() if copies})
        self.told.clear()
        self.hear([AllBlocksCleared()])
        for path in sorted(self.engine.held, key=len):
            self.hear([stored(path)])
            assert shown <= self.fold.hashes("GPU", 0)
        self.settle()

    def settle(self) -> None:
        self.say(self.source.settle())
        while self.source.settling:
            self.say(self.source.settle())

    @rule()
    def hide(self) -> None:
        self.say(self.source.hide())

    @rule()
    def show(self) -> None:
        self.say(self.source.show())

    @invariant()
    def announced_is_what_is_held(self) -> None:
        self.source.check()
        self.fold.check()
        expected = set() if self.source.hidden else closed(self.told)
        assert self.fold.hashes("GPU", 0) == expected
        assert expected <= {key(path) for path, copies in self.engine.held.items() if copies}
        state = Residency()
        state.apply(map(to_event, self.source.cut().runs()))
        state.check()
        assert state.hashes("GPU", 0) == expected
        assert sum(self.source.resident().values()) == len(expected)


SourceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSource = SourceMachine.TestCase
