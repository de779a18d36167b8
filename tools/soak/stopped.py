"""A reader that subscribes, takes one message, says so, and reads no more: the soak stops it with SIGSTOP."""

from __future__ import annotations

import sys
import time

import zmq


def main(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)
        sub.recv_multipart()
        sys.stdout.write("subscribed\n")
        sys.stdout.flush()
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1])
