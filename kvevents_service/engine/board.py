"""A sidecar's name board, as an engine maps it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

from kvevents_service.wire.name_board import NameBoard

MAX_BOARD_BYTES: Final = 1 << 28


def attach(fds: Sequence[int], size_bytes: int) -> NameBoard | None:
    """The board in the memory that came with a welcome; None if there is none, or none that can be trusted.

    Only memory that is sealed against shrinking: to read behind its end would kill the engine.
    """
    if len(fds) != 1 or not 0 < size_bytes <= MAX_BOARD_BYTES:
        return None
    try:
        sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fds[0]).st_size != size_bytes:
            return None
        return NameBoard(memoryview(mmap.mmap(fds[0], size_bytes, prot=mmap.PROT_READ)))
    except (OSError, ValueError):
        return None
