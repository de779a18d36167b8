"""Whatever happens before, between and while a reply is read: its fold is the resident set at its last number."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.prompts import FULL
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, JournalLimits
from kvevents_service.core.metadata import Announcement, Cleared, snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.replay import Recovery, ReplayLimits, Reply, Wait
from kvevents_service.core.residency import Residency
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.snapshot import MessageLimits, PartLimits
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.testing import Chain, HeldCopies, ManualClock, make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import GroupSpec, Reset, Step
from kvevents_service.wire.frames import Payload

GROUPS = (FULL, GroupSpec(1, "sliding_window", FULL.block_size, 8))
SPEC = TierSpec("CPU", 10, 32, GROUPS, FULL.block_size)
REACH = 40
LIMITS = ReplayLimits(reach=REACH, snapshots=2, fresh_s=5.0, parts=PartLimits(weight=40, parts=12))
ENCODINGS = [Encoding(), Encoding(dp_rank=3)]

backs = st.one_of(st.integers(-2, 9), st.integers(0, 60))
rarely = st.sampled_from([False, False, False, True])

State = frozenset[tuple[int, int]]


def state_of(residency: Residency) -> State:
    return frozenset((shelf.group, name) for shelf, names in residency.shelves.items() for name in names)


class Reader(NamedTuple):
    """A reader that knew all before `start`, and its reply."""

    reply: Reply
    start: int
    fold: Residency


class Journaled(HeldCopies):
    """Copies that end when told, and a journal that is told of everything at once."""

    def __init__(self, scheduler: OffloadScheduler, journal: Journal) -> None:
        super().__init__(scheduler)
        self.journal = journal
        self.fold = Residency()
        self.truth: dict[int, State] = {journal.next_seq - 1: frozenset()}

    def perform(self, commands: object) -> list[object]:  # type: ignore[override]
        said = len(self.published)
        replies = super().perform(commands)  # type: ignore[arg-type]
        for announcement in self.published[said:]:
            self.say((announcement,))
        return replies  # type: ignore[return-value]

    def say(self, announcements: tuple[Announcement, ...]) -> None:
        self.fold.apply(decode_batch(Encoding().encode(announcements, 1.0)).batch.events)
        self.truth[self.journal.append(announcements, 1.0)] = state_of(self.fold)


def chain_of(family: int, blocks: int) -> Chain:
    return make_chain(range(100 * family, 100 * family + 2 * blocks), 2)


class ReplayMachine(RuleBasedStateMachine):
    """A tier of ten blocks, a journal that forgets and drops, and readers that join at any time."""

    @initialize(first=st.sampled_from([0, 1_000_000]))
    def begin(self, first: int) -> None:
        self.journal = Journal(JournalLimits(6, 40, 5, 10_000), first)
        self.scheduler = OffloadScheduler(SPEC, Limits())
        self.scheduler.hello(1, 1000)
        self.copies = Journaled(self.scheduler, self.journal)
        self.clock = ManualClock()
        self.recovery = Recovery(self.journal, ENCODINGS, clock=self.clock, wall_clock=lambda: 1.0, limits=LIMITS)
        self.recovery.sources = lambda: [self.scheduler.pool]
        self.readers: list[Reader] = []
        self.steps = 0
        if first:
            self.copies.say((Cleared(),))

    # the tier

    @rule(family=st.integers(0, 2), blocks=st.integers(1, 6), group=st.integers(0, 1), at_once=st.booleans())
    def store(self, family: int, blocks: int, group: int, at_once: bool) -> None:
        self.steps += 1
        chain = chain_of(family, blocks)
        step = Step(self.steps, [chain.offer(range(blocks), group=group)], [], [])
        self.copies.perform(self.scheduler.step(1, step, 0.0))
        while at_once and self.copies.pending:
            self.copies.complete()

    @precondition(lambda self: self.copies.pending)
    @rule(place=st.integers(0, 9), good=st.booleans())
    def end_copy(self, place: int, good: bool) -> None:
        place %= len(self.copies.pending)
        (self.copies.complete if good else self.copies.fail)(place)

    @rule()
    def reset(self) -> None:
        self.copies.perform(self.scheduler.reset(1, Reset(1)))

    @rule(count=st.integers(1, 9))
    def heartbeats(self, count: int) -> None:
        for _ in range(count):
            self.copies.say(())

    # the publisher

    @rule(count=st.integers(1, 9), loses=rarely)
    def send(self, count: int, loses: bool) -> None:
        for _ in range(count):
            batch = self.journal.take_pending()
            if batch is None:
                return
            if loses:
                self.journal.lose(batch.seq)
            else:
                self.journal.retain(batch.seq, *(one.encode(batch.announcements, 1.0) for one in ENCODINGS))

    @rule(parts=st.integers(1, 9))
    def render(self, parts: int) -> None:
        for _ in range(parts):
            if self.recovery.rendering is not None:
                self.recovery.rendering.render_next()

    @rule(seconds=st.sampled_from([1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.recovery.forget_old()

    # readers

    @rule(back=backs, encoding=st.integers(0, 1), exact=st.booleans(), at_once=st.booleans())
    def join(self, back: int, encoding: int, exact: bool, at_once: bool) -> None:
        start = max(0, self.journal.next_seq - back)
        before = self.journal.next_seq
        reply = self.recovery.answer(start, encoding, exact=exact)
        for seq in range(before, self.journal.next_seq):  # empty batches that the snapshot needs
            self.copies.truth[seq] = self.copies.truth[before - 1]
        if reply is None:
            assert self.recovery.snapshots, "nothing to wait for"
            return
        late = reply.snapshot is not None and not exact
        assert reply.seq == (max(start, before - REACH) if late else start)
        fold = Residency()
        self.readers.append(Reader(reply, start, fold))
        if reply.snapshot is None:
            fold.shelves = self.shelves_at(start - 1)
        if at_once:
            self.render(99)
            self.send(99, False)
            self.read(-1, 999)

    def shelves_at(self, seq: int) -> dict[object, dict[int, None]]:  # type: ignore[type-arg]
        from kvevents_service.core.residency import Shelf

        shelves: dict[object, dict[int, None]] = {}
        for group, name in self.copies.truth.get(seq, frozenset()):
            shelves.setdefault(Shelf("CPU", group), {})[name] = None
        return shelves

    @precondition(lambda self: self.readers)
    @rule(place=st.integers(0, 9), count=st.integers(1, 30))
    def read(self, place: int, count: int) -> None:
        reader = self.readers[place % len(self.readers)]
        for _ in range(count):
            payload = reader.reply.payload()
            if isinstance(payload, Wait):
                return
            if payload is None:
                self.leave(reader)
                return
            assert reader.reply.seq < self.journal.unsent_from
            reader.fold.apply(decode_batch(payload).batch.events)
            reader.reply.advance()

    def leave(self, reader: Reader) -> None:
        """What it knows is the state at the last number it got, at the end or where something was missing."""
        reply = reader.reply
        if not reply.complete:
            assert reply.seq < self.journal.whole_from
        if reply.seq - 1 in self.copies.truth and reply.seq > reader.start:
            assert state_of(reader.fold) == self.copies.truth[reply.seq - 1]
        reply.close()
        self.readers.remove(reader)

    @precondition(lambda self: self.readers)
    @rule(place=st.integers(0, 9))
    def hang_up(self, place: int) -> None:
        reader = self.readers.pop(place % len(self.readers))
        reader.reply.close()

    @rule(encoding=st.integers(0, 1))
    def take_whole(self, encoding: int) -> None:
        reply = self.recovery.whole(encoding)
        if reply is None:
            return
        self.render(99)
        self.send(99, False)
        assert reply.ready
        payloads = reply.payloads()
        if payloads is not None:
            fold = Residency()
            for payload in payloads:
                fold.apply(decode_batch(payload).batch.events)
            assert state_of(fold) == self.copies.truth[reply.end]
        reply.close()

    # always

    @invariant()
    def nothing_is_out_of_bounds(self) -> None:
        if not hasattr(self, "recovery"):
            return
        snapshots = self.recovery.snapshots
        assert len(snapshots) <= LIMITS.snapshots
        assert sum(not snapshot.done for snapshot in snapshots) <= 1
        assert sum(snapshot.readers for snapshot in snapshots) == sum(
            reader.reply.snapshot is not None for reader in self.readers
        )

    @invariant()
    def the_stream_is_true(self) -> None:
        if not hasattr(self, "recovery"):
            return
        pool = self.scheduler.pool
        ready = {(group, int.from_bytes(name[-8:], "big")) for group in (0, 1) for name in pool.ready_hashes(group)}
        assert self.copies.truth[self.journal.next_seq - 1] == ready


ReplayMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestReplayMachine = ReplayMachine.TestCase


# single cases


class Desk:
    """A recovery, at first with nothing resident."""

    def __init__(self, first: int = 0, batches: int = 0, retained: int = 100, limits: object = None) -> None:
        self.clock = ManualClock()
        self.journal = Journal(JournalLimits(retained_batches=retained), first)
        self.recovery = Recovery(
            self.journal, [Encoding()], clock=self.clock, wall_clock=lambda: 1.0, limits=limits
        )  # type: ignore[arg-type]
        for _ in range(batches):
            self.journal.append((), 1.0)
        self.send()

    def send(self) -> None:
        while (batch := self.journal.take_pending()) is not None:
            self.journal.retain(batch.seq, Encoding().encode(batch.announcements, batch.ts))

    def more(self, batches: int) -> None:
        for _ in range(batches):
            self.journal.append((), 2.0)
            self.send()

    def resident(self, blocks: int) -> None:
        pool = BlockPool(blocks, 1)
        chain = chain_of(0, blocks)
        stored = pool.allocate(snapshot(chain.offer(range(blocks)), FULL, "CPU", 32), list(chain.hashes), None)
        pool.commit(stored.slots)
        self.recovery.sources = lambda: [pool]

    def numbers(self, start: int, **options: bool) -> list[int]:
        """Those of a whole answer. It is closed."""
        reply = self.recovery.answer(start, 0, **options)
        assert reply is not None
        while self.recovery.rendering is not None:
            self.recovery.rendering.render_next()
        self.send()
        seqs = []
        while isinstance(reply.payload(), Payload):
            seqs.append(reply.seq)
            reply.advance()
        assert reply.payload() is None
        reply.close()
        return seqs


@pytest.mark.parametrize("start", [3, 4])
def test_the_newest_and_the_future(start: int) -> None:
    assert Desk(batches=4).numbers(start) == ([3] if start == 3 else [])


def test_a_late_start_begins_ten_thousand_numbers_back() -> None:
    seqs = Desk(first=1_000_000, batches=50).numbers(7)
    assert seqs == list(range(1_000_050 - 10_000, 1_000_050))


def test_an_exact_start_begins_where_it_was_asked() -> None:
    desk = Desk(first=20_000, batches=5)
    assert desk.numbers(3, exact=True) == list(range(3, 20_005))


def test_a_start_that_is_retained_needs_no_snapshot() -> None:
    desk = Desk(batches=9, retained=5)
    assert desk.numbers(4) == [4, 5, 6, 7, 8]
    assert desk.recovery.made == 0
    assert desk.numbers(3) == [3, 4, 5, 6, 7, 8]
    assert desk.recovery.made == 1


def test_many_joiners_share_one_snapshot_and_later_batches_follow_it() -> None:
    desk = Desk(batches=9, retained=5)
    assert [desk.numbers(start) for start in (0, 2, 0)] == [list(range(9)), list(range(2, 9)), list(range(9))]
    desk.journal.append((), 2.0)
    desk.send()
    assert desk.numbers(0) == list(range(10))
    assert desk.recovery.made == 1
    desk.clock.advance(5.5)
    desk.numbers(0)
    assert desk.recovery.made == 2


def test_a_snapshot_is_not_shared_once_its_followers_are_gone() -> None:
    desk = Desk(batches=9, retained=5)
    desk.numbers(0)
    for _ in range(7):
        desk.journal.append((), 2.0)
    desk.send()
    desk.numbers(0)
    assert desk.recovery.made == 2


def test_a_state_that_needs_more_numbers_than_there_are_gets_them() -> None:
    desk = Desk(batches=9, retained=1, limits=LIMITS)
    desk.resident(10)
    seqs = desk.numbers(7)
    assert seqs[0] == 7
    assert len(seqs) >= 5  # two blocks a part
    assert desk.recovery.heartbeats == desk.journal.next_seq - 9
    last = desk.journal.next_seq - 1
    desk.journal.lose(last)
    assert desk.numbers(last)[0] == last  # the snapshot before has no numbers left for it
    assert desk.recovery.made == 2


def test_an_exact_reply_has_the_whole_state_in_its_first_number() -> None:
    desk = Desk(batches=9, retained=1, limits=LIMITS)
    desk.resident(10)
    reply = desk.recovery.answer(7, 0, exact=True)
    assert reply is not None
    assert isinstance(reply.payload(), Wait)
    while desk.recovery.rendering is not None:
        desk.recovery.rendering.render_next()
    fold = Residency()
    payload = reply.payload()
    assert isinstance(payload, Payload)
    fold.apply(decode_batch(payload).batch.events)
    assert len(fold) == 10
    reply.advance()
    assert decode_batch(reply.payload()).batch.events == []  # type: ignore[arg-type]
    assert desk.recovery.heartbeats == 0
    assert not reply.complete
    reply.advance()
    assert reply.complete


@pytest.mark.parametrize("most_bytes", [0, -1])
def test_an_exact_reply_has_no_more_bytes_than_its_readers_fold_in_time(most_bytes: int) -> None:
    desk = Desk(batches=9, retained=5)
    size = len(Encoding().encode((), 1.0))
    desk.recovery.limits = ReplayLimits(exact=MessageLimits(3 * size + most_bytes))
    assert desk.numbers(6, exact=True) == ([6, 7, 8] if most_bytes == 0 else [6, 7])
    assert desk.numbers(6) == [6, 7, 8]


def test_a_state_too_large_for_an_exact_reply_is_not_told_in_part() -> None:
    desk = Desk(batches=9, retained=1, limits=LIMITS._replace(exact=MessageLimits(200)))
    desk.resident(10)
    reply = desk.recovery.answer(3, 0, exact=True)
    assert reply is not None
    while desk.recovery.rendering is not None:
        assert isinstance(reply.payload(), Wait)
        desk.recovery.rendering.render_next()
    assert reply.payload() is None
    assert not reply.complete


def test_an_exact_start_that_is_out_of_reach_gets_nothing() -> None:
    desk = Desk(first=1_000_000, batches=5, limits=ReplayLimits(exact_reach=100))
    reply = desk.recovery.answer(1_000_004 - 100, 0, exact=True)
    assert reply is not None
    assert (reply.payload(), reply.complete, desk.recovery.made) == (None, False, 0)
    assert desk.numbers(1_000_004 - 99, exact=True) == list(range(1_000_004 - 99, 1_000_005))


def test_what_a_reply_under_way_needs_is_kept_and_no_longer() -> None:
    desk = Desk(batches=9, retained=2)
    desk.numbers(0)
    desk.more(2)
    late = desk.recovery.answer(0, 0)  # shares the snapshot: 9 and 10 are to follow it
    retained = desk.recovery.answer(9, 0)
    assert late is not None
    assert retained is not None
    assert desk.recovery.made == 1
    desk.more(6)
    assert desk.journal.whole_from == 9
    retained.close()
    desk.more(1)
    assert desk.journal.whole_from == 9
    while isinstance(late.payload(), Payload):
        late.advance()
    assert late.complete
    late.close()
    desk.more(1)
    assert desk.journal.whole_from == 17


def test_what_is_kept_for_replies_is_bounded() -> None:
    desk = Desk(batches=9, retained=2)
    desk.journal.limits = desk.journal.limits._replace(needed_batches=3)
    reply = desk.recovery.answer(8, 0)
    assert reply is not None
    desk.more(3)
    assert desk.journal.whole_from == 8
    desk.more(2)
    assert desk.journal.whole_from == 9


def test_a_second_cut_waits_for_the_first_to_be_rendered() -> None:
    desk = Desk(batches=9, retained=5)
    desk.journal.limits = desk.journal.limits._replace(needed_batches=0)
    first = desk.recovery.answer(0, 0)
    desk.journal.append((), 2.0)
    for _ in range(7):
        desk.journal.append((), 2.0)
    desk.send()
    assert first is not None
    assert desk.recovery.answer(0, 0) is None
    while desk.recovery.rendering is not None:
        desk.recovery.rendering.render_next()
    assert desk.recovery.answer(0, 0) is not None


def test_nobody_reads_and_it_is_forgotten() -> None:
    desk = Desk(batches=9, retained=5)
    desk.numbers(0)
    reply = desk.recovery.answer(0, 0)
    assert reply is not None
    desk.clock.advance(6)
    desk.recovery.forget_old()
    assert len(desk.recovery.snapshots) == 1
    reply.close()
    desk.recovery.forget_old()
    assert desk.recovery.snapshots == []


def test_a_number_is_not_told_before_it_was_sent_live() -> None:
    desk = Desk(batches=2)
    desk.journal.append((), 1.0)
    reply = desk.recovery.answer(1, 0)
    assert reply is not None
    reply.advance()
    assert isinstance(reply.payload(), Wait)
    desk.send()
    assert isinstance(reply.payload(), Payload)


def test_a_failed_snapshot_ends_its_replies_and_serves_nobody_else() -> None:
    desk = Desk(batches=9, retained=5)
    reply = desk.recovery.answer(0, 0)
    snapshot = desk.recovery.rendering
    assert reply is not None
    assert snapshot is not None
    snapshot.done = snapshot.failed = True
    assert reply.payload() is None
    assert desk.numbers(0) == list(range(9))
    assert desk.recovery.made == 2


def test_a_state_is_half_told_until_the_number_at_which_it_was_so() -> None:
    desk = Desk(batches=9, retained=1, limits=LIMITS)
    reply = desk.recovery.answer(4, 0)
    assert reply is not None
    desk.journal.append((), 1.0)
    told = {}
    while reply.seq < 11:
        told[reply.seq] = reply.half_told
        reply.advance()
    assert told == {4: False, 5: True, 6: True, 7: True, 8: True, 9: False, 10: False}
    reply.seq = 6
    reply.close()
    assert not reply.half_told
    exact = desk.recovery.answer(4, 0, exact=True)
    assert exact is not None
    exact.advance()
    assert not exact.half_told, "its first number has the whole state"
