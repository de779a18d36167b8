"""What waits for a broker is bounded, in order, and never sent behind what came later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents_service.service.nats_broker import SnapshotFile
from kvevents_service.service.nats_queue import SendQueue, outcome


def seqs(queue: SendQueue) -> list[int]:
    return [batch.seq for batch in queue.head(1000)]


def test_what_is_put_stays_until_it_is_done() -> None:
    queue = SendQueue(10, 1000, first=5)
    for seq in range(5, 9):
        queue.put(seq, b"xx")
    head = queue.head(2)
    assert [batch.seq for batch in head] == [5, 6]
    assert (len(queue), queue.bytes) == (4, 8)
    queue.done(head)
    assert (seqs(queue), queue.bytes, queue.holes, queue.dropped) == ([7, 8], 4, 0, 0)


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1000), (1000, 30)])
def test_a_full_queue_is_emptied_counted_and_leaves_a_hole(most: int, most_bytes: int) -> None:
    queue = SendQueue(most, most_bytes)
    for seq in range(4):
        queue.put(seq, b"x" * 10)
    assert (seqs(queue), queue.bytes, queue.dropped, queue.holes) == ([3], 10, 3, 1)


def test_what_was_under_way_when_the_queue_was_emptied_is_not_done_twice() -> None:
    queue = SendQueue(2, 1000)
    queue.put(0, b"a")
    queue.put(1, b"b")
    under_way = queue.head(2)
    queue.put(2, b"c")
    queue.done(under_way)
    assert (seqs(queue), queue.bytes) == ([2], 1)


def test_a_number_that_never_came_is_a_hole() -> None:
    queue = SendQueue(10, 1000, first=3)
    queue.put(3, b"x")
    assert queue.holes == 0
    queue.put(5, b"x")
    assert (queue.holes, queue.dropped) == (1, 0)


def test_a_batch_larger_than_the_queue_is_lost() -> None:
    queue = SendQueue(10, 5)
    queue.put(0, b"123456")
    assert (len(queue), queue.dropped, queue.holes) == (0, 1, 1)


@pytest.mark.parametrize(
    ("acked", "settled", "lost"),
    [
        ([], 0, 0),
        ([True, True], 2, 0),
        ([False, False], 0, 0),
        ([True, False, False], 1, 0),
        ([True, False, True, False], 3, 1),
        ([False, True], 2, 1),
    ],
)
def test_only_what_nothing_later_overtook_is_sent_again(acked: list[bool], settled: int, lost: int) -> None:
    assert outcome(acked) == (settled, lost)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=12)), max_size=40), st.data())
def test_it_is_bounded_in_order_and_every_batch_is_accounted_for(
    puts: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    queue, seq, done = SendQueue(5, 30), -1, 0
    for step, payload in puts:
        seq += step
        queue.put(seq, payload)
        assert len(queue) <= 5
        assert queue.bytes == sum(len(batch.payload) for batch in queue.head(5)) <= 30
        head = queue.head(data.draw(st.integers(0, 3)))
        queue.done(head)
        done += len(head)
        assert seqs(queue) == sorted(seqs(queue))
    assert done + queue.dropped + len(queue) == len(puts)


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(1, 16))
def test_a_snapshot_is_read_in_pieces_of_any_size(payloads: list[bytes], size: int) -> None:
    file, read = SnapshotFile(payloads), bytearray()
    buffer = bytearray(size)
    while (n := file.readinto(buffer)) > 0:
        read += buffer[:n]
    assert bytes(read) == b"".join(len(one).to_bytes(4, "big") + one for one in payloads)
