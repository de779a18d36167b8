"""Whatever is lost, late, repeated or restarted: the fold of what a consumer was told ends as what is resident.

`Life` is a random history against a publisher that answers like our sidecar; `VllmLife` against one that has only
what it retains: there the fold may lack blocks, but then a loss was told, and it never has one that is not there.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.publishers import ModelPublisher, blocks_of, removed, stored
from kvevents_service.core.residency import Residency
from kvevents_service.core.sequence import Ask, Deliver, Gap, HoldLimits, Restart, Sequencer, Step
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared, Event
from kvevents_service.wire.frames import LiveFrame

BLOCKS = st.integers(1, 6)
MEDIA = st.sampled_from(["GPU", "CPU"])


class Consumer:
    """Folds what it is told, and forgets at every loss, as the docs say."""

    def __init__(self) -> None:
        self.fold = Residency()
        self.losses = 0
        self.told: list[Step] = []

    def take(self, step: Step) -> None:
        self.told.append(step)
        if isinstance(step, Deliver):
            self.fold.apply(decode_batch(step.frame.payload)[0].events)
        else:
            self.losses += isinstance(step, Gap)
            self.fold.forget()


class Life(RuleBasedStateMachine):
    snapshots = True
    with_ids = False
    by_snapshot = False
    """The whole state is asked for at the snapshot endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = 0
        self.wire: deque[LiveFrame] = deque()
        self.queue: deque[Step] = deque()
        self.consumer = Consumer()
        self.asked: int | None = None
        self.answer: deque[LiveFrame] | None = None
        self.dead = False
        """The process that was asked has gone: nobody is going to answer that request."""

    @initialize(
        batches=st.sampled_from([1, 3, 100]),
        retained=st.sampled_from([1, 3, 100]),
        window=st.sampled_from([1, 2, 5, 100]),
        first_seq=st.sampled_from([0, 1000]),
        before=st.lists(BLOCKS, max_size=8),
    )
    def start(self, batches: int, retained: int, window: int, first_seq: int, before: list[int]) -> None:
        self.shape = {"retained": retained, "window": window, "snapshots": self.snapshots}
        self.publisher = self.new_life(first_seq)
        for block in before:
            self.toggle(block, "CPU", lost=True)
        self.sequence = Sequencer(replay=True, limits=HoldLimits(batches))
        self.perform(self.sequence.start())

    def new_life(self, first_seq: int) -> ModelPublisher:
        self.lives += 1
        publisher_id = b"%016d" % self.lives if self.with_ids else None
        return ModelPublisher(first_seq=first_seq, publisher_id=publisher_id, **self.shape)

    # the publisher

    def send(self, *events: Event, lost: bool = False) -> None:
        frame = self.publisher.publish(*events)
        if not lost:
            self.wire.append(frame)

    @rule(block=BLOCKS, medium=MEDIA, lost=st.booleans())
    def toggle(self, block: int, medium: str, lost: bool) -> None:
        there = block in self.publisher.fold.hashes(medium, 0)
        self.send((removed if there else stored)(block, medium), lost=lost)

    @rule(lost=st.booleans())
    def clear(self, lost: bool) -> None:
        self.send(AllBlocksCleared(), lost=lost)

    @rule(skipped=st.integers(0, 200), survivors=st.booleans(), lost=st.booleans())
    def restart_above(self, skipped: int, survivors: bool, lost: bool) -> None:
        """As the sidecar with a state directory: it goes on above, clears, and tells what survived."""
        kept = blocks_of(self.publisher.fold) if survivors else {}
        self.replace(self.new_life(self.publisher.next_seq + skipped))
        self.send(AllBlocksCleared(), lost=lost)
        for shelf, blocks in kept.items():
            self.send(*(stored(block, shelf.medium) for block in sorted(blocks)))

    def replace(self, publisher: ModelPublisher) -> None:
        self.publisher = publisher
        self.dead = self.asked is not None

    # the way

    @precondition(lambda self: self.wire)
    @rule(twice=st.booleans())
    def receive(self, twice: bool) -> None:
        frame = self.wire.popleft()
        for _ in range(1 + twice):
            self.perform(self.sequence.live(frame))

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answer_some(self) -> None:
        if self.dead:
            return self.time_out()
        if self.by_snapshot and self.asked == 0:
            return self.perform(self.sequence.snapshot(self.publisher.snapshot()))
        if self.answer is None:
            self.answer = deque(self.publisher.reply(self.asked))
        if self.answer:
            return self.perform(self.sequence.replayed(self.answer.popleft()))
        return self.perform(self.sequence.end())

    @precondition(lambda self: self.asked is not None)
    @rule()
    def time_out(self) -> None:
        self.perform(self.sequence.give_up())

    @precondition(lambda self: self.answer)
    @rule()
    def break_off(self) -> None:
        """An answer that stops, twice."""
        self.answer_some()
        for _ in range(2):
            if self.asked is not None:
                self.time_out()

    @precondition(lambda self: not self.wire and self.asked is None)
    @rule()
    def settle(self) -> None:
        self.sequence.settle()

    @precondition(lambda self: self.asked is None)
    @rule()
    def refresh(self) -> None:
        if self.sequence.distrusted:
            self.perform(self.sequence.refresh())

    def perform(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self.asked, self.answer, self.dead = step.start, None, False
            else:
                self.queue.append(step)
        if not self.sequence.replaying:
            self.asked = self.answer = None

    # the consumer, who may be slow

    @precondition(lambda self: self.queue)
    @rule()
    def consume(self) -> None:
        self.consumer.take(self.queue.popleft())

    @invariant()
    def what_waits_is_bounded(self) -> None:
        if hasattr(self, "sequence"):
            assert self.sequence.stats()["held"] <= self.sequence.limits.batches

    # the end: the network is well, a heartbeat comes

    def calm(self) -> None:
        for _ in range(10_000):
            if self.asked is not None:
                self.answer_some()
            elif self.wire:
                self.receive(False)
            elif self.sequence.distrusted:
                self.refresh()
            else:
                break
        else:
            raise AssertionError("it asks for ever")
        while self.queue:
            self.consume()

    def teardown(self) -> None:
        if not hasattr(self, "sequence"):
            return
        self.calm()
        self.sequence.settle()
        self.send()
        self.calm()
        self.check_end()

    def check_end(self) -> None:
        assert blocks_of(self.consumer.fold) == blocks_of(self.publisher.fold)


class LifeWithIds(Life):
    """Publishers that say who they are may start anew at any number."""

    with_ids = True

    @rule(first_seq=st.integers(0, 50), lost=st.lists(st.booleans(), max_size=4))
    def restart_anywhere(self, first_seq: int, lost: list[bool]) -> None:
        self.replace(self.new_life(first_seq))
        for number, one in enumerate(lost):
            self.send(stored(number + 1), lost=one)


class SnapshotLife(LifeWithIds):
    by_snapshot = True


class BackwardLife(Life):
    """Without a state directory and without ids: it starts at 0, and its first number heard is lower."""

    @precondition(lambda self: not self.wire and self.asked is None)
    @rule()
    def restart_from_0(self) -> None:
        if self.sequence.settled and self.publisher.next_seq > 1 and self.heard_last():
            self.replace(self.new_life(0))
            self.send(stored(1))
            self.receive(False)

    def heard_last(self) -> bool:
        return repr(self.sequence).split()[2] == f"next={self.publisher.next_seq}"


class VllmLife(Life):
    snapshots = False

    def check_end(self) -> None:
        found, real = blocks_of(self.consumer.fold), blocks_of(self.publisher.fold)
        for shelf, blocks in found.items():
            assert blocks <= real.get(shelf, set())
        assert found == real or self.consumer.losses or self.restarted()

    def restarted(self) -> bool:
        """Told as well."""
        return any(isinstance(step, Restart) for step in self.consumer.told)


TestLife = Life.TestCase
TestLifeWithIds = LifeWithIds.TestCase
TestSnapshotLife = SnapshotLife.TestCase
TestBackwardLife = BackwardLife.TestCase
TestVllmLife = VllmLife.TestCase
for _case in (TestLife, TestLifeWithIds, TestSnapshotLife, TestBackwardLife, TestVllmLife):
    _case.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
