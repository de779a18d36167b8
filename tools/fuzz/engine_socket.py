"""Bad input on the engine socket: in a session after a good hello, in the hello itself, and none at all.

What must come of it: each frame has its answer, each broken border an error and the end of the connection.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from random import Random

from kvevents_service.engine.layout import SharedMemory
from kvevents_service.errors import WireError
from kvevents_service.wire.control import (
    MAX_FRAME_BYTES,
    ClientMessage,
    Error,
    Inspect,
    Inspected,
    Mark,
    Release,
    Step,
    Welcome,
)
from kvevents_service.wire.framing import FrameReader, decode_client, decode_sidecar, encode_message
from tools.fuzz.messages import MEMORY_BYTES, Keys, Messages, hello
from tools.fuzz.mutate import bad_body, mutate_bytes

ANSWER_S = 20.0
SENTINEL = 1 << 40
LAST_MARK = 2**64 - 1
MOST_FDS = 70
UNANSWERED = (Release, Mark)
"""What has an answer only if it is refused."""


class Fault(Exception):
    """Something that must not be; the text says what, with the input."""


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


class Talk:
    """One connection to the engine socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)  # blocking: with a timeout, a full backlog would be an error at once
        self._socket.settimeout(ANSWER_S)
        self._reader = FrameReader()

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> bool:
        """False if the sidecar has closed already."""
        try:
            if fds:
                data = data[socket.send_fds(self._socket, [data], fds) :]
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def answers(self) -> Iterator[object]:
        """Until EOF. Fault if nothing comes in ANSWER_S."""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise Fault(f"no answer and no end of the connection in {ANSWER_S:.0f} s") from None
            except ConnectionResetError:
                return
            if not data:
                return
            yield from map(decode_sidecar, self._reader.feed(data))

    def hang_up(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it has closed already
            return

    def close(self) -> None:
        self._socket.close()


class EngineSocket:
    """`session`, `greet` and `crowd` each take a number of inputs, and return how many they gave."""

    def __init__(self, path: str, random: Random) -> None:
        self.counts: Counter[str] = Counter()
        self._path = path
        self._random = random
        self._messages = Messages(random)
        self._keys = Keys()
        self._memory = SharedMemory.create(MEMORY_BYTES)
        self._sentinel = SENTINEL

    # a session

    def session(self, inputs: int) -> int:
        """Frames in a session of their own, then one whose border is broken."""
        talk = Talk(self._path)
        try:
            answers = self._welcomed(talk)
            bodies = [self._body() for _ in range(inputs - 1)]
            self._answered(talk, answers, bodies)
            self._broken(talk, answers)
        finally:
            talk.close()
        return inputs

    def _body(self) -> bytes:
        while True:
            body = bad_body(self._messages.any(), self._random)
            message = _understood(body)
            if not isinstance(message, Step) or self._keys.agree(message):
                return body

    def _welcomed(self, talk: Talk) -> Iterator[object]:
        talk.send(bytes(encode_message(hello())), (self._memory.fd,))
        answers = talk.answers()
        first = next(answers, None)
        if not isinstance(first, Welcome):
            raise Fault(f"a good hello got {first}")
        return answers

    def _answered(self, talk: Talk, answers: Iterator[object], bodies: list[bytes]) -> None:
        """Each has its answer. The last mark ends copies that wait for one; some may end behind the sentinel."""
        wanted = Counter(map(_expectation, bodies))
        self._sentinel += 1
        last = encode_message(Mark(LAST_MARK)) + encode_message(Inspect(self._sentinel))
        talk.send(b"".join(map(framed, bodies)) + bytes(last))
        heard: list[object] = []
        try:
            self._hear(answers, heard, wanted["error"] + wanted["answer"])
        except Fault as fault:
            raise Fault(f"{fault}; {_unanswered(bodies, heard)}") from None
        errors = sum(isinstance(answer, Error) for answer in heard)
        self.counts["errors"] += errors
        self.counts["answers"] += len(heard) - errors
        self.counts.update(f"error {answer.code}" for answer in heard if isinstance(answer, Error))
        if errors < wanted["error"] or len(heard) > sum(wanted.values()):
            raise Fault(f"{errors} errors in {len(heard)} answers to {dict(wanted)}: {heard[-200:]}")

    def _hear(self, answers: Iterator[object], heard: list[object], least: int) -> None:
        seen = False
        for answer in answers:
            if isinstance(answer, Inspected) and answer.call_id == self._sentinel:
                seen = True
            else:
                heard.append(answer)
            if seen and len(heard) >= least:
                return
        raise Fault(f"the connection ended after {len(heard)} answers of {least}")

    def _broken(self, talk: Talk, answers: Iterator[object]) -> None:
        """A frame that announces too much has an error; one that breaks off has none. Both end the connection."""
        too_long = self._random.randrange(2) == 0
        most = MAX_FRAME_BYTES if too_long else 0
        length = most + self._random.randrange(1, 2**32 - most if too_long else MAX_FRAME_BYTES)
        body = self._random.randbytes(min(length - 1, 50))
        talk.send(length.to_bytes(4, "little") + body)
        talk.hang_up()
        said = [answer.code for answer in answers if isinstance(answer, Error)]
        self.counts["broken borders"] += 1
        if too_long and "bad_frame" not in said:
            raise Fault(f"a frame of {length} bytes was not refused: {said}")

    # a hello

    def greet(self, inputs: int) -> int:
        """A hello each, with descriptors or without: a welcome, an error, or the end."""
        for _ in range(inputs):
            talk = Talk(self._path)
            try:
                self._greet(talk)
            finally:
                talk.close()
        return inputs

    def _greet(self, talk: Talk) -> None:
        random = self._random
        role = random.choice(("engine", "engine", "worker", "observer"))
        message = hello(random.choice(("fuzz", "healthy", "")), role)
        body = bad_body(message, random)
        frame = framed(body) if random.randrange(8) else mutate_bytes(framed(body), random)
        fds = random.choice((0, 1, 1, 1, 2, MOST_FDS))
        talk.send(frame, (random.choice((self._memory.fd, 0)),) * fds if frame else ())
        if not _is_whole(frame):
            talk.hang_up()
        answer = next(talk.answers(), None)
        self.counts["hello unanswered" if answer is None else f"hello {type(answer).__name__.lower()}"] += 1
        if answer is None and _is_whole(frame) and len(frame) == _border(frame):
            raise Fault(f"a hello had no answer: {frame[:300].hex()}")

    # a crowd

    def crowd(self, inputs: int) -> int:
        """Connections at once that say half of a hello, or nothing, and leave."""
        talks = [Talk(self._path) for _ in range(inputs)]
        frame = bytes(encode_message(hello()))
        for talk in talks:
            talk.send(frame[: self._random.randrange(len(frame))])
        for talk in talks:
            talk.close()
        self.counts["half hellos"] += inputs
        return inputs

    def close(self) -> None:
        self._memory.map.close()
        os.close(self._memory.fd)


def _understood(body: bytes) -> ClientMessage | None:
    try:
        return decode_client(body)
    except WireError:
        return None


def _expectation(body: bytes) -> str:
    message = _understood(body)
    if message is None:
        return "error"
    return "silence" if isinstance(message, UNANSWERED) else "answer"


def _unanswered(bodies: list[bytes], heard: list[object]) -> str:
    """The good messages among them whose number no answer has."""
    numbers = {getattr(answer, name, None) for answer in heard for name in ("step_id", "load_id", "call_id")}
    good = [decode_client(body) for body in bodies if _expectation(body) == "answer"]
    ids = (
        (message, getattr(message, name, None)) for message in good for name in ("step_id", "load_id", "call_id")
    )
    return (
        f"no answer to: {[message for message, number in ids if number is not None and number not in numbers][:3]}"
    )


def _border(frame: bytes) -> int:
    """Where the first frame ends, as it says itself."""
    return 4 + int.from_bytes(frame[:4], "little")


def _is_whole(frame: bytes) -> bool:
    """What is behind the first frame is another one's, and unread when the sidecar closes: that may take the
    answer along."""
    return len(frame) >= 4 and _border(frame) <= len(frame)
