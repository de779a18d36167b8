"""Endpoints: what can be bound, and what is left alone."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvevents_service.errors import ConfigError
from kvevents_service.sockets import bind


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
