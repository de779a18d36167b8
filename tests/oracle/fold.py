"""The fold of one side's events: every block by itself, with all that was said of it, and how it came or went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from oracle.script import Answer


class Key(NamedTuple):
    """Which block, where."""

    medium: str
    group: int
    block_hash: str


class Block(NamedTuple):
    """All that an event says of one block."""

    key: Key
    locality: str
    tokens: tuple[int, ...]
    parent: str | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: Any
    block_size: int
    kind: str
    window: int | None


def blocks_of(event: Answer) -> Iterator[Block]:
    """The blocks of a stored event. Tokens that do not divide are given whole to each block."""
    count, parent, size = len(event["hashes"]), event["parent"], event["block_size"]
    fits = len(event["tokens"]) == count * size
    extra_keys = event["extra_keys"] if event["extra_keys"] is not None else [None] * count
    for place, block_hash in enumerate(event["hashes"]):
        tokens = event["tokens"][place * size : (place + 1) * size] if fits else event["tokens"]
        yield Block(
            Key(event["medium"], event["group"], block_hash),
            event["locality"],
            tuple(tokens),
            parent,
            event["lora_id"],
            event["lora_name"],
            extra_keys[place] if len(extra_keys) == count else extra_keys,
            size,
            event["kind"],
            event["window"],
        )
        parent = block_hash


class Fold:
    """What a literal reader of the stream believes, and what the stream did that a true one never does.

    `prefix_groups`: the groups in which a block needs every block before it, with their block sizes. An event of
    another size names a prefix that ends inside a block.
    """

    def __init__(self, prefix_groups: Mapping[int, int]) -> None:
        self._prefix_groups = prefix_groups
        self.resident: dict[Key, Block] = {}
        self.announced: dict[Key, Block] = {}
        self.copies: Counter[Key] = Counter()
        self.last: dict[Key, str] = {}
        self.fresh: list[Block] = []
        self.evicted: list[Key] = []
        self.faults: list[tuple[str, Key]] = []

    def apply(self, events: list[Answer], *, in_reset: bool) -> None:
        """Fold what one operation announced; `fresh`, `evicted` and `faults` are of this operation alone."""
        self.fresh, self.evicted, self.faults = [], [], []
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                self._remove(event, "reset" if in_reset else "removed")
            else:
                self._clear()

    def _store(self, event: Answer) -> None:
        if len(event["hashes"]) > 1:
            self.faults.append(("many_hashes", Key(event["medium"], event["group"], event["hashes"][0])))
        for block in blocks_of(event):
            if block.key in self.resident or self.copies[block.key]:
                self.faults.append(("stored_twice", block.key))
            if self._is_orphan(block):
                self.faults.append(("parent_absent", block.key))
            self.resident[block.key] = self.announced[block.key] = block
            self.copies[block.key] += 1
            self.last[block.key] = "stored"
            self.fresh.append(block)

    def _remove(self, event: Answer, how: str) -> None:
        for block_hash in event["hashes"]:
            key = Key(event["medium"], event["group"], block_hash)
            if self.resident.pop(key, None) is None:
                self.faults.append(("removed_again" if self.copies[key] else "removed_unknown", key))
            self.copies[key] -= 1
            self.last[key] = how
            if how == "removed":
                self.evicted.append(key)

    def _clear(self) -> None:
        self.faults += [("cleared", Key("", 0, ""))]
        self.last.update(dict.fromkeys(self.resident, "reset"))
        self.resident.clear()
        self.copies.clear()

    def _is_orphan(self, block: Block) -> bool:
        """Its parent is not there, in a group where a block needs all before it."""
        parent = block.parent is not None and block.key._replace(block_hash=block.parent)
        whole = block.block_size == self._prefix_groups.get(block.key.group)
        return bool(parent) and whole and parent not in self.resident

    def orphans(self) -> list[Key]:
        """Resident blocks of prefix kinds without their parent."""
        return [key for key, block in self.resident.items() if self._is_orphan(block)]
