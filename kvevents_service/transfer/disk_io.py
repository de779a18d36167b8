"""Whole reads and writes of parts of a file, and the count of what went wrong with them, by kind."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter

SECTOR_BYTES = 4096
"""Direct I/O begins and ends at a multiple of this: a multiple of the logical block size of the disks there are."""
KINDS = ("enospc", "eio", "short", "checksum")
"""Faults that are counted from the start. Others appear when they happen, by the name of their errno."""
GONE = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ})
"""What a disk says of bytes that it has lost. Another error may pass."""


class ShortFile(OSError):
    """The file ends before the bytes that were asked for."""

    def __init__(self) -> None:
        super().__init__(errno.ENODATA, "the file ends before its last slot")


class DiskFaults:
    """Counters that several threads raise."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._lock = threading.Lock()

    def count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def count_error(self, error: OSError) -> None:
        """By kind: `short`, or the name of its errno."""
        name = errno.errorcode.get(error.errno or 0, "other").lower()
        self.count("short" if isinstance(error, ShortFile) else name)

    def stats(self) -> dict[str, int]:
        """`disk_errors_enospc`, ... since the start."""
        with self._lock:
            return {f"disk_errors_{kind}": count for kind, count in sorted(self._counts.items())}


def write_all(fd: int, data: memoryview, offset: int, unit: int = 1) -> None:
    """Every byte, or OSError. What the kernel takes of it goes on at a multiple of `unit` bytes."""
    while data:
        taken = os.pwrite(fd, data, offset)
        taken -= taken % unit
        if not taken:
            raise OSError(errno.EIO, "the disk took no more bytes")
        data, offset = data[taken:], offset + taken


def read_all(fd: int, data: memoryview, offset: int, unit: int = 1) -> None:
    """Fill `data`. ShortFile if the file ends before that."""
    while data:
        given = os.preadv(fd, [data], offset)
        given -= given % unit
        if not given:
            raise ShortFile
        data, offset = data[given:], offset + given
