"""Pages of an arena made present before a copy needs them: to clear a fresh page costs more than to fill it.

In a thread of its own, a piece at a time: while the kernel works on one it holds the lock that other threads need
to map memory, and no longer than that. The bytes that are there already stay as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Final, NamedTuple

from kvevents_service.transfer.crew import NICE, give_way

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; not in the mmap module. An older kernel refuses it, and pages come when they are touched."""
PIECE_BYTES: Final = 2 * 1024 * 1024
"""A huge page: half a millisecond or so."""


class Span(NamedTuple):
    """Memory of this process, from the beginning of a page on. `keeper`: while it lives the memory does."""

    address: int
    size_bytes: int
    keeper: object


class Prefault:
    """Makes these present, one after the other, from now on. `present_bytes`: so many are."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.present_bytes = 0
        self._spans = spans
        self._stopped = False
        self._thread = Thread(target=self._run, name="kvevents-prefault", daemon=True)
        if spans:
            with suppress(RuntimeError):  # the process may have no more threads: pages come when they are touched
                self._thread.start()

    def __repr__(self) -> str:
        return f"<Prefault {self.present_bytes} bytes, {'at it' if self._thread.is_alive() else 'over'}>"

    def stop(self) -> None:
        """No more of them behind the piece under way, whose memory lives as long. Waits for nothing."""
        self._stopped = True

    def join(self, wait_s: float) -> bool:
        """Wait for the end. False if that takes longer."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        give_way(NICE)
        try:
            self._populate_all()
        finally:
            self._spans = ()

    def _populate_all(self) -> None:
        populate = ctypes.CDLL(None).madvise  # the interpreter's lock is free meanwhile, as in mmap's it is not
        populate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for address, size_bytes, _ in self._spans:
            for start in range(0, size_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, size_bytes - start)
                if self._stopped or populate(address + start, size, MADV_POPULATE_WRITE):
                    return
                self.present_bytes += size
