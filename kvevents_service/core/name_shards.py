"""Names and the slots that have them: many small hash tables, because one large one holds the loop while it grows.

A table of a million names takes 35 ms to grow; 128 of them grow one by one, 0.3 ms each.
With more of them a cold look-up costs more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Final

from kvevents_service.wire.name_board import NameBoard

SHARDS: Final = 128


class NameShards:
    """A dict of hashes, which are not empty, by their last byte. In no order. What it has stands on `board`."""

    __slots__ = ("_board", "_tables", "shards", "used")

    def __init__(self, board: NameBoard | None = None) -> None:
        self._board = board
        self._tables: tuple[dict[bytes, int], ...] = tuple({} for _ in range(SHARDS))
        self.shards = self._tables * (256 // SHARDS)
        self.used = False
        """A name was here once."""

    def __repr__(self) -> str:
        return f"<NameShards {len(self)} names>"

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def __bool__(self) -> bool:
        return self.used and any(self._tables)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._tables)

    def __contains__(self, name: bytes) -> bool:
        return name in self.shards[name[-1]]

    def get(self, name: bytes) -> int | None:
        return self.shards[name[-1]].get(name)

    def get_all(self, names: list[bytes]) -> Iterator[int | None]:
        """The slot of each of these, or None."""
        return map(dict.get, self._shards_of(names), names)

    def pop_all(self, names: list[bytes]) -> list[int | None]:
        """The same, and none of them is here any more."""
        found = list(map(dict.pop, self._shards_of(names), names, repeat(None)))
        if self._board is not None:
            self._board.take(_present(names, found) if None in found else names)
        return found

    def slots(self) -> Iterator[int]:
        return chain.from_iterable(map(dict.values, filter(None, self._tables)))

    def items(self) -> Iterator[tuple[bytes, int]]:
        return chain.from_iterable(map(dict.items, self._tables))

    def add(self, names: list[bytes], slots: Sequence[int]) -> None:
        """Pairwise, as many as there are slots. All are new."""
        self.used = True
        if self._board is not None:
            self._board.add(names[: len(slots)])
        deque(map(dict.setdefault, self._shards_of(names), names, slots), 0)

    def is_disjoint(self, names: list[bytes]) -> bool:
        """None of these is here."""
        return not (self.used and any(map(dict.__contains__, self._shards_of(names), names)))

    def _shards_of(self, names: list[bytes]) -> Sequence[dict[bytes, int]]:
        """Of each name. A tier's are of one length; those of one or two bytes, in tests, need not be."""
        if len(names) < 2:  # for one, itemgetter returns no tuple
            return [self.shards[name[-1]] for name in names]
        size, packed = len(names[0]), b"".join(names)
        last = packed[size - 1 :: size] if len(packed) == size * len(names) else [name[-1] for name in names]
        found: tuple[dict[bytes, int], ...] = itemgetter(*last)(self.shards)
        return found


def _present(names: list[bytes], found: list[int | None]) -> list[bytes]:
    return [name for name, slot in zip(names, found, strict=True) if slot is not None]
