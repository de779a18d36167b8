"""One connection to a sidecar, in the corners that its line cannot be brought to."""

import select
import socket

import pytest

from kvevents_service.engine import connection
from kvevents_service.engine.connection import READ_BYTES, Connection


def test_a_socket_that_another_thread_has_closed_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    made = Connection(ours)
    made.close()
    made.wait(20.0)
    theirs.close()


def test_a_sidecar_that_never_stops_sending_holds_nobody_up_that_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_THROWN_AWAY", 2)
    ours, theirs = socket.socketpair()
    made = Connection(ours)
    theirs.sendall(bytes(4 * READ_BYTES))
    theirs.close()
    assert not made.at_eof()
    assert select.select([ours], [], [], 0)[0], "it has not read all of it"
    while not made.at_eof():
        pass
    made.close()
