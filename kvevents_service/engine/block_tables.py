"""One request's block table in one KV cache group of the reference engine: it grows, and is trimmed.

A block that left the window, or that a hit did not bring because the group does not need it, is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.core.groups import first_needed
from kvevents_service.engine.lazy import BlockRecord
from kvevents_service.engine.spans import RequestView, Spans
from kvevents_service.wire.control import GroupSpec


class Contents(NamedTuple):
    """Blocks, the names of the bytes in them, and their records, one each."""

    blocks: list[int]
    names: list[bytes]
    records: list[BlockRecord]


class GroupTable:
    """`blocks[i]` is logical block i; those below `trimmed` are gone."""

    def __init__(self, group: GroupSpec, hash_tokens: int) -> None:
        self.group = group
        self.spans = Spans(group, hash_tokens)
        self.blocks: list[int | None] = []
        self.trimmed = 0

    def __repr__(self) -> str:
        return f"<GroupTable {self.group.kind} {len(self.held())}/{len(self.blocks)}>"

    def missing(self, tokens: int) -> int:
        """How many blocks the table lacks to hold so many tokens."""
        return max(0, -(-tokens // self.group.block_size) - len(self.blocks))

    def contents(self, view: RequestView, numbers: range) -> Contents:
        """What is in those of these logical blocks that are here."""
        here = [number for number in numbers if self.blocks[number] is not None]
        hashes = [self.spans.name(view.unit_hashes, number) for number in here]
        return Contents(
            [block for block in self.blocks[numbers.start : numbers.stop] if block is not None],
            content_names(self.group, hashes),
            [BlockRecord(view, self.group.index, number) for number in here],
        )

    def trim(self, tokens: int) -> list[int]:
        """Let go of what a prefix of `tokens` needs no more; returns the block ids."""
        stop = first_needed(self.group, tokens) // self.group.block_size
        gone = [block for block in self.blocks[self.trimmed : stop] if block is not None]
        for number in range(self.trimmed, stop):
            self.blocks[number] = None
        self.trimmed = max(self.trimmed, stop)
        return gone

    def held(self) -> list[int]:
        """Every block id in the table."""
        return [block for block in self.blocks if block is not None]


def content_name(group: int, block_hash: bytes) -> bytes:
    """What tells the bytes of one group's block from another's with the same hash."""
    return bytes((block_hash[0] ^ group,)) + block_hash[1:]


def content_names(group: GroupSpec, hashes: Sequence[bytes]) -> list[bytes]:
    """The content names of a group's blocks."""
    return [content_name(group.index, block_hash) for block_hash in hashes]
