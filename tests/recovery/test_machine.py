"""Any interleaving of events, losses, slow readers, restarts and joins ends with every fold as what is resident.

The publisher's side is `Sidecar`: all of it but sockets and tasks. The readers' side is the subscriber's `Feed` and
the doubles of vllm-router, which is told live what no reply can tell it, and of Dynamo. Everything is tiny: tiers,
what waits, what is retained, parts of snapshots, queues, the reach of replies, messages.
"""

from __future__ import annotations

from itertools import count

import pytest
from core.prompts import Path
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvevents_service.core.sequence import HoldLimits
from kvevents_service.lane import Options
from recovery.network import Network
from recovery.readers import (
    FEED_OUTPUTS,
    TICK_S,
    TIMING,
    BlockingReader,
    DynamoReader,
    FeedReader,
    Reader,
    RouterReader,
)
from recovery.sidecar import DYNAMO, MODELS, ROUTER, SNAPSHOTS, VLLM, Reservation, Shape, Sidecar

MAX_READERS = 4
MANY = 1_000
TURNS = 6
ROUNDS = 400
LIVE_BYTES = 700
"""No live batch is larger."""
SLACK_BYTES = 32
"""A message of several parts has a header of its own."""

branches = st.lists(st.sampled_from([0, 0, 0, 2]), max_size=7)
paths = st.builds(lambda root, rest: (root, *rest), st.sampled_from([0, 0, 1, 4]), branches)
ends_s = st.sets(st.integers(0, 7), max_size=4)
tiers = st.sampled_from([0, 0, 1])
readers = st.integers(0, MAX_READERS - 1)
kinds = st.integers(0, 8)
fates = st.sampled_from(["reset", "fail", "lose", "hang up", "hang up", "kill", "kill", "leave", "wait"])
few = st.sampled_from([1, 1, 2, 3, MANY])
shapes = st.builds(
    Shape,
    model=st.integers(0, len(MODELS) - 1),
    capacity=st.sampled_from([4, 7, 12]),
    pending=st.sampled_from([2, 4, 50]),
    retained=st.sampled_from([1, 3, 6, 30]),
    retained_bytes=st.sampled_from([2_000, 1 << 20]),
    part_weight=st.sampled_from([1, 40, 100_000]),
    reply_queue=st.sampled_from([2, 5, MANY]),
    exact_bytes=st.sampled_from([350, 350, 1_000, 1 << 20]),
)


class Recovering(RuleBasedStateMachine):
    """A sidecar whose numbers are reserved: its next life goes on above, and clears first."""

    durable = True
    outputs = FEED_OUTPUTS
    routers: tuple[type[RouterReader] | type[DynamoReader], ...] = (RouterReader, DynamoReader)

    @initialize(shape=shapes, first_seq=st.sampled_from([0, 1000]), before=st.lists(paths, max_size=4))
    def begin(self, shape: Shape, first_seq: int, before: list[Path]) -> None:
        self.shape = shape
        self.ids = count(1)
        self.network = Network()
        self.network.most_bytes = max(shape.exact_bytes, LIVE_BYTES) + SLACK_BYTES
        self.disk = Reservation(first_seq) if self.durable else None
        self.life = 0
        self.truths: dict[int, Sidecar] = {}
        self.readers: list[Reader] = []
        self.boot()
        for number, path in enumerate(before):
            self.store(number % 2, path, 0, {1, 3}, MANY, MANY)

    def boot(self) -> None:
        self.life += 1
        first_seq = self.disk.reserved if self.disk else 0
        self.sidecar = self.truths[self.life] = Sidecar(self.life, self.shape, first_seq, self.disk, self.network)

    # what happens in the tiers

    @rule(
        place=tiers,
        path=paths,
        first=st.integers(0, 3),
        ends=ends_s,
        copied=few | st.just(0),
        sent=few | st.just(0),
    )
    def store(self, place: int, path: Path, first: int, ends: set[int], copied: int, sent: int) -> None:
        self.sidecar.store(place, path, first, ends, self.ids)
        self.end_copies(place, copied, good=True)
        self.send(sent, 0)

    def end_copies(self, place: int, most: int, good: bool) -> None:
        self.sidecar.end_copies(place, most, good=good)

    @precondition(lambda self: any(tier.pending for tier in self.sidecar.tiers))
    @rule(most=few)
    def copy(self, most: int) -> None:
        """A copy that a cut may have found under way."""
        for place in range(len(self.sidecar.tiers)):
            self.end_copies(place, most, good=True)

    # the publisher

    @rule(beats=st.sampled_from([0, 0, 1, 8]), most=few, losing=st.sampled_from([0, 1, 2, 3, 4, 15]))
    def send(self, most: int, losing: int, beats: int = 0) -> None:
        """To some readers in vain."""
        for _ in range(beats):
            self.sidecar.beat()
        for place, reader in enumerate(self.readers):
            reader.link.losing = bool(losing >> place & 1)
        self.sidecar.send(most)

    @rule(place=readers, parts=few | st.just(0), turns=few | st.just(0))
    def serve(self, place: int, parts: int, turns: int) -> None:
        """A snapshot grows, one client gets a part of its answer."""
        self.sidecar.take_requests()
        for _ in range(min(turns, TURNS)):
            if self.sidecar.clients:
                self.sidecar.turn(place)
            self.sidecar.render(parts)

    @rule(fate=fates, place=readers)
    def misfortune(self, fate: str, place: int) -> None:
        match fate:
            case "reset":
                self.sidecar.reset(place % 2)
            case "fail":
                self.end_copies(place % 2, MANY, good=False)
            case "lose":
                self.sidecar.lose_next()
            case "hang up" if self.sidecar.clients:
                self.sidecar.hang_up(place)
            case "kill":
                self.kill(lost=(0, 1, MANY, 0)[place])
            case "leave" if self.readers:
                self.leave(self.readers[place % len(self.readers)])
            case "wait":
                self.sidecar.pass_time((1.0, 9.0)[place % 2])

    def kill(self, lost: int) -> None:
        """Nothing is said before; what was under way may be lost."""
        for reader in self.readers:
            reader.link.cut(lost)
        self.sidecar.die()
        self.boot()

    # readers

    @precondition(lambda self: len(self.readers) < MAX_READERS)
    @rule(place=kinds, batches=st.sampled_from([1, 3, 100]))
    def join(self, place: int, batches: int) -> None:
        if place < len(self.outputs):
            options = Options(hold=HoldLimits(batches), timing=TIMING)
            self.readers.append(FeedReader(self.network, self.outputs[place], self.sidecar.model, options))
        else:
            main = next(group.block_size for group in self.sidecar.model if group.main)
            self.readers.append(self.routers[place % len(self.routers)](self.network, main))

    def leave(self, reader: Reader) -> None:
        self.readers.remove(reader)
        reader.close()
        self.network.unsubscribe(reader.link)

    @precondition(lambda self: self.readers)
    @rule(place=readers, live=few | st.just(0), replies=few | st.just(0), consumed=few, passed=st.booleans())
    def read(self, place: int, live: int, replies: int, consumed: int, passed: bool) -> None:
        reader = self.readers[place % len(self.readers)]
        if isinstance(reader, BlockingReader):
            reader.read(live, replies)
        else:
            reader.read(live, replies, TICK_S if passed else 0.0)
            reader.consume(consumed)

    @precondition(lambda self: self.readers)
    @rule(place=readers, rounds=st.integers(1, 4), parts=few)
    def run(self, place: int, rounds: int, parts: int) -> None:
        """For one reader, all is well for a while."""
        for _ in range(rounds):
            self.send(MANY, 0)
            self.serve(place, parts, MANY)
            self.read(place, MANY, MANY, MANY, True)

    @precondition(lambda self: len(self.readers) < MAX_READERS)
    @rule(place=kinds, lost=st.sampled_from([1, 4, 9, 45]), path=paths, served=st.booleans())
    def join_in_a_storm(self, place: int, lost: int, path: Path, served: bool) -> None:
        """The others lose a change and what comes around it, more than is kept; somebody joins in the middle."""
        for reader in self.readers:
            reader.link.losing = True
        for _ in range(lost):
            self.sidecar.beat()
            self.sidecar.send()
        self.join(place, 100)
        self.store(0, path, 0, {1, 3}, MANY, MANY)
        if served:
            self.run(len(self.readers) - 1, 1, MANY)

    @precondition(lambda self: self.readers)
    @rule(place=readers, changes=st.lists(paths, min_size=1, max_size=4))
    def read_slowly(self, place: int, changes: list[Path]) -> None:
        """The state changes between any two messages of an answer."""
        for number, path in enumerate(changes):
            self.store(number % 2, path, 0, {1, 3}, MANY, MANY)
            self.serve(place, 1, 1)
            self.read(place, 1, 1, 1, True)

    # always

    @invariant()
    def numbers_rise_by_one(self) -> None:
        if hasattr(self, "sidecar"):
            self.sidecar.check_numbers()

    @invariant()
    def what_is_known_is_true(self) -> None:
        if not hasattr(self, "sidecar"):
            return
        snapshots = self.sidecar.recovery.snapshots
        assert len(snapshots) <= self.sidecar.recovery.limits.snapshots
        for reader in self.readers:
            if isinstance(reader, FeedReader) and reader.knows:
                assert not reader.doubt
                if reader.output in (VLLM, SNAPSHOTS):
                    self.check_known(reader)

    def check_known(self, reader: FeedReader) -> None:
        """I4: at the number it has come to."""
        if reader.told.life > 0:
            expected = self.truths[reader.told.life].truth[reader.told.seq]
            assert reader.state == expected, f"{reader} is not what was resident"

    # the end

    def teardown(self) -> None:
        if not hasattr(self, "sidecar"):
            return
        for place in range(len(self.sidecar.tiers)):
            self.sidecar.end_copies(place, MANY, good=True)
        self.sidecar.send()
        self.flow()
        self.help_those_who_know()
        self.sidecar.beat()
        self.flow()
        for reader in self.readers:
            self.check_end(reader)

    def flow(self) -> None:
        """Everything arrives and is answered, until nobody waits for anything.

        A reader holds what comes while it asks: one that drops it asks again, for as long as more comes.
        """
        for reader in self.readers:
            reader.link.losing = False
            reader.link.high_water_mark = MANY
            if isinstance(reader, FeedReader):
                reader.lane.sequence.limits = HoldLimits()
        for _ in range(ROUNDS):
            self.sidecar.send()
            self.sidecar.take_requests()
            for place in reversed(range(len(self.sidecar.clients))):
                self.sidecar.turn(place)
            self.sidecar.render(MANY)
            self.sidecar.pass_time(0.1)
            for place in range(len(self.readers)):
                self.read(place, MANY, MANY, MANY, True)
            waiting = self.sidecar.clients or self.sidecar.teller.due
            if not waiting and not any(reader.busy for reader in self.readers):
                return
        raise AssertionError(f"it never ends: {self.readers}, {self.sidecar.clients}")

    def help_those_who_know(self) -> None:
        """A Dynamo that had to throw its state away recovers at its next hole, if that is wide enough."""
        stuck = [reader for reader in self.readers if isinstance(reader, DynamoReader) and not reader.whole]
        for reader in stuck:
            reader.link.losing = True
        for _ in range(self.shape.retained + 1 if stuck else 0):
            self.sidecar.beat()
            self.sidecar.send()
            for reader in self.readers:
                if reader not in stuck:
                    self.read(self.readers.index(reader), MANY, MANY, MANY, True)
        self.sidecar.beat()
        self.flow()

    def check_end(self, reader: Reader) -> None:
        one_group = reader.output in (ROUTER, DYNAMO)
        expected = self.sidecar.blocks_of_main() if one_group else self.sidecar.resident
        assert reader.state == expected, f"{reader}, {self.sidecar.journal}, {self.sidecar.recovery}"
        if isinstance(reader, FeedReader):
            assert reader.sure, reader
            assert not reader.doubt


class Forgetful(Recovering):
    """No state directory: each life starts at 0. Its first message, and the last of the one before, are heard."""

    durable = False
    routers = (RouterReader,)

    def kill(self, lost: int) -> None:
        self.sidecar.send_surely()
        self.sidecar.send_surely()
        self.sidecar.die()
        self.boot()
        self.sidecar.send_surely()


SETTINGS = settings(
    max_examples=250,
    derandomize=True,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)


@pytest.mark.timeout(400)  # shrinking a failure takes up to five minutes
@pytest.mark.parametrize("machine", [Recovering, Forgetful])
def test_every_reader_recovers(machine: type[Recovering]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_a_client_given_up_in_the_middle_of_a_snapshot_recovers() -> None:
    life = Recovering()
    before = [(0,) * 7, (4,) + (0,) * 5, (1, 0, 0, 0)]
    life.begin(shape=Shape(1, 12, 50, 30, 1 << 20, 1, 2, 1 << 20), first_seq=1000, before=before)
    life.join(place=VLLM, batches=100)
    life.serve(place=0, parts=MANY, turns=2)
    life.read(place=0, live=0, replies=1, consumed=MANY, passed=False)
    life.misfortune(fate="hang up", place=0)
    life.send(most=MANY, losing=0)
    life.read(place=0, live=MANY, replies=MANY, consumed=MANY, passed=False)
    life.what_is_known_is_true()
    life.teardown()
