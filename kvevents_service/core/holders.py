"""What one source of a prefix index holds: its shelves, and the blocks whose parent is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple


class Held(NamedTuple):
    """A prefix in tokens, from the first block on. tokens: with every block on any tier; media: on one alone."""

    tokens: int
    media: dict[str, int]


class Orphan(NamedTuple):
    """A block whose parent is not known."""

    medium: str
    block_hash: int
    parent: int
    data: bytes
    extra: Hashable


class Shelf:
    """One medium of one source. keys: by block hash (its low 64 bits). again: further hashes of the same key."""

    __slots__ = ("again", "bit", "keys", "medium")

    def __init__(self, medium: str, bit: int) -> None:
        self.medium = medium
        self.bit = bit
        self.keys: dict[int, int] = {}
        self.again: Counter[int] = Counter()


class Holder:
    """One source. bit: held on any shelf; mask: all its shelves. group: the one whose blocks count.

    waiting: orphans by their parent's hash.
    """

    __slots__ = ("bit", "group", "mask", "orphans", "shelves", "sizes", "waiting")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.mask = 0
        self.group = 0
        self.sizes: set[int] = set()
        self.shelves: dict[str, Shelf] = {}
        self.orphans: dict[tuple[str, int], Orphan] = {}
        self.waiting: dict[int, set[tuple[str, int]]] = {}

    def key_of(self, block_hash: int) -> int | None:
        """The key of a block that is held on any shelf."""
        for shelf in self.shelves.values():
            if (key := shelf.keys.get(block_hash)) is not None:
                return key
        return None

    def wait(self, orphan: Orphan) -> None:
        name = orphan.medium, orphan.block_hash
        self.orphans[name] = orphan
        self.waiting.setdefault(orphan.parent, set()).add(name)

    def unwait(self, name: tuple[str, int]) -> bool:
        """Forget an orphan; False if there is none of that name."""
        orphan = self.orphans.pop(name, None)
        if orphan is None:
            return False
        names = self.waiting[orphan.parent]
        names.discard(name)
        if not names:
            del self.waiting[orphan.parent]
        return True


def held_by_key(holder: Holder, ends: list[tuple[int, int]], size: int) -> Held:
    shelves = {shelf.medium: _end_of(shelf.bit, ends) * size for shelf in holder.shelves.values()}
    tokens = _end_of(holder.bit, ends) * size
    return Held(tokens, {medium: there for medium, there in shelves.items() if there})


def _end_of(bit: int, ends: list[tuple[int, int]]) -> int:
    return next((blocks for bits, blocks in ends if bits & bit), 0)


def held_by_hash(holder: Holder, block_hashes: list[int]) -> Held:
    size = max(holder.sizes, default=0)
    media = {medium: _leading(shelf.keys, block_hashes) * size for medium, shelf in holder.shelves.items()}
    tokens = next((n for n, one in enumerate(block_hashes) if holder.key_of(one) is None), len(block_hashes)) * size
    return Held(tokens, {medium: there for medium, there in media.items() if there})


def _leading(keys: dict[int, int], block_hashes: list[int]) -> int:
    return next((n for n, one in enumerate(block_hashes) if one not in keys), len(block_hashes))
