"""The fold of an event stream: which blocks a consumer believes are where, and what the stream did wrong.

This is the oracle of invariant I4: after any batch, the fold equals the publisher's resident set. It reads any
dialect: hashes are keyed by their low 64 bits, media by their canonical name, an absent group is group 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.wire.events import BlockHash, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

_MASK64 = (1 << 64) - 1


class Shelf(NamedTuple):
    """One tier and group of one publisher."""

    medium: str
    group: int


def key64(block_hash: BlockHash) -> int:
    """Low 64 bits, unsigned: equal for the bytes, signed and unsigned forms of one hash."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _MASK64


def keys64(block_hashes: list[BlockHash]) -> list[int]:
    """The same of many."""
    try:
        return [block_hash & _MASK64 for block_hash in block_hashes]  # type: ignore[operator]
    except TypeError:
        return [*map(key64, block_hashes)]


class Residency:
    """What one publisher's stream says is resident. `faults` counts what a true stream never does.

    `block_sizes`: tokens of a block of each group, where inner names may come: those are of fewer tokens, and their
    parent need not be there. `redacted` counts stores without any token ids: no fault where an output hides them.
    """

    def __init__(self, block_sizes: Mapping[int, int] | None = None) -> None:
        self.block_sizes = block_sizes or {}
        self.shelves: dict[Shelf, dict[int, int | None]] = {}
        self.faults: Counter[str] = Counter()
        self.stored = self.removed = self.cleared = self.redacted = 0

    def __repr__(self) -> str:
        return f"<Residency {len(self)} blocks on {len(self.shelves)} shelves, faults={dict(+self.faults)}>"

    def __len__(self) -> int:
        return sum(map(len, self.shelves.values()))

    def apply(self, events: Iterable[Event]) -> None:
        """Fold one batch, in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case _:
                    self.cleared += 1
                    self.shelves.clear()

    def forget(self) -> None:
        """The publisher started anew."""
        self.shelves.clear()

    def hashes(self, medium: str, group: int) -> set[int]:
        """Low 64 bits of every block of a shelf."""
        return set(self.shelves.get(Shelf(medium, group), ()))

    def _store(self, event: BlockStored) -> None:
        shelf = self._shelf(event.medium, event.group_idx)
        parent = None if event.parent_block_hash is None else key64(event.parent_block_hash)
        if not event.token_ids:
            self.redacted += 1
        elif len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self.faults["token_count"] += 1
        inner = event.block_size < self.block_sizes.get(event.group_idx or 0, 0)
        chained = not inner and (event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in PREFIX_KINDS)
        if chained and parent is not None and parent not in shelf:
            self.faults["parent_absent"] += 1
        keys, before = keys64(event.block_hashes), len(shelf)
        shelf.update(zip(keys, [parent, *keys], strict=False) if chained else dict.fromkeys(keys))
        twice = len(keys) - (len(shelf) - before)
        if twice:
            self.faults["stored_twice"] += twice
        self.stored += len(keys)

    def _remove(self, event: BlockRemoved) -> None:
        shelf = self._shelf(event.medium, event.group_idx)
        keys, before = keys64(event.block_hashes), len(shelf)
        for key in keys:
            shelf.pop(key, None)
        removed = before - len(shelf)
        if removed < len(keys):
            self.faults["removed_unknown"] += len(keys) - removed
        self.removed += removed

    def _shelf(self, medium: str | None, group: int | None) -> dict[int, int | None]:
        return self.shelves.setdefault(Shelf(canonical_medium(medium), group or 0), {})

    def check(self, *, redacted: bool = False) -> None:
        """Assert that the stream did nothing a true stream never does, and left no child without its parent.

        redacted: it is of an output that hides token ids.
        """
        assert not +self.faults, dict(+self.faults)
        assert redacted or not self.redacted, f"{self.redacted} stores without token ids"
        for name, shelf in self.shelves.items():
            left = sum(parent is not None and parent not in shelf for parent in shelf.values())
            assert not left, f"{left} blocks of {name} without their parent"
