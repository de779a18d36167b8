"""What a source did not tell again, found a slice at a time: a million at once would stop everybody."""

from __future__ import annotations

from typing import Final

from kvevents_service.core.source_table import Shelf, SourceTable

SLICE: Final = 256


class Untold:
    """The blocks that were held when it was made, children before parents, as far as they are not told since."""

    def __init__(self, table: SourceTable, telling: int) -> None:
        self._table = table
        self._telling = telling
        self._left = [(shelf, key) for shelf in table.shelves.values() for key in (*shelf.waiting, *shelf.shown)]

    def __len__(self) -> int:
        """Blocks to look at."""
        return len(self._left)

    def next(self) -> tuple[Shelf, int] | None:
        """The next one that is still held and was not told again."""
        while self._left:
            shelf, key = self._left.pop()
            slot = shelf.find(key)
            if slot is not None and self._table.seen[slot] != self._telling:
                return shelf, slot
        return None
