"""The free blocks of a cache in the order of reuse: a linked list over block ids, every operation O(1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FreeQueue:
    """All of `blocks` blocks are free at first, in order. The last link is both ends of the ring."""

    def __init__(self, blocks: int) -> None:
        self._end = blocks
        self._next: list[int] = [*range(1, blocks + 1), 0]
        self._before: list[int] = [blocks, *range(blocks)]
        self._length = blocks

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<FreeQueue {self._length}/{self._end}>"

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def popleft(self) -> int:
        """The block that is reused next. IndexError if none is free."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """It is used again. KeyError if it is not free."""
        following, before = self._next[block], self._before[block]
        if following < 0:
            raise KeyError(block)
        self._next[before], self._before[following] = following, before
        self._next[block] = -1
        self._length -= 1

    def extend(self, blocks: Iterable[int]) -> None:
        """They are reused after all others, the first one first."""
        following, before, end = self._next, self._before, self._end
        for block in blocks:
            last = before[end]
            following[last] = before[end] = block
            following[block], before[block] = end, last
            self._length += 1

    def after(self, cursor: int | None) -> Iterator[int]:
        """Blocks behind `cursor`; all of them if it is None or not free. The queue must not change meanwhile."""
        block = self._end if cursor is None or cursor not in self else cursor
        while (block := self._next[block]) != self._end:
            yield block
