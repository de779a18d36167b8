"""A model of an engine that publishes its own events: what it holds is the truth, what it says may be odd.

Its blocks form a small tree of prompts. A block may be held more than once, as in vLLM's GPU pool, and each copy is
stored and removed by itself. Hashes come in any form, in any order within a batch.
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from random import Random

from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

BLOCK_SIZE = 2
WIDTH, DEPTH = 3, 5
MEDIA = (None, "GPU", "gpu")

Path = tuple[int, ...]


def digest(path: Path) -> bytes:
    return sha256(bytes(path)).digest()


def key(path: Path) -> int:
    return int.from_bytes(digest(path)[-8:], "big")


def in_form(path: Path, form: int) -> BlockHash:
    """Whole, unsigned or signed."""
    word = key(path)
    return (digest(path), word, word - (1 << 64) if word >> 63 else word)[form]


def stored(path: Path, blocks: int = 1, form: int = 1, medium: str | None = "GPU") -> BlockStored:
    """The last `blocks` blocks of a path."""
    names = [path[: len(path) - back] for back in reversed(range(blocks))]
    parent = names[0][:-1]
    tokens = [token for name in names for token in (len(name), name[-1])]
    hashes = [in_form(name, form) for name in names]
    return BlockStored(hashes, in_form(parent, form) if parent else None, tokens, BLOCK_SIZE, None, medium, None)


class EngineModel:
    """`held`: how many copies of each block the engine has."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.held: Counter[Path] = Counter()

    def new_path(self) -> Path:
        return tuple(self.random.randrange(WIDTH) for _ in range(self.random.randint(1, DEPTH)))

    def batch(self) -> list[Event]:
        """Some stores and removals, now and then a clear, now and then turned round."""
        events = [event for _ in range(self.random.randint(1, 4)) for event in self._some()]
        return events

    def _some(self) -> list[Event]:
        choice = self.random.random()
        if choice < 0.03:
            self.held.clear()
            return [AllBlocksCleared()]
        return self._store() if choice < 0.6 else self._remove()

    def _store(self) -> list[Event]:
        path = self.new_path()
        known = next((n for n in range(len(path), 0, -1) if self.held[path[:n]]), 0)
        if known == len(path) or self.random.random() < 0.2:
            known = self.random.randrange(len(path))  # a copy of what is there
        names = [path[: n + 1] for n in range(known, len(path))]
        self.held.update(names)
        form, medium = self.random.randrange(3), self.random.choice(MEDIA)
        if self.random.random() < 0.5:
            return [stored(path, len(names), form, medium)]
        events: list[Event] = [stored(name, 1, form, medium) for name in names]
        self.random.shuffle(events)
        return events

    def _remove(self) -> list[Event]:
        """Blocks that may have children: also parents first."""
        names = [path for path, copies in self.held.items() if copies]
        gone = self.random.sample(names, min(len(names), self.random.randint(1, 3)))
        if not gone:
            return []
        self.held.subtract(gone)
        form = self.random.randrange(3)
        return [BlockRemoved([in_form(path, form) for path in gone], self.random.choice(MEDIA))]


def closed(held: Counter[Path]) -> set[int]:
    """The blocks whose parents are held, all of them."""
    return {
        key(path)
        for path, copies in held.items()
        if copies and all(held[path[:n]] > 0 for n in range(1, len(path)))
    }
