"""One connection to a sidecar, in the corners that its line cannot be brought to."""

import socket
import threading

from kvevents_service.engine.connection import READ_BYTES, Connection


def test_a_socket_that_another_thread_has_closed_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    connection.close()
    connection.wait(20.0)
    theirs.close()


def test_a_sidecar_that_never_stops_sending_holds_nobody_up_that_waits_for_its_end() -> None:
    ours, theirs = socket.socketpair()
    connection, stop = Connection(ours), threading.Event()

    def flood() -> None:
        theirs.settimeout(0.05)
        while not stop.is_set():
            try:
                theirs.sendall(bytes(4 * READ_BYTES))
            except TimeoutError:
                continue

    sender = threading.Thread(target=flood, daemon=True)
    sender.start()
    for _ in range(5):
        assert not connection.at_eof()
    stop.set()
    sender.join(20.0)
    theirs.close()
    while not connection.at_eof():
        pass
    connection.close()
