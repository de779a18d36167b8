"""A sidecar that does what no sidecar should: it is one answer to every message, on a real socket."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvevents_service.wire.control import (
    ClientMessage,
    Error,
    Hello,
    Hit,
    Inspected,
    Load,
    Loaded,
    Lookup,
    Mark,
    Reset,
    ResetDone,
    Step,
    StepDone,
    Welcome,
)
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message

HUGE = (1 << 63) - 1
Answer = Callable[[ClientMessage], bytes | None]
"""What is sent for a message; None: the connection is closed."""


def frames(*messages: msgspec.Struct) -> bytes:
    return b"".join(bytes(encode_message(message)) for message in messages)


WELCOME = frames(Welcome(1, "hostile", 1, 64, 4096))


def number_of(message: ClientMessage) -> int:
    match message:
        case Step():
            return message.step_id
        case Load():
            return message.load_id
        case Lookup() | Reset():
            return message.call_id
    return 0


def silent(message: ClientMessage) -> bytes:
    return WELCOME if isinstance(message, Hello) else b""


def silent_from_the_start(message: ClientMessage) -> bytes:
    return b""


def garbage(message: ClientMessage) -> bytes:
    return WELCOME if isinstance(message, Hello) else random.Random(number_of(message)).randbytes(100)


def garbage_at_once(message: ClientMessage) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n"


def half_a_frame(message: ClientMessage) -> bytes:
    return WELCOME if isinstance(message, Hello) else proper(message)[:-3]


def closes_in_a_frame(message: ClientMessage) -> bytes | None:
    if isinstance(message, Hello):
        return WELCOME + frames(Hit(999, 1, 1))[:-2]
    return None


def endless_frame(message: ClientMessage) -> bytes:
    return WELCOME if isinstance(message, Hello) else b"\xff\xff\xff\xff" + bytes(1000)


def proper(message: ClientMessage) -> bytes:
    """What a sidecar without room says."""
    number = number_of(message)
    match message:
        case Hello():
            return WELCOME
        case Step():
            blocks = sum(len(offer.block_ids) // 4 for offer in message.offers)
            return frames(StepDone(number, 0, 0, blocks))
        case Load():
            return frames(Loaded(number, 0))
        case Lookup():
            return frames(Hit(number, 0))
        case Reset():
            return frames(ResetDone(number, 0))
    return b""


def unknown_numbers(message: ClientMessage) -> bytes:
    """Ends and answers of what was never asked for, around the right ones."""
    lies = frames(
        StepDone(HUGE, HUGE, HUGE, HUGE), StepDone(-1, -1, -1, -1), Loaded(HUGE, 7), Loaded(0, -7), Hit(-3, 9, 9)
    )
    return WELCOME if isinstance(message, Hello) else lies + proper(message) + lies


def everything_three_times(message: ClientMessage) -> bytes:
    return proper(message) * (1 if isinstance(message, Hello) else 3)


def absurd_hits(message: ClientMessage) -> bytes:
    """More than was asked for, and loads that bring more than that."""
    number = number_of(message)
    match message:
        case Lookup():
            return frames(Hit(number, HUGE, number))
        case Load():
            return frames(Loaded(number, HUGE))
    return proper(message)


def hits_without_a_lease(message: ClientMessage) -> bytes:
    return frames(Hit(number_of(message), 2)) if isinstance(message, Lookup) else proper(message)


def negative_hits(message: ClientMessage) -> bytes:
    return frames(Hit(number_of(message), -5, HUGE)) if isinstance(message, Lookup) else proper(message)


def hits_that_never_load(message: ClientMessage) -> bytes:
    match message:
        case Lookup():
            return frames(Hit(number_of(message), 2, number_of(message)))
        case Load():
            return b""
    return proper(message)


def answers_of_the_wrong_kind(message: ClientMessage) -> bytes:
    """And counters of no step: the right end follows."""
    number = number_of(message)
    wrong = frames(
        Inspected(number, 0, 32, {}),
        ResetDone(number, -1),
        Error("bad", "field", "else", None),
        Welcome(9, "", 0, -1, -1),
    )
    return WELCOME if isinstance(message, Hello) else wrong + proper(message)


def refuses_everything(message: ClientMessage) -> bytes:
    if isinstance(message, Hello):
        return WELCOME
    return b"" if isinstance(message, Mark) else frames(Error("no", "x" * 9000, "y", number_of(message)))


def a_flood(message: ClientMessage) -> bytes:
    return WELCOME if isinstance(message, Hello) else frames(StepDone(HUGE, 1, 1, 1)) * 5000 + proper(message)


ANSWERS: list[Answer] = [
    *(silent, silent_from_the_start, garbage, garbage_at_once, half_a_frame, closes_in_a_frame, endless_frame),
    *(unknown_numbers, everything_three_times, absurd_hits, hits_without_a_lease, negative_hits),
    *(hits_that_never_load, answers_of_the_wrong_kind, refuses_everything, a_flood),
]


class HostileSidecar:
    """Listens until `stop`, which ends all connections: to an engine that is what a death looks like."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
                self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        reader = FrameReader()
        with suppress(OSError):
            while data := peer.recv(1 << 16):
                for body in reader.feed(data):
                    answer = self._answer(decode_client(body))
                    if answer is None:
                        return peer.close()
                    peer.sendall(answer)
        return None

    def stop(self) -> None:
        _end(self._listener, self._threads[:1])
        for peer in self._peers:
            _end(peer, [])
        _end(self._listener, self._threads)


def _end(sock: socket.socket, threads: list[threading.Thread]) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    sock.close()
