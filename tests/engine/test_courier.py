"""The courier says everything once, in order and in its own thread, and whoever posts waits for nothing."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from engine.peer import Peer

from kvevents_service.engine import courier as module
from kvevents_service.engine.courier import MAX_PARCELS, Courier, Parcel
from kvevents_service.wire.control import Step, StepDone

LONG_S = 20.0


class Post:
    """A courier, and what became of each step that was posted."""

    def __init__(self, peer: Peer) -> None:
        self.complaints: list[Exception] = []
        self.courier = Courier(peer.line, self.complaints.append)
        self.sent: dict[int, bool] = {}
        self.threads: set[int] = set()

    def step(self, number: int, make: Callable[[], object] = lambda: None) -> bool:
        def made() -> Sequence[Step]:
            self.threads.add(threading.get_ident())
            make()
            return [Step(number, [])]

        return self.courier.post(Parcel(made, lambda sent: self.sent.update({number: sent})))


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def post(peer: Peer) -> Iterator[Post]:
    made = Post(peer)
    yield made
    made.courier.close(LONG_S)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def heard(peer: Peer, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += [message.step_id for message in peer.heard(LONG_S)]  # type: ignore[attr-defined]
    return numbers


def test_what_is_posted_is_made_and_said_in_order_by_another_thread(peer: Peer, post: Post) -> None:
    assert all(post.step(number) for number in range(20))
    assert heard(peer, 20) == list(range(20))
    until(lambda: len(post.sent) == 20)
    assert all(post.sent.values())
    assert threading.get_ident() not in post.threads
    assert len(post.threads) == 1


def test_one_that_sleeps_is_woken(peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_S", LONG_S)
    for number in range(5):
        assert post.step(number)
        start = time.monotonic()
        assert heard(peer, 1) == [number]
        assert time.monotonic() - start < LONG_S / 2
        time.sleep(0.02)


def test_what_cannot_be_made_is_complained_of_and_the_next_one_goes(peer: Peer, post: Post) -> None:
    post.step(1, lambda: os.stat("/nowhere"))
    post.step(2)
    assert heard(peer, 1) == [2]
    until(lambda: len(post.sent) == 2)
    assert post.sent == {1: False, 2: True}
    assert [type(each) for each in post.complaints] == [FileNotFoundError]


def test_without_a_link_nothing_is_sent(peer: Peer, post: Post) -> None:
    peer.line.hang_up()
    assert post.step(1)
    until(lambda: post.sent)
    assert post.sent == {1: False}


def test_one_that_is_far_behind_takes_no_more_and_what_is_recalled_is_never_sent(peer: Peer, post: Post) -> None:
    begun, go = threading.Event(), threading.Event()
    post.step(0, lambda: (begun.set(), go.wait(LONG_S)))
    assert begun.wait(LONG_S)
    assert all(post.step(number) for number in range(1, MAX_PARCELS + 1))
    assert not post.step(MAX_PARCELS + 1)
    assert post.courier.parcels == MAX_PARCELS
    with peer.line.lock:
        post.courier.recall()
        assert post.sent == dict.fromkeys(range(1, MAX_PARCELS + 1), False)
    go.set()
    until(lambda: 0 in post.sent)
    assert not post.sent[0], "it was being made when it was recalled"
    assert post.step(99)
    assert heard(peer, 1) == [99]


def test_it_takes_in_what_arrives_and_nobody_else_looks(
    peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, collectors = peer.line.collect, set[int]()
    monkeypatch.setattr(peer.line, "collect", lambda: (collectors.add(threading.get_ident()), collect()))
    post.step(1)
    peer.line.send(Step(7, []))
    assert set(heard(peer, 2)) == {1, 7}
    until(lambda: peer.line.heard is peer.line.link)
    peer.say(StepDone(7, 0, 0, 0))
    until(lambda: peer.line._ended)
    assert peer.line.take_ended(0.0) == [StepDone(7, 0, 0, 0)]
    assert collectors == post.threads


def test_what_ends_on_a_link_that_was_hung_up_is_looked_for_still(
    peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 10 * LONG_S)
    peer.line.send(Step(7, []))
    peer.line.hang_up()
    other = Peer()
    assert other.line.link is not None
    peer.line.adopt(other.line.link)
    post.step(1)
    assert heard(other, 1) == [1]
    until(lambda: peer.line.heard is peer.line.link)
    peer.say(StepDone(7, 0, 0, 0))
    until(lambda: peer.line.take_ended(0.0) == [StepDone(7, 0, 0, 0)])
    other.close()


def test_a_sidecar_that_is_gone_is_noticed_without_a_step(peer: Peer, post: Post) -> None:
    post.step(1)
    assert heard(peer, 1) == [1]
    peer.socket.close()
    until(lambda: peer.line.link is None)
    assert peer.line.take_ended(0.0) == [StepDone(1, 0, 0, 0)]


def test_it_pushes_out_a_frame_that_was_begun(peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_S", 10 * LONG_S)
    post.step(1)
    assert heard(peer, 1) == [1]
    big = [Step(2, [], ["x" * (12 << 20)])]
    post.courier.post(Parcel(lambda: big, lambda sent: post.sent.update({2: sent})))
    until(lambda: 2 in post.sent)
    assert peer.connection.stalled
    assert heard(peer, 1) == [2]
    until(lambda: not peer.connection.stalled)


def test_closed_it_loses_what_is_left_and_others_take_in_again(peer: Peer, post: Post) -> None:
    begun, go = threading.Event(), threading.Event()
    post.step(0, lambda: (begun.set(), go.wait(LONG_S)))
    assert begun.wait(LONG_S)
    post.step(1)
    threading.Timer(0.05, go.set).start()
    post.courier.close(LONG_S)
    assert post.sent == {0: True, 1: False}
    assert not post.step(2)
    assert peer.line.heard is None
    peer.line.send(Step(9, []))
    peer.say(StepDone(9, 0, 0, 0))
    assert peer.line.take_ended(LONG_S) == [StepDone(9, 0, 0, 0)]


def test_one_that_hangs_is_left_alone(peer: Peer, post: Post) -> None:
    begun, go = threading.Event(), threading.Event()
    post.step(0, lambda: (begun.set(), go.wait(LONG_S)))
    assert begun.wait(LONG_S)
    post.step(1)
    post.courier.close(0.02)
    assert post.sent == {1: False}
    go.set()
    until(lambda: 0 in post.sent)


def test_a_fault_in_what_arrives_ends_it_and_loses_nothing_in_silence(
    peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(peer.line, "collect", fail)
    post.step(1)
    until(lambda: not post.step(2))
    until(lambda: post.sent.get(2) is False or 2 not in post.sent)
    assert isinstance(post.complaints[-1], LookupError)
    assert peer.line.heard is None


def test_a_process_that_may_have_no_more_threads_sends_nothing(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not post.step(1)
    assert post.sent == {}
    assert len(post.complaints) == 1
    assert post.step(2), "it may have one later"
    until(lambda: post.sent == {2: True})


def test_what_arrives_is_taken_in_between_the_parcels(peer: Peer, post: Post) -> None:
    peer.line.send(Step(77, []))
    peer.say(StepDone(77, 0, 0, 0))
    left: list[int] = []
    for number in range(20):
        post.step(number, lambda: (time.sleep(0.005), left.append(post.courier.parcels)))
    until(lambda: peer.line.take_ended(0.0))
    assert len(left) < 20


def test_a_poll_pushes_out_what_others_began_to_send(
    peer: Peer, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 10 * LONG_S)
    post.step(1)
    assert heard(peer, 1) == [1]
    until(lambda: peer.line.heard is peer.line.link)
    peer.line.send(Step(2, [], ["x" * (12 << 20)]))
    assert peer.connection.stalled
    numbers: list[int] = []
    reader = threading.Thread(target=lambda: numbers.extend(heard(peer, 1)))
    reader.start()
    until(lambda: peer.line.take_ended(0.0) or not peer.connection.stalled)
    reader.join(LONG_S)
    assert numbers == [2]


def test_a_lookup_that_has_not_left_is_no_reason_to_suspect_the_sidecar(peer: Peer) -> None:
    peer.line.expect([5, 6])
    assert peer.line.answer(5, 0.01) is None
    assert peer.line.usable
    peer.line.left([6], sent=True)
    assert peer.line.answer(6, 0.01) is None
    assert not peer.line.usable


def test_it_may_be_closed_by_several_at_once(peer: Peer) -> None:
    for _ in range(20):
        post = Post(peer)
        post.step(1)
        closers = [threading.Thread(target=post.courier.close, args=[LONG_S]) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(LONG_S)
        until(post.sent.copy)
        assert post.courier._bell == -1, "closed once, and rung no more"
        assert not post.complaints


def test_a_fork_has_no_courier(peer: Peer, post: Post) -> None:
    post.step(1)
    until(lambda: post.sent)
    alive, ended = post.courier._thread, threading.Thread(target=int)
    ended.start()
    ended.join()
    post.courier._thread = ended  # as the child of a fork finds it
    assert not post.step(2)
    post.courier._thread = alive
