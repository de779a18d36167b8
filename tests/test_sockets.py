"""Endpoints: what can be bound, and what is left alone."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvevents_service.errors import ConfigError
from kvevents_service.sockets import SHARED_BYTES, bind, new_context, send_now


@pytest.fixture
def pub() -> Iterator[Callable[[], zmq.Socket]]:
    context, made = zmq.Context(), []

    def make() -> zmq.Socket:
        made.append(context.socket(zmq.PUB))
        return made[-1]

    yield make
    for one in made:
        one.close(0)
    context.term()


def test_a_file_in_the_place_of_an_ipc_endpoint_is_kept(pub: Callable[[], zmq.Socket], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="pub: expected no other file at"):
        bind(pub(), f"ipc://{path}", "pub")
    assert path.read_text() == "precious"


def test_an_ipc_endpoint_that_is_in_use_is_not_taken_away(pub: Callable[[], zmq.Socket], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/pub"
    assert bind(pub(), endpoint, "pub") == endpoint
    with pytest.raises(ConfigError, match="replay: expected a path that nobody else listens on"):
        bind(pub(), endpoint, "replay")


def test_a_stale_ipc_socket_is_replaced(pub: Callable[[], zmq.Socket], tmp_path: Path) -> None:
    path = tmp_path / "pub"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert bind(pub(), f"ipc://{path}", "pub") == f"ipc://{path}"


@pytest.mark.parametrize("endpoint", ["ipc://*", "ipc://@kvevents-test"])
def test_endpoints_without_a_path_are_bound(pub: Callable[[], zmq.Socket], endpoint: str) -> None:
    assert bind(pub(), endpoint, "pub").startswith("ipc://")


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    """A socket that sends one message before it must wait, and the one that receives."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as receiver:
        sender.setsockopt(zmq.SNDHWM, 1)
        receiver.setsockopt(zmq.RCVHWM, 1)
        receiver.setsockopt(zmq.RCVTIMEO, 5000)
        sender.setsockopt(zmq.LINGER, 0)
        sender.bind("inproc://pair")
        receiver.connect("inproc://pair")
        yield sender, receiver


def test_a_message_is_sent_in_its_frames_and_a_large_last_one_is_shared(
    pair: tuple[zmq.Socket, zmq.Socket],
) -> None:
    sender, receiver = pair
    small, large = [b"", b"a", b"b" * (SHARED_BYTES - 1)], [b"c", bytes(SHARED_BYTES)]
    assert send_now(sender, small) is None
    assert receiver.recv_multipart() == small
    tracker = send_now(sender, large)
    assert tracker is not None
    assert receiver.recv_multipart() == large
    tracker.wait(5.0)


def test_a_message_that_there_is_no_room_for_is_not_begun(pair: tuple[zmq.Socket, zmq.Socket]) -> None:
    sender, receiver = pair
    sent: list[list[bytes]] = []

    def fill() -> None:
        while len(sent) < 100:
            send_now(sender, message := [b"first", b"%d" % len(sent)])
            sent.append(message)

    with pytest.raises(zmq.Again):
        fill()
    assert [receiver.recv_multipart() for _ in sent] == sent
    sender.send_multipart([b"be", b"hind"])
    assert receiver.recv_multipart() == [b"be", b"hind"]


def test_a_contexts_own_threads_take_no_core_from_the_loop() -> None:
    """They see to it themselves, once they run."""

    def policies() -> dict[int, int]:
        return {int(task.name): os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}

    before, deadline = policies(), time.monotonic() + 10.0
    with new_context() as context, context.socket(zmq.PUB):
        while True:
            own = [policy for thread, policy in policies().items() if thread not in before]
            if (own and set(own) == {os.SCHED_BATCH}) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert set(own) == {os.SCHED_BATCH}
