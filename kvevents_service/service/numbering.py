"""Event numbers that never go back, across a crash too: ranges reserved in a small file before they are used.

The file holds one number: every number below it may have been used. It is rewritten by rename and fsynced, and
its directory is held by a lock, so that two sidecars never number one stream. A file or directory of another user,
or a link in place of the file, is refused: who writes it decides what readers take for new.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from threading import Lock

from kvevents_service.errors import ConfigError

RESERVE = 4096
FILE_NAME = "next-seq"
LOCK_NAME = "lock"
MAX_SEQ = 1 << 62
"""Far from 2^63, which no number may reach."""
_MAX_TEXT = 32
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


class SequenceStore:
    """Reserves numbers in `directory`. `first_seq` is the first one this process may use. Thread safe."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE_NAME
        self._writing = Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(directory.stat(), directory)
            self._lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o600)
        except OSError as error:
            raise ConfigError("state_dir", f"a directory that can be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError("state_dir", f"a directory no other sidecar uses, not {directory}") from error
        self.first_seq = self.reserved = self._read()
        try:
            self._write(self.first_seq)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError("state_dir", f"a directory that can be written ({error.strerror})") from error

    def __repr__(self) -> str:
        return f"<SequenceStore reserved below {self.reserved}>"

    def cover(self, seq: int) -> None:
        """Make sure `seq` is reserved before it is sent. Writes the file once in RESERVE numbers."""
        with self._writing:
            if seq >= self.reserved:
                self._write(seq + RESERVE)
                self.reserved = seq + RESERVE

    def runs_out(self, seq: int) -> bool:
        """Less than half a reservation is left: time to `cover` the first number that is not reserved."""
        return seq + RESERVE // 2 >= self.reserved

    def close(self, next_seq: int) -> None:
        """A clean end: the next process goes on at exactly `next_seq`. OSError if that cannot be written."""
        try:
            with self._writing:
                self._write(next_seq)
        finally:
            os.close(self._lock)

    def _read(self) -> int:
        try:
            text = _text_of_ours(self._file)
        except FileNotFoundError:
            return 0
        except (OSError, ConfigError) as error:
            os.close(self._lock)
            raise ConfigError("state_dir", f"a file of ours that can be read, {self._file} ({error})") from error
        if not (text.strip().isdigit() and int(text) < MAX_SEQ):
            os.close(self._lock)
            raise ConfigError("state_dir", f"a number below {MAX_SEQ} in {self._file}")
        return int(text)

    def _write(self, number: int) -> None:
        fresh = self._file.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINKS, 0o600), "w") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._file)
        directory = os.open(self._file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _text_of_ours(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS)
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        _check_ours(found, path)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("state_dir", f"a regular file, {path}")
        return file.read(_MAX_TEXT)


def _check_ours(found: os.stat_result, path: Path) -> None:
    """Owned by this user, and nobody else may write it."""
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise ConfigError("state_dir", f"{path} to belong to user {os.geteuid()}, and not to be writable by all")
