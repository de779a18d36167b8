"""Numbers in any order: rising between restarts, every hole said, a late message never taken for a restart."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.publishers import ModelPublisher
from kvevents_service.core.sequence import Ask, Deliver, Gap, HoldLimits, Restart, Resync, Sequencer, Step
from kvevents_service.wire.events import AllBlocksCleared, Event
from kvevents_service.wire.frames import LiveFrame
from kvevents_service.wire.peek import Snapshot


def frame(seq: int, life: int = 0) -> LiveFrame:
    return LiveFrame(b"kv", seq, b"%d of life %d" % (seq, life))


def live(sequence: Sequencer, *seqs: int, life: int = 0) -> list[Step]:
    return [step for seq in seqs for step in sequence.live(frame(seq, life))]


def replayed(sequence: Sequencer, *seqs: int, life: int = 0) -> list[Step]:
    return [step for seq in seqs for step in sequence.replayed(frame(seq, life))]


def brief(steps: list[Step]) -> list[object]:
    """Delivered numbers as ints ("r5": by replay), the other steps as they are."""
    names = {True: "r{}".format, False: int}
    return [names[step.replayed](step.frame.seq) if isinstance(step, Deliver) else step for step in steps]


def started(**limits: int) -> Sequencer:
    sequence = Sequencer(replay=True, limits=HoldLimits(**limits) if limits else None)
    assert sequence.start() == [Ask(0)]
    return sequence


def steady(last: int) -> Sequencer:
    """Has been delivered 0..last by replay, the last one live as well."""
    sequence = started()
    replayed(sequence, *range(last + 1))
    assert live(sequence, last) == sequence.end() == []
    return sequence


class TestWithoutReplay:
    @pytest.mark.parametrize(
        ("seqs", "steps"),
        [
            ([0, 1, 4], [0, 1, Gap(2, 4), 4]),
            ([0, 1, 1], [0, 1]),
            ([5, 6], [5, 6]),
            ([5, 8, 6], [5, Gap(6, 8), 8, Restart(8, 6), Gap(0, 6), 6]),
        ],
    )
    def test_live_numbers(self, seqs: list[int], steps: list[object]) -> None:
        sequence = Sequencer(replay=False)
        assert sequence.start() == []
        assert brief(live(sequence, *seqs)) == steps

    def test_the_first_number_is_where_it_joined(self) -> None:
        sequence = Sequencer(replay=False)
        assert sequence.joined_at is None
        live(sequence, 5, 6)
        assert sequence.joined_at == 5

    def test_the_same_number_with_other_content_is_a_restart(self) -> None:
        sequence = Sequencer(replay=False)
        live(sequence, 0)
        assert brief(live(sequence, 0, life=1)) == [Restart(0, 0), 0]

    @given(st.lists(st.integers(0, 20)))
    def test_any_numbers_are_told_whole(self, seqs: list[int]) -> None:
        sequence = Sequencer(replay=False)
        steps = live(sequence, *seqs)
        check_told_whole(steps, joining=True)
        assert sum(isinstance(step, Deliver) for step in steps) + sequence.duplicates == len(seqs)


class TestStart:
    def test_live_waits_and_is_merged(self) -> None:
        sequence = started()
        assert live(sequence, 2, 3, 4) == []
        assert brief(replayed(sequence, 0, 1, 2, 3)) == ["r0", "r1", "r2", "r3"]
        assert brief(sequence.end()) == [4]
        assert sequence.duplicates == 2

    def test_a_late_duplicate_is_no_restart(self) -> None:
        sequence = started()
        replayed(sequence, 0, 1, 2, 3)
        assert sequence.end() == []
        assert brief(live(sequence, 2, 3, 4)) == [4]

    def test_once_settled_it_is_one(self) -> None:
        sequence = started()
        replayed(sequence, 0, 1, 2, 3)
        sequence.end()
        sequence.settle()
        assert brief(live(sequence, 0, life=1)) == [Restart(3, 0), Ask(0)]

    def test_a_replay_that_starts_late_is_a_gap(self) -> None:
        assert brief(replayed(started(), 7, 8)) == [Gap(0, 7), "r7", "r8"]

    def test_held_numbers_below_the_replay_come_first(self) -> None:
        sequence = started()
        live(sequence, 5, 6)
        assert brief(replayed(sequence, 7)) == [Gap(0, 5), 5, 6, "r7"]

    def test_what_was_sent_before_the_subscription_worked_is_asked_for(self) -> None:
        sequence = started()
        replayed(sequence, 0, 1)
        live(sequence, 4)  # 2 and 3: after the replay was read, before the subscription arrived
        assert sequence.end() == [Ask(2)]
        assert brief(replayed(sequence, 2, 3, 4) + sequence.end()) == ["r2", "r3", "r4"]

    def test_nobody_answers(self) -> None:
        sequence = started()
        assert sequence.give_up() == [Ask(0)]
        assert sequence.give_up() == []
        assert brief(live(sequence, 0, 1)) == [0, 1]


class TestSince:
    """The first replay is asked for from a number on; what was before is nobody's loss."""

    def sequence(self) -> Sequencer:
        sequence = Sequencer(replay=True, since=7)
        assert sequence.start() == [Ask(7)]
        return sequence

    @pytest.mark.parametrize("first", [7, 9])
    def test_the_reply_may_start_there_or_later(self, first: int) -> None:
        sequence = self.sequence()
        assert live(sequence, first + 2) == []
        assert brief(replayed(sequence, first, first + 1)) == [f"r{first}", f"r{first + 1}"]
        assert brief(sequence.end()) == [first + 2]
        assert sequence.joined_at == first

    def test_a_number_that_is_not_yet_is_no_hole_and_no_restart(self) -> None:
        sequence = self.sequence()
        assert live(sequence, 3) == []
        assert brief(sequence.end()) == [3]
        sequence.settle()
        assert brief(live(sequence, 4)) == [4]

    def test_nothing_before_it_is_asked_for_later(self) -> None:
        sequence = self.sequence()
        assert sequence.end() == []
        assert brief(live(sequence, 5, 6)) == [5, 6]
        assert sequence.start() == [Ask(7)]
        assert sequence.give_up() == [Ask(7)]

    def test_a_hole_behind_it_is_asked_for(self) -> None:
        sequence = self.sequence()
        replayed(sequence, 7)
        assert sequence.end() == []
        assert live(sequence, 9) == [Ask(8)]


class TestGap:
    def test_it_is_filled_before_the_live_message(self) -> None:
        sequence = steady(1)
        assert live(sequence, 4, 5) == [Ask(2)]
        assert brief(replayed(sequence, 2, 3, 4)) == ["r2", "r3", "r4"]
        assert brief(sequence.end()) == [5]

    def test_what_replay_does_not_give_is_missing(self) -> None:
        sequence = steady(1)
        live(sequence, 5)
        assert brief(replayed(sequence, 3) + sequence.end()) == [Gap(2, 3), "r3", Gap(4, 5), 5]

    def test_a_replay_given_up(self) -> None:
        sequence = steady(1)
        live(sequence, 4, 7)
        assert sequence.give_up() == [Ask(2)]
        assert brief(sequence.give_up()) == [Gap(2, 4), 4, Gap(5, 7), 7]

    def test_a_hole_that_came_later_is_asked_for_as_well(self) -> None:
        sequence = steady(1)
        live(sequence, 3, 6)
        assert brief(replayed(sequence, 2) + sequence.end()) == ["r2", 3, Ask(4)]

    def test_the_hold_is_bounded_by_count(self) -> None:
        sequence = started(batches=2)
        live(sequence, 0, 1, 2, 3)
        sequence.give_up()
        assert brief(sequence.give_up()) == [Gap(0, 2), 2, 3]
        assert sequence.stats() == {"duplicates": 0, "held_dropped": 2, "held": 0, "held_bytes": 0}

    def test_the_hold_is_bounded_by_bytes_but_keeps_the_newest(self) -> None:
        sequence = started(payload_bytes=1)
        live(sequence, 0, 1)
        sequence.give_up()
        assert brief(sequence.give_up()) == [Gap(0, 1), 1]


def clearing(seq: int) -> LiveFrame:
    """A batch that starts with a clear."""
    return ModelPublisher(dp_rank=None).frame(seq, AllBlocksCleared())


def said(seq: int, publisher: bytes, *events: Event) -> LiveFrame:
    """A batch of a publisher that says who it is."""
    return ModelPublisher(publisher_id=publisher * 16).frame(seq, *events)


class TestClear:
    def test_a_hole_before_it_is_no_loss(self) -> None:
        sequence = steady(1)
        assert brief(sequence.live(clearing(9))) == [Resync(2, 9), 9]
        assert brief(live(sequence, 10)) == [10]

    def test_a_reply_that_starts_with_one_is_no_gap(self) -> None:
        sequence = started()
        live(sequence, 5, 8)
        assert brief(sequence.replayed(clearing(7)) + sequence.end()) == [Resync(0, 7), "r7", 8]

    @pytest.mark.parametrize("first", [2, 4])
    def test_a_snapshot_that_breaks_off_is_asked_for_whole(self, first: int) -> None:
        sequence = steady(1)
        live(sequence, 6)  # asks from 2
        sequence.replayed(clearing(first))
        assert sequence.give_up() == [Ask(0)]
        assert brief(sequence.replayed(clearing(1))) == [Resync(first + 1, 1), "r1"]

    def test_one_that_breaks_off_again_is_a_loss(self) -> None:
        sequence = steady(1)
        live(sequence, 3)
        sequence.replayed(clearing(2))
        sequence.give_up()
        assert not sequence.distrusted
        assert brief(sequence.give_up()) == [Gap(3, 3), 3]
        assert sequence.distrusted


class TestRefresh:
    def test_after_a_loss_all_is_asked_for_once(self) -> None:
        sequence = steady(1)
        live(sequence, 5)
        sequence.give_up()
        sequence.give_up()
        assert sequence.distrusted
        assert sequence.refresh() == [Ask(0)]
        assert live(sequence, 6) == []
        assert brief(sequence.replayed(clearing(4))) == [Resync(6, 4), "r4"]
        assert brief(replayed(sequence, 5) + sequence.end()) == ["r5", 6]
        assert not sequence.distrusted

    def test_a_publisher_that_has_it_not_is_asked_no_more(self) -> None:
        sequence = steady(1)
        live(sequence, 5)
        sequence.give_up()
        sequence.give_up()
        sequence.refresh()
        assert replayed(sequence, 4, 5) + sequence.end() == []
        assert not sequence.distrusted

    def test_a_reply_that_starts_late_is_no_reason(self) -> None:
        sequence = started()
        replayed(sequence, 7)
        assert not sequence.distrusted

    def test_not_while_a_replay_is_under_way_nor_without_one(self) -> None:
        assert started().refresh() == Sequencer(replay=False).refresh() == []


class TestSnapshot:
    def test_the_numbers_go_on_behind_it(self) -> None:
        sequence = started()
        live(sequence, 6, 7, 8)
        steps = sequence.snapshot(Snapshot(7, b"p" * 16, (b"x", b"y")))
        assert brief(steps) == [Resync(0, 8), "r7", "r7", 8]
        assert brief(live(sequence, 9)) == [9]

    def test_a_hole_behind_it_is_asked_for(self) -> None:
        sequence = started()
        assert brief(sequence.snapshot(Snapshot(-1, b"p" * 16, ()))) == [Resync(0, 0)]
        assert live(sequence, 2) == [Ask(0)]

    def test_a_snapshot_of_an_earlier_publisher_is_asked_for_again(self) -> None:
        """The new one was heard while the answer was under way."""
        old, new = ModelPublisher(publisher_id=b"a" * 16), ModelPublisher(publisher_id=b"b" * 16)
        old.publish()
        sequence = started()
        assert sequence.live(new.publish()) == []
        assert sequence.snapshot(old.snapshot()) == [Ask(0)]
        assert isinstance(sequence.snapshot(new.snapshot())[0], Resync)
        assert brief(sequence.live(new.publish())) == [1]

    def test_one_that_answers_the_same_twice_is_the_one_that_is_there(self) -> None:
        old, new = ModelPublisher(publisher_id=b"a" * 16), ModelPublisher(publisher_id=b"b" * 16)
        sequence = started()
        sequence.live(old.publish())
        sequence.snapshot(old.snapshot())
        sequence.refresh()
        assert sequence.snapshot(new.snapshot()) == [Ask(0)]
        assert brief(sequence.snapshot(new.snapshot()))[:2] == [Restart(0, -1), Resync(0, 0)]
        assert brief(sequence.live(new.publish())) == [0]
        assert sequence.live(old.publish()) == []

    def test_an_answer_of_the_dead_is_forgotten_if_no_other_comes(self) -> None:
        old, new = ModelPublisher(publisher_id=b"a" * 16), ModelPublisher(publisher_id=b"b" * 16)
        sequence = started()
        sequence.live(new.publish())
        sequence.snapshot(old.snapshot())
        while sequence.replaying:
            sequence.give_up()
        assert brief(sequence.live(new.publish())) == [1]


class TestPublisherId:
    def test_another_one_is_a_restart_at_any_number(self) -> None:
        sequence = Sequencer(replay=False)
        sequence.live(said(1, b"a"))
        assert brief(sequence.live(said(2, b"b"))) == [Restart(1, 2), Gap(0, 2), 2]

    def test_what_the_old_one_sent_last_is_late(self) -> None:
        sequence = Sequencer(replay=False)
        for frame in (said(1, b"a"), said(2, b"b")):
            sequence.live(frame)
        assert sequence.live(said(3, b"a")) == []
        assert sequence.duplicates == 1

    def test_a_reply_tells_it_as_well(self) -> None:
        sequence = started()
        sequence.replayed(said(0, b"a"))
        sequence.end()
        sequence.live(said(2, b"a"))
        assert brief(sequence.replayed(said(1, b"b"))) == [Gap(1, 2), 2, Restart(2, 1), Ask(0)]


class TestRestart:
    def test_the_new_history_is_asked_for(self) -> None:
        sequence = steady(9)
        assert live(sequence, 2, life=1) == [Restart(9, 2), Ask(0)]
        assert brief(replayed(sequence, 0, 1, 2, life=1) + sequence.end()) == ["r0", "r1", "r2"]

    def test_while_a_replay_is_under_way(self) -> None:
        sequence = steady(1)
        live(sequence, 4)
        assert brief(live(sequence, 0, life=1)) == [Gap(2, 4), 4, Restart(4, 0), Ask(0)]

    def test_the_state_is_in_the_repr(self) -> None:
        sequence = started()
        live(sequence, 3)
        assert repr(sequence) == "<Sequencer replaying next=0 held=1>"


def check_told_whole(steps: list[Step], *, joining: bool) -> None:
    """Numbers rise by one, or by a Gap of exactly the missing ones; a Restart starts again from 0."""
    following = None if joining else 0
    for step in steps:
        match step:
            case Restart():
                assert following is not None
                assert step.last == following - 1
                following = 0
            case Gap():
                assert step.expected == following < step.got
                following = step.got
            case Deliver():
                assert following in (None, step.frame.seq)
                following = step.frame.seq + 1


class World(RuleBasedStateMachine):
    """A publisher that loses messages on the way and may restart, its replays, and the sequencer that listens."""

    restarts = True

    def __init__(self) -> None:
        super().__init__()
        self.life = 0
        self.journal: list[LiveFrame] = []
        self.wire: deque[LiveFrame] = deque()
        self.answer: deque[LiveFrame] | None = None
        self.asked: int | None = None
        self.told: list[Step] = []
        self.lossy_replay = False

    @initialize(batches=st.sampled_from([2, 100]), sent_before=st.integers(0, 5))
    def start(self, batches: int, sent_before: int) -> None:
        self.sequence = Sequencer(replay=True, limits=HoldLimits(batches))
        for _ in range(sent_before):
            self.publish(lost=True)
        self.perform(self.sequence.start())

    def perform(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self.asked, self.answer = step.start, None
            else:
                self.told.append(step)
        if not self.sequence.replaying:
            self.asked = self.answer = None

    @rule(lost=st.booleans())
    def publish(self, lost: bool) -> None:
        self.journal.append(frame(len(self.journal), self.life))
        if not lost:
            self.wire.append(self.journal[-1])

    @precondition(lambda self: self.wire)
    @rule()
    def receive(self) -> None:
        self.perform(self.sequence.live(self.wire.popleft()))

    @precondition(lambda self: self.wire)
    @rule()
    def receive_twice(self) -> None:
        twice = self.wire[0]
        self.receive()
        self.perform(self.sequence.live(twice))

    @precondition(lambda self: self.asked is not None)
    @rule(holes=st.sets(st.integers(0, 20), max_size=2))
    def reply(self, holes: set[int]) -> None:
        if self.answer is None:
            self.lossy_replay |= bool(holes)
            self.answer = deque(sent for sent in self.journal[self.asked :] if sent.seq not in holes)
        if self.answer:
            self.perform(self.sequence.replayed(self.answer.popleft()))
        else:
            self.perform(self.sequence.end())

    @precondition(lambda self: self.asked is not None)
    @rule()
    def time_out(self) -> None:
        self.lossy_replay = True
        self.perform(self.sequence.give_up())

    @precondition(lambda self: not self.wire and self.asked is None)
    @rule()
    def settle(self) -> None:
        self.sequence.settle()

    @precondition(lambda self: self.restarts)
    @rule()
    def restart(self) -> None:
        self.life += 1
        self.journal, self.answer = [], None
        self.lossy_replay = True

    @invariant()
    def told_whole(self) -> None:
        check_told_whole(self.told, joining=False)

    def catch_up(self) -> None:
        while self.wire or self.asked is not None:
            if self.wire:
                self.receive()
            else:
                self.reply(set())

    def teardown(self) -> None:
        if not hasattr(self, "sequence"):
            return
        self.catch_up()
        self.settle()
        self.publish(lost=False)
        self.catch_up()
        self.check_end()

    def check_end(self) -> None:
        assert self.sequence.stats()["held"] == 0
        assert self.told[-1].frame == self.journal[-1]


class SteadyWorld(World):
    """Without restarts, a duplicate however late is never taken for one, and what replay gives is never missed."""

    restarts = False

    def check_end(self) -> None:
        super().check_end()
        assert not any(isinstance(step, Restart) for step in self.told)
        if not self.lossy_replay:
            assert [step.frame for step in self.told] == self.journal


TestWorld = World.TestCase
TestSteadyWorld = SteadyWorld.TestCase
