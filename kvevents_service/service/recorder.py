"""Keeps the raw messages of a source, for a bug report or to play them again (`recorded_feed`).

The form is that of proto/vectors (`wire.recorded`); `at` is the time in seconds since the recording began. A header
says whether the source can be asked, which decides what its numbers mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import IO

from kvevents_service.errors import ConfigError
from kvevents_service.wire.redacted import redacted


class Recorder:
    """Writes to a new file, readable by its owner only: it has token ids unless `redact`.

    A disk that fails stops the recording, never the relay."""

    def __init__(self, path: str, clock: Callable[[], float], *, replay: bool, redact: bool = False) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii")
        except OSError as error:
            expected = f"a new file that can be written, not {path} ({error.strerror})"
            raise ConfigError("record", expected) from error
        self.written = self.failed = 0
        self._file: IO[str] | None = file
        self._clock = clock
        self._redact = redact
        self._started = clock()
        self._line({"recorder": "kvevents relay", "replay": replay, "redacted": redact})

    def __repr__(self) -> str:
        return f"<Recorder written={self.written} failed={self.failed}>"

    def message(self, frames: Sequence[bytes], *, reply: bool) -> None:
        """One live message, or one of a replay's reply: as it came, but that every reply has four frames."""
        line: dict[str, object] = {"at": round(self._clock() - self._started, 6)}
        kept = self._kept([b""] * (4 - len(frames)) + [*frames] if reply else frames)
        left_out = {"note": "no batch: left out"}
        self._line(line | (left_out if kept is None else {"frames": [one.hex() for one in kept]}))

    def _kept(self, frames: Sequence[bytes]) -> Sequence[bytes] | None:
        if not self._redact or not frames or not frames[-1]:
            return frames
        payload = redacted(frames[-1])
        return None if payload is None else [*frames[:-1], payload]

    def _line(self, plain: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()
            self.written += 1
        except OSError:
            self.failed += 1
            self.close()

    def close(self) -> None:
        """Again is harmless."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
