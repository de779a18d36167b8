"""A recording in a feed's place: its messages come again, in their order, at their own speed or another.

The numbers are read as they were read then: a recording of a source that could be asked has its replies in it.
Lines without `at` come at once.
"""

from __future__ import annotations

from collections import Counter, deque
from math import isfinite
from pathlib import Path
from typing import IO, Final

import msgspec

from kvevents_service.core.sequence import Ask, Deliver, Gap, Origin, Restart, Resync, Sequencer, Step
from kvevents_service.errors import ConfigError, WireError
from kvevents_service.items import Batch, Item, Source, Undecodable
from kvevents_service.lane import Options
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.frames import parse_live, parse_replay_reply

AT_ONCE: Final = 64
SETTLE_S: Final = Options().timing.settle_s
_FOREIGN: Final = (ValueError, TypeError, RecursionError)


class _Line(msgspec.Struct):
    at: float | None = None
    source: str = ""
    frames: list[str] | None = None
    replay: bool = False


class RecordedFeed:
    """Gives what `Feed` gives. speed: 2 is twice as fast. Of several sources or topics the first is read.

    Whatever rank its batches say, they are those of `dp_rank`.
    """

    def __init__(self, path: str, speed: float = 1.0, *, dp_rank: int = 0) -> None:
        self.source = Source(path, dp_rank=dp_rank)
        self.connected = self.stale = self.ended = False
        self.invalid = 0
        self._path, self._speed = Path(path), speed
        self._file: IO[str] | None = None
        self._next: _Line | None = None
        self._started = 0.0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._only: str | None = None
        self._topic: bytes | None = None
        self._out: deque[Deliver | Gap | Restart | Resync | Undecodable] = deque()
        self._origin = Origin(self.source.name, b"", dp_rank)
        self._sequence = self._sequencer(replay=False)

    def __repr__(self) -> str:
        return f"<RecordedFeed {self._path}{' ended' if self.ended else ''} {self._sequence!r}>"

    @property
    def replaying(self) -> bool:
        return self._sequence.replaying

    @property
    def duplicates(self) -> int:
        return self._sequence.duplicates

    def open(self, now: float) -> None:
        """ConfigError for a file that cannot be read."""
        try:
            self._file = self._path.open(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise ConfigError("input", f"a file that can be read, not {self._path} ({error.strerror})") from error
        self.connected, self._started = True, now
        self._advance()

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def refresh(self) -> None:
        """Nobody can be asked."""

    def stats(self) -> Counter[str]:
        return Counter(**self._sequence.stats(), undecodable=self.invalid)

    def poll(self, now: float) -> None:
        """Read what is due."""
        for _ in range(AT_ONCE):
            line = self._next
            if line is None or self._due_s(line) > now:
                return
            self._take(line)
            self._advance()

    def take(self) -> Item | None:
        if not self._out:
            return None
        step = self._out.popleft()
        return self._decoded(step) if isinstance(step, Deliver) else step

    def _sequencer(self, *, replay: bool) -> Sequencer:
        sequence = Sequencer(replay=replay)
        sequence.source = self._origin
        return sequence

    # lines

    def _advance(self) -> None:
        """To the next line of the source."""
        for text in self._file or ():
            line = self._parsed(text)
            if line is not None:
                self._next = line
                return
        self._next, self.ended = None, True
        if self._sequence.replaying:
            self._steps(self._sequence.end())

    def _parsed(self, text: str) -> _Line | None:
        if not text.strip():
            return None
        try:
            line = msgspec.json.decode(text, type=_Line)
        except _FOREIGN:
            self.invalid += 1
            return None
        if line.frames is None:
            self._header(line)
            return None
        self._only = line.source if self._only is None else self._only
        return line if line.source == self._only else None

    def _header(self, line: _Line) -> None:
        if line.replay and self._only is None:
            self._sequence = self._sequencer(replay=True)
            self._steps(self._sequence.start())

    def _due_s(self, line: _Line) -> float:
        """When, on the clock of `poll`."""
        at = line.at
        if at is None or not isfinite(at):
            return 0.0
        self._first_at = at if self._first_at is None else self._first_at
        return self._started + (at - self._first_at) / self._speed

    def _take(self, line: _Line) -> None:
        at = line.at or self._last_at
        if at - self._last_at > SETTLE_S:
            self._sequence.settle()
        self._last_at = at
        try:
            frames = [bytes.fromhex(frame) for frame in line.frames or ()]
            self._message(frames)
        except (WireError, ValueError):
            self.invalid += 1

    def _message(self, frames: list[bytes]) -> None:
        sequence = self._sequence
        if len(frames) == 3:
            live = parse_live(frames)
            self._topic = live.topic if self._topic is None else self._topic
            self._steps(sequence.live(live) if live.topic == self._topic else [])
            return
        reply = parse_replay_reply(frames)
        if not sequence.replaying:
            return  # of a request that was given up
        self._steps(sequence.end() if reply is None else sequence.replayed(reply))

    def _steps(self, steps: list[Step]) -> None:
        self._out += [step for step in steps if not isinstance(step, Ask)]

    def _decoded(self, step: Deliver) -> Item:
        frame, origin = step.frame, self._origin
        try:
            batch, skipped = decode_batch(frame.payload, read_tokens=True)
        except WireError as error:
            return Undecodable(frame.topic, frame.seq, error, origin)
        return Batch(frame.topic, frame.seq, batch, skipped, step.replayed, origin)
