"""When the whole state is told live, and in what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, JournalLimits, PendingBatch
from kvevents_service.core.metadata import Cleared, RemovedRun, snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.replay import Recovery, ReplayLimits
from kvevents_service.core.residency import Residency
from kvevents_service.core.snapshot import MessageLimits, PartLimits
from kvevents_service.core.telling import Teller, TellingLimits, messages
from kvevents_service.testing import ManualClock, make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.splice import spliced

MAIN = GroupSpec(0, "full_attention", 2, main=True)
LIMITS = TellingLimits(gather_s=0.5, pause_s=8.0, most_pause_s=20.0)


class Desk:
    """A tier of ten blocks whose state has five parts, and what is told of it in encoding 1."""

    def __init__(self, most: MessageLimits | None = None, retained: int = 100) -> None:
        self.clock = ManualClock()
        self.journal = Journal(JournalLimits(retained_batches=retained), 100)
        self.encodings = [Encoding(), Encoding("vllm-router")]
        replies = ReplayLimits(parts=PartLimits(40), exact=most or MessageLimits())
        self.recovery = Recovery(
            self.journal, self.encodings, clock=self.clock, wall_clock=lambda: 1.0, limits=replies
        )  # fmt: skip
        self.pool = BlockPool(10, 1)
        self.chain = make_chain(range(20), 2)
        meta = snapshot(self.chain.offer(range(10)), MAIN, "CPU", 32)
        self.pool.commit(self.pool.allocate(meta, list(self.chain.hashes), None).slots)
        self.recovery.sources = lambda: [self.pool]
        self.teller = Teller(self.recovery, clock=self.clock, wall_clock=lambda: 2.0, limits=LIMITS)
        self.journal.append((), 0.0)
        self.send()

    def send(self) -> list[PendingBatch]:
        """What is pending, and then what is to be told."""
        sent = []
        while (batch := self.journal.take_pending()) is not None or self.teller.tell():
            if batch is not None:
                sent.append(batch)
                payloads = [encoding.encode(batch.announcements, batch.ts) for encoding in self.encodings]
                if batch.told is not None:
                    payloads[batch.told.encoding] = spliced(payloads[batch.told.encoding], batch.told.payloads)
                self.journal.retain(batch.seq, *payloads)
        return sent

    def told(self, seconds: float = 0.0) -> list[int]:
        """The numbers that are told after so long, once all is rendered."""
        self.clock.advance(seconds)
        self.teller.poll()
        self.render()
        return [batch.seq for batch in self.send() if batch.told is not None]

    def render(self) -> None:
        while self.recovery.rendering is not None:
            self.recovery.rendering.render_next()

    def fold(self, seqs: Sequence[int], encoding: int) -> Residency:
        fold = Residency()
        for seq in seqs:
            fold.apply(decode_batch(self.journal.payload(seq, encoding) or b"").batch.events)
        return fold


def test_the_state_is_told_once_to_all_who_asked_together() -> None:
    desk = Desk()
    assert desk.told() == []
    desk.teller.ask(1)
    desk.teller.ask(1)
    assert desk.told(0.4) == []
    assert desk.told(0.1) == [101]
    assert len(desk.fold([101], 1)) == 10
    assert desk.journal.payload(101, 0) == Encoding().encode((), 2.0), "an empty batch for all others"
    assert desk.told(100.0) == []
    assert desk.teller.stats() == {"states_told_live": 1, "states_told_live_failed": 0}


def test_a_large_state_has_several_numbers_in_a_row_and_no_message_is_too_large() -> None:
    desk = Desk(MessageLimits(450))
    desk.teller.ask(1)
    seqs = desk.told(0.5)
    assert seqs == list(range(101, 101 + len(seqs)))
    assert len(seqs) > 1
    payloads = [desk.journal.payload(seq, 1) or b"" for seq in seqs]
    assert all(len(payload) < 480 for payload in payloads)
    clears = [sum(isinstance(e, AllBlocksCleared) for e in decode_batch(one).batch.events) for one in payloads]
    assert clears == [1] + [0] * (len(seqs) - 1)
    assert len(desk.fold(seqs, 1)) == 10


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (MessageLimits(1000, 100), [5]),
        (MessageLimits(1000, 4), [4, 1]),
        (MessageLimits(1000, 1), [1, 1, 1, 1, 1]),
        (MessageLimits(2 * 13, 100), [2, 2, 1]),
        (MessageLimits(1, 100), [1, 1, 1, 1, 1]),
    ],
)
def test_messages_are_bounded_in_bytes_and_events(most: MessageLimits, lengths: list[int]) -> None:
    payloads = [Encoding().encode((Cleared(),), float(i)) for i in range(5)]
    most = most._replace(payload_bytes=most.payload_bytes * len(payloads[0]) // 13)
    found = list(messages(payloads, most))
    assert [len(message) for message in found] == lengths
    assert [payload for message in found for payload in message] == payloads


def test_what_was_numbered_since_the_cut_is_told_behind_it_even_if_it_is_no_longer_kept() -> None:
    desk = Desk(retained=1)
    desk.teller.ask(1)
    desk.clock.advance(0.5)
    desk.teller.poll()
    gone = desk.chain.hashes[-1]
    desk.journal.append((RemovedRun(MAIN, "CPU", (gone,)),), 1.0)
    for _ in range(5):
        desk.journal.append((), 1.0)
    desk.send()
    desk.render()
    last = desk.journal.append((), 1.0)
    sent = desk.send()
    assert [(batch.seq, batch.told is not None) for batch in sent] == [(last, False), (last + 1, True)]
    assert len(desk.fold([last + 1], 1)) == 9


def test_a_state_that_misses_a_batch_since_its_cut_is_cut_again() -> None:
    desk = Desk()
    desk.teller.ask(1)
    desk.clock.advance(0.5)
    desk.teller.poll()
    desk.journal.lose(desk.journal.append((), 1.0))
    desk.journal.take_pending()
    desk.render()
    assert desk.send() == []
    assert desk.teller.failed == 1
    assert desk.teller.due == [1]
    assert desk.told(8.0) == [102]
    assert len(desk.fold([102], 1)) == 10


def test_pauses_grow_while_somebody_asks_again_and_again() -> None:
    desk = Desk()
    waits = []
    for _ in range(4):
        desk.teller.ask(1)
        waits.append(desk.teller.wait_s)
        assert desk.told(waits[-1] - 0.25) == []
        assert len(desk.told(0.25)) == 1
    assert waits == pytest.approx([0.5, 8.0, 16.0, 20.0])
    desk.clock.advance(20.0 + 20.0 + 0.25)
    desk.teller.ask(1)
    assert desk.teller.wait_s == pytest.approx(0.5)
    desk.told(0.5)
    desk.teller.ask(1)
    assert desk.teller.wait_s == pytest.approx(8.0)


def test_encodings_have_their_own_pauses() -> None:
    desk = Desk()
    desk.teller.ask(1)
    assert desk.told(0.5) == [101]
    desk.teller.ask(0)
    assert desk.told(0.5) == [102]
    assert len(desk.fold([102], 0)) == 10
    assert desk.teller.wait_s == float("inf")


def test_while_too_much_is_rendered_it_waits() -> None:
    desk = Desk()
    for _ in range(3):
        assert desk.recovery.whole(0) is not None
        desk.render()
        desk.clock.advance(6.0)
        desk.journal.append((), 1.0)
        desk.send()
    desk.teller.ask(1)
    assert desk.told(0.5) == []
    assert (desk.teller.wait_s, desk.teller.due) == (0.0, [1])
