"""A reader that takes one message, says so, and reads no more: the soak stops it with SIGSTOP.

python -m tools.soak.stopped ENDPOINT            of a subscription
python -m tools.soak.stopped ENDPOINT --replay   of a reply with all that is retained
"""

from __future__ import annotations

import sys
import time

import zmq

from kvevents_service.wire.frames import replay_request


def main(endpoint: str, *, replay: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER if replay else zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 1 if replay else 1000)
        if not replay:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, 60_000)  # the soak waits for it
        socket.connect(endpoint)
        if replay:
            socket.send_multipart(replay_request(0))
        socket.recv_multipart()
        sys.stdout.write("stops\n")
        sys.stdout.flush()
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], replay="--replay" in sys.argv)
