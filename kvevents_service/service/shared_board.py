"""The memory of a name board: sealed, so that no engine that maps it can be hurt by us, nor we by an engine."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from typing import Final

from kvevents_service.wire.name_board import BOARD_BYTES, NameBoard

log = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1; not in the fcntl module. Nobody but us, who have mapped it, can write."""


class SharedBoard:
    """`board` is written here. `fd` is for engines; no board and no `fd` where the system does not make one."""

    def __init__(self) -> None:
        self.board: NameBoard | None = None
        self.fd: int | None = None
        try:
            self._make()
        except OSError as error:
            log.info(
                "engines ask for every prompt: no memory can be shared for the name board (%s)", error.strerror
            )
            self.close()

    def __repr__(self) -> str:
        return f"<SharedBoard fd={self.fd}>"

    @property
    def size_bytes(self) -> int:
        return 0 if self.board is None else BOARD_BYTES

    def _make(self) -> None:
        self.fd = os.memfd_create("kvevents-names", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, BOARD_BYTES)
        cells = mmap.mmap(self.fd, BOARD_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.board = NameBoard(memoryview(cells))

    def close(self) -> None:
        """For new engines; those that have it keep it."""
        if self.fd is not None:
            os.close(self.fd)
        self.fd = self.board = None
