"""The slots of a source, looked at a slice at a time: a million at once would stop everybody.

A slot may be freed, and used again, before it is its turn: whoever looks at it looks at what is in it then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvevents_service.core.source_table import SourceTable


class Visit:
    """Every slot that is in use when it is made. parents_first: or else children before their parents."""

    def __init__(self, table: SourceTable, *, parents_first: bool) -> None:
        self._shelves = [[*shelf.held.values()] for shelf in table.shelves.values()]
        self._later: deque[int] = deque()
        if parents_first:
            for slots in self._shelves:
                slots.reverse()

    def __len__(self) -> int:
        """Slots to look at."""
        return sum(map(len, self._shelves)) + len(self._later)

    def add(self, slots: Iterable[int]) -> None:
        """These too, behind all others."""
        self._later.extend(slots)

    def take(self, limit: int) -> list[int]:
        """The next ones, up to `limit`."""
        taken: list[int] = []
        while self._shelves and len(taken) < limit:
            slots, room = self._shelves[-1], limit - len(taken)
            taken += reversed(slots[-room:])
            del slots[-room:]
            if not slots:
                self._shelves.pop()
        later = min(limit - len(taken), len(self._later))
        return taken + [self._later.popleft() for _ in range(later)]


class Untold(Visit):
    """Children before parents, for those to be dropped that were last told in none of the tellings `alive`.

    again: more was held by the time it was to be gone, so it starts anew when it is through.
    """

    def __init__(self, table: SourceTable, telling: int) -> None:
        super().__init__(table, parents_first=False)
        self.alive = {telling}
        self.again = False
