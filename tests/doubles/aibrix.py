"""The AIBrix gateway (row "AIBrix" of the consumers' table): arrays, one hash an event, media not looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doubles.reading import array, chunks, is_int, read, refuse_unless, tokens_of
from doubles.tree import Path, Tree

POD = "pod"


class Index:
    """Prefixes by tokens. Every block of a store hangs behind the event's parent: a second hash is mis-chained."""

    def __init__(self, block_size: int) -> None:
        self.tree = Tree()
        self._block_size = block_size

    def feed(self, frames: list[bytes]) -> None:
        """Apply one message."""
        ts, events, *rank = array(read(frames).value, "batch", (2, 3))
        refuse_unless(isinstance(ts, float), "ts is no float")
        refuse_unless(not rank or is_int(rank[0]), "the rank is no int")
        for event in [checked(event) for event in array(events, "events")]:
            self._apply(event)

    def match(self, tokens: Sequence[int]) -> dict[str, int]:
        """Leading blocks of a prompt. There is one tier: whatever the medium, it counts as the GPU."""
        return {"GPU": self.tree.match(chunks(tokens, self._block_size)).get(POD, 0)}

    def _apply(self, event: list[Any]) -> None:
        if event[0] == "AllBlocksCleared":
            self.tree.clear()
        elif event[0] == "BlockRemoved":
            for name in event[1]:
                self._remove(int64(name))
        else:
            parent = None if event[2] is None else int64(event[2])
            base: Path | None = () if parent is None else self.tree.path(POD, parent)
            for name, block in zip(event[1], chunks(event[3], event[4]), strict=True):
                self.tree.store(POD, base, [int64(name)], [block])

    def _remove(self, name: int) -> None:
        """The prefix goes, for every pod and under every name."""
        path = self.tree.remove(POD, name)
        same = [other for other, its in self.tree.tiers.get(POD, {}).items() if its == path]
        for other in same:
            self.tree.remove(POD, other)


def checked(event: Any) -> list[Any]:
    refuse_unless(isinstance(event, list) and event, "an event is no array")
    refuse_unless(event[0] in ("BlockStored", "BlockRemoved", "AllBlocksCleared"), "unknown event")
    if event[0] != "AllBlocksCleared":
        refuse_unless(len(event) >= 2, "no hashes")
        for name in array(event[1], "block_hashes"):
            int64(name)
    if event[0] == "BlockStored":
        refuse_unless(len(event) >= 5, "less than 5 positions")
        tokens_of(event[3])
        refuse_unless(is_int(event[4], 1) and len(event[3]) % event[4] == 0, "block_size does not fit")
        refuse_unless(len(event[1]) == len(event[3]) // event[4], "hashes and tokens do not fit")
        refuse_unless(event[2] is None or int64(event[2]) is not None, "parent")
    return list(event)


def int64(name: Any) -> int:
    """Ints wrapped to signed 64 bits; of bytes the first 8."""
    if isinstance(name, bytes):
        return int.from_bytes(name[:8], "big", signed=True)
    refuse_unless(is_int(name), "a hash is neither int nor bytes")
    return (int(name) + (1 << 63)) % (1 << 64) - (1 << 63)
