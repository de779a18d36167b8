"""The name board: which block names a sidecar may have, in memory that it shares with its engines, read-only.

An engine that finds none of a prompt's next block there need not ask: a miss costs it no message. The memory is one
byte a cell, a power of two of them. A name's cell is its last 4 bytes, as a number in the machine's byte order,
modulo the cells. A cell counts the names that it has, up to STUCK, from where it does not go on: "may have" can be
wrong, as any hash table's first look can, and "has not" is right but for what the other process does meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

BOARD_BYTES: Final = 1 << 22
"""Of a sidecar's. A million names take a fifth of its cells."""
STUCK: Final = 255
WORD: Final = 4


class NameBoard:
    """A board on `cells`: memory that can be written for `add`, `take` and `clear`."""

    def __init__(self, cells: memoryview) -> None:
        if not len(cells) or len(cells) & (len(cells) - 1):
            raise ValueError(f"a power of two of cells, not {len(cells)}")
        self._cells = cells
        self._mask = len(cells) - 1

    def __repr__(self) -> str:
        return f"<NameBoard {len(self._cells)} cells>"

    def may_have(self, name: bytes) -> bool:
        """False: no block of the sidecar has this name."""
        return self._cells[int.from_bytes(name[-WORD:], sys.byteorder) & self._mask] != 0

    def add(self, names: list[bytes]) -> None:
        """Blocks have these names from now on. All of a call are of one length."""
        cells = self._cells
        for cell in self._places(names):
            count = cells[cell]
            if count < STUCK:
                cells[cell] = count + 1

    def take(self, names: list[bytes]) -> None:
        """And no more. Each was added."""
        cells = self._cells
        for cell in self._places(names):
            count = cells[cell]
            if 0 < count < STUCK:
                cells[cell] = count - 1

    def clear(self) -> None:
        """No block has a name."""
        self._cells[:] = bytes(len(self._cells))

    def _places(self, names: list[bytes]) -> Iterable[int]:
        """The cell of each: in bulk, if there are several and the last word of each is aligned."""
        mask, size = self._mask, len(names[0]) if len(names) > 1 else 0
        if size % WORD or not size:
            return [int.from_bytes(name[-WORD:], sys.byteorder) & mask for name in names]
        words = size // WORD
        return [word & mask for word in memoryview(b"".join(names)).cast("I")[words - 1 :: words]]
