"""The publisher numbers at once, sends later, and is stopped by nothing it is given."""

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import zmq

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, JournalLimits, Told
from kvevents_service.core.metadata import BlockStoreMeta, Cleared, RemovedRun
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import BATCHES_PER_TURN, BLOCKS_PER_BATCH, Publisher
from kvevents_service.sockets import Receiver, bind
from kvevents_service.wire.codec import MAX_PAYLOAD_BYTES, decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.frames import parse_live

DEADLINE_S = 20.0


class Stage(NamedTuple):
    """A publisher on XPUB, which tells when a subscriber is there, and one subscriber."""

    publisher: Publisher
    xpub: zmq.Socket
    sub: zmq.Socket


@pytest.fixture
def make() -> Iterator[Callable[[Journal], Stage]]:
    context, made = zmq.Context(), []

    def stage(journal: Journal, heartbeat_s: float = 0.0) -> Stage:
        xpub, sub = context.socket(zmq.XPUB), context.socket(zmq.SUB)
        endpoint = bind(xpub, "tcp://127.0.0.1:0", "pub")
        sub.subscribe(b"")
        sub.connect(endpoint)
        publisher = Publisher(
            journal,
            [Output(xpub, topic="kv")],
            encodings=[Encoding(dp_rank=3)],
            numbers=None,
            wall_clock=lambda: 7.5,
            heartbeat_s=heartbeat_s,
        )
        made.append(Stage(publisher, xpub, sub))
        return made[-1]

    yield stage
    context.destroy(linger=0)


async def test_what_is_published_arrives_numbered_and_in_order(make: Callable[[Journal], Stage]) -> None:
    publisher, xpub, sub = make(Journal())
    running = asyncio.create_task(publisher.run())
    with Receiver(xpub) as subscriptions, Receiver(sub) as receiver:
        async with asyncio.timeout(DEADLINE_S):
            await subscriptions.recv()
            for _ in range(100):
                publisher.publish((Cleared(),))
            frames = [parse_live(await receiver.recv()) for _ in range(100)]
    assert [frame.seq for frame in frames] == list(range(100))
    batch = decode_batch(frames[0].payload).batch
    assert (frames[0].topic, batch.ts, batch.data_parallel_rank) == (b"kv", 7.5, 3)
    running.cancel()


def test_a_full_journal_spends_the_number_and_never_waits(make: Callable[[Journal], Stage]) -> None:
    publisher, _, _ = make(Journal(JournalLimits(pending_batches=2)))
    assert [publisher.publish((Cleared(),)) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert publisher.send_pending() == 2
    assert publisher.publish((Cleared(),)) == 5
    assert publisher.stats()["batches_dropped"] == 3


def test_a_batch_that_cannot_be_encoded_is_counted_and_stops_no_stream(
    make: Callable[[Journal], Stage], caplog: pytest.LogCaptureFixture
) -> None:
    publisher, _, _ = make(Journal())
    keys = [("x" * MAX_PAYLOAD_BYTES,)]
    group = GroupSpec(0, "full_attention", 1)
    publisher.publish((BlockStoreMeta(group, "CPU", 32, b"h" * 32, bytes(4), None, None, None, keys),))
    publisher.publish((Cleared(),))
    assert publisher.send_pending() == 2
    assert publisher.stats()["batches_encode_failed"] == 1
    assert [batch.seq for batch in publisher.journal.retained_from(0, 10)] == [1]
    assert publisher.journal.whole_from == 1, "a replay over it is a snapshot"
    assert "cannot be sent" in caplog.text


def test_a_fault_of_ours_in_a_batch_is_told_with_its_place_and_stops_no_stream(
    make: Callable[[Journal], Stage], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, _, _ = make(Journal())

    def broken(*_: object) -> bytes:
        raise RecursionError("of ours")

    with monkeypatch.context() as patched:
        patched.setattr(Encoding, "encode", broken)
        publisher.publish((Cleared(),))
        assert publisher.send_pending() == 1
    publisher.publish((Cleared(),))
    assert publisher.send_pending() == 1
    assert publisher.stats()["batches_encode_failed"] == 1
    assert [batch.seq for batch in publisher.journal.retained_from(0, 10)] == [1]
    assert "of ours" in caplog.text
    assert "Traceback" in caplog.text


async def test_an_idle_publisher_sends_empty_batches(make: Callable[[Journal], Stage]) -> None:
    publisher, xpub, sub = make(Journal(), heartbeat_s=0.02)  # type: ignore[call-arg]
    running = asyncio.create_task(publisher.run())
    with Receiver(xpub) as subscriptions, Receiver(sub) as receiver:
        async with asyncio.timeout(DEADLINE_S):
            await subscriptions.recv()
            frames = [parse_live(await receiver.recv()) for _ in range(3)]
    assert [decode_batch(frame.payload).batch.events for frame in frames] == [[], [], []]
    assert frames[2].seq == frames[0].seq + 2
    assert publisher.stats()["heartbeats"] >= 3
    running.cancel()


async def test_without_heartbeats_an_idle_publisher_is_silent(make: Callable[[Journal], Stage]) -> None:
    publisher, _, _ = make(Journal())
    running = asyncio.create_task(publisher.run())
    await asyncio.wait([running], timeout=0.1)
    assert publisher.journal.next_seq == 0
    running.cancel()


def test_large_batches_leave_the_loop_sooner(make: Callable[[Journal], Stage]) -> None:
    publisher, _, _ = make(Journal())
    run = RemovedRun(GroupSpec(0, "full_attention", 16), "CPU", tuple(bytes([n % 256]) * 32 for n in range(1024)))
    for _ in range(BATCHES_PER_TURN):
        publisher.publish((run,))
    weight = 1 + 1024 // BLOCKS_PER_BATCH
    publisher.send_pending(BATCHES_PER_TURN)
    assert publisher.batches_sent == -(-BATCHES_PER_TURN // weight)


def test_a_state_is_told_behind_what_is_pending_a_message_a_turn(make: Callable[[Journal], Stage]) -> None:
    publisher, _, _ = make(Journal())
    part = Encoding(dp_rank=3).encode((Cleared(),), 1.0)
    asked = []

    def tell() -> bool:
        asked.append(publisher.journal.next_seq)
        for _ in range(2 if len(asked) == 1 else 0):
            publisher.journal.tell(Told(0, (part, part)), 7.5)
        return len(asked) == 1

    publisher.tell = tell
    for _ in range(3):
        publisher.publish((Cleared(),))
    assert publisher.send_pending(BATCHES_PER_TURN) == 3 + BATCHES_PER_TURN
    assert publisher.send_pending(BATCHES_PER_TURN) == BATCHES_PER_TURN
    assert publisher.send_pending(BATCHES_PER_TURN) == 0
    assert asked == [3, 5]
    told = [publisher.journal.payload(seq) for seq in (3, 4)]
    assert [len(decode_batch(payload).batch.events) for payload in told if payload] == [2, 2]
