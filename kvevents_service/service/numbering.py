"""Event numbers that never go back, across a crash too: ranges reserved in a small file before they are used.

The file holds one number: every number below it may have been used. It is rewritten by rename and fsynced, and
its directory is held by a lock, so that two sidecars never number one stream.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvevents_service.errors import ConfigError

RESERVE = 4096
FILE_NAME = "next-seq"
LOCK_NAME = "lock"


class SequenceStore:
    """Reserves numbers in `directory`. `first_seq` is the first one this process may use."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("state_dir", f"a directory that can be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError("state_dir", f"a directory no other sidecar uses, not {directory}") from error
        self.first_seq = self.reserved = self._read()

    def __repr__(self) -> str:
        return f"<SequenceStore reserved below {self.reserved}>"

    def cover(self, seq: int) -> None:
        """Make sure `seq` is reserved before it is sent. Writes the file once in RESERVE numbers."""
        if seq >= self.reserved:
            self._write(seq + RESERVE)
            self.reserved = seq + RESERVE

    def runs_out(self, seq: int) -> bool:
        """Less than half a reservation is left: time to `cover` the first number that is not reserved."""
        return seq + RESERVE // 2 >= self.reserved

    def close(self, next_seq: int) -> None:
        """A clean end: the next process goes on at exactly `next_seq`. OSError if that cannot be written."""
        try:
            self._write(next_seq)
        finally:
            os.close(self._lock)

    def _read(self) -> int:
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return 0
        if not text.strip().isdigit():
            os.close(self._lock)
            raise ConfigError("state_dir", f"a number in {self._file}")
        return int(text)

    def _write(self, number: int) -> None:
        fresh = self._file.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._file)
        directory = os.open(self._file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
