"""The line to a sidecar: only EOF frees memory, polling pushes out what is left, and waits hold no lock."""

import threading
import time
from collections.abc import Iterator

import pytest
from engine.peer import Peer

from kvevents_service.engine.link import Link
from kvevents_service.errors import SidecarGone
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    Hit,
    Inspect,
    Inspected,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Step,
    StepDone,
    Welcome,
)

LONG_S = 20.0
GARBAGE = b"\x02\0\0\0\x91\xa1"


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def test_bytes_that_are_no_message_do_not_free_memory(peer: Peer) -> None:
    peer.line.send(Step(1, []))
    peer.say(GARBAGE)
    assert peer.line.take_ended(0.0) == []
    peer.say(GARBAGE, StepDone(1, 0, 0, 0))
    assert peer.line.take_ended(0.05) == []
    assert peer.line.outstanding == 1
    peer.socket.close()
    assert peer.line.take_ended(LONG_S) == [StepDone(1, 0, 0, 0)]


def test_giving_up_does_not_free_memory(peer: Peer) -> None:
    peer.line.send(Load(1, "r", 1, b""))
    peer.line.hang_up()
    assert not peer.line.let_go(0.05)
    assert peer.line.take_ended(0.0) == []
    peer.say(Loaded(1, 3))
    assert peer.line.take_ended(LONG_S) == [Loaded(1, 3)]
    peer.socket.close()
    assert peer.line.let_go(LONG_S)


def test_polling_alone_pushes_out_a_frame_that_was_begun(peer: Peer) -> None:
    big = Step(1, [Offer("r", 0, b"", bytes(24 << 20), b"")])
    assert peer.line.send(big)
    assert peer.connection.stalled
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(read_until(peer, 1)))
    reader.start()
    deadline = time.monotonic() + LONG_S
    while peer.connection.stalled and time.monotonic() < deadline:
        peer.line.take_ended(0.05)
    reader.join(LONG_S)
    assert [message.step_id for message in got] == [1]  # type: ignore[attr-defined]


def read_until(peer: Peer, count: int) -> list[object]:
    messages: list[object] = []
    while len(messages) < count:
        messages += peer.heard(LONG_S)
    return messages


def test_a_frame_no_sidecar_takes_is_refused_here(peer: Peer) -> None:
    with pytest.raises(ValueError, match="at most"):
        peer.line.send(Step(1, [Offer("r", 0, b"", bytes(40 << 20), b"")]))
    assert peer.line.link is not None


def test_an_answer_another_thread_took_in_still_arrives(peer: Peer) -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=[peer, stop]) for work in (poll_until, answer_until)]
    for thread in threads:
        thread.start()
    try:
        for call_id in range(50):
            answer = peer.line.ask(Inspect(call_id), LONG_S)
            assert isinstance(answer, Inspected)
            assert answer.call_id == call_id
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG_S)


def answer_until(peer: Peer, stop: threading.Event) -> None:
    while not stop.is_set():
        for message in peer.heard():
            peer.say(Inspected(message.call_id, 0, 0, {}))  # type: ignore[attr-defined]


def poll_until(peer: Peer, stop: threading.Event) -> None:
    while not stop.is_set():
        peer.line.take_ended(0.01)


def test_a_long_wait_of_one_thread_holds_up_no_other(peer: Peer) -> None:
    waiting = threading.Thread(target=peer.line.take_ended, args=[1.0])
    waiting.start()
    start = time.monotonic()
    assert peer.line.ask(Lookup(1, "r", b""), 0.05) is None
    assert time.monotonic() - start < 0.5
    waiting.join(LONG_S)


def test_a_hit_that_comes_too_late_is_released(peer: Peer) -> None:
    assert peer.line.ask(Lookup(1, "r", b""), 0.01) is None
    assert not peer.line.usable
    peer.heard()
    peer.say(Hit(1, 4, 77))
    assert peer.line.usable
    assert peer.heard(LONG_S) == [Release(77)]


def test_an_answer_may_be_taken_later(peer: Peer) -> None:
    assert peer.line.begin(Lookup(1, "r", b""))
    peer.say(Hit(1, 4, 77))
    peer.line.take_ended(0.0)
    assert peer.line.answer(1, 0.0) == Hit(1, 4, 77)
    assert peer.line.answer(1, LONG_S) is None, "nobody waits for it any more"


@pytest.mark.parametrize("early", [True, False])
def test_a_hit_that_nobody_wants_is_released_whenever_it_comes(peer: Peer, early: bool) -> None:
    assert peer.line.begin(Lookup(1, "r", b""))
    peer.heard()
    if early:
        peer.say(Hit(1, 4, 77))
        peer.line.collect()
    peer.line.give_up(1)
    if not early:
        peer.say(Hit(1, 4, 77))
        peer.line.collect()
    assert peer.heard(LONG_S) == [Release(77)]


@pytest.mark.parametrize("dead", [True, False])
def test_nobody_waits_on_a_new_link_for_an_answer_of_the_old_one(peer: Peer, dead: bool) -> None:
    other = Peer()
    assert peer.line.begin(Lookup(1, "r", b""))
    if dead:
        peer.socket.close()
        peer.line.collect()
    else:
        peer.line.hang_up()
    peer.line.adopt(Link(other.connection, Welcome(PROTOCOL_VERSION, "boot", 2, 8, 64)))
    assert peer.line.answer(1, LONG_S) is None
    assert peer.line.usable
    other.close()


def test_eof_ends_everything(peer: Peer) -> None:
    peer.line.send(Step(1, []))
    peer.line.send(Load(2, "r", 1, b""))
    peer.socket.close()
    assert peer.line.take_ended(LONG_S) == [StepDone(1, 0, 0, 0), Loaded(2, 0)]
    assert peer.line.link is None
    with pytest.raises(SidecarGone):
        list(peer.connection.receive())
