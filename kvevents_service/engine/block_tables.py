"""One request's block table in one KV cache group: it grows, is offered, and is trimmed.

Logical block i holds tokens [i * block_size, (i + 1) * block_size). A block that left the window, or that a hit did
not bring because the group does not need it, is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvevents_service.core.groups import first_needed
from kvevents_service.wire.control import GroupSpec


class GroupTable:
    """`offered` and `trimmed` count logical blocks from the start."""

    def __init__(self, group: GroupSpec, hash_tokens: int) -> None:
        self.group = group
        self.blocks: list[int | None] = []
        self.offered = self.trimmed = 0
        self._units = group.block_size // hash_tokens

    def __repr__(self) -> str:
        return f"<GroupTable {self.group.kind} {len(self.held())}/{len(self.blocks)} offered={self.offered}>"

    def missing(self, tokens: int) -> int:
        """How many blocks the table lacks to hold so many tokens."""
        return max(0, -(-tokens // self.group.block_size) - len(self.blocks))

    def full(self, tokens: int) -> int:
        """How many logical blocks so many tokens fill."""
        return tokens // self.group.block_size

    def hashes(self, unit_hashes: Sequence[bytes], start: int, stop: int) -> list[bytes]:
        """The hashes of logical blocks [start, stop): each is that of its last unit."""
        return list(unit_hashes[(start + 1) * self._units - 1 : stop * self._units : self._units])

    def parent(self, unit_hashes: Sequence[bytes], start: int) -> bytes | None:
        """The hash before logical block `start`."""
        return unit_hashes[start * self._units - 1] if start else None

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, list[int]]]:
        """Dense runs among logical blocks [start, stop): the first one's number, and the block ids."""
        run: list[int] = []
        for number, block in enumerate(self.blocks[start:stop], start):
            if block is not None:
                run.append(block)
            elif run:
                yield number - len(run), run
                run = []
        if run:
            yield stop - len(run), run

    def trim(self, tokens: int) -> list[int]:
        """Let go of what a prefix of `tokens` needs no more and has been offered; returns the block ids."""
        stop = min(first_needed(self.group, tokens) // self.group.block_size, self.offered)
        gone = [block for block in self.blocks[self.trimmed : stop] if block is not None]
        for number in range(self.trimmed, stop):
            self.blocks[number] = None
        self.trimmed = max(self.trimmed, stop)
        return gone

    def held(self) -> list[int]:
        """Every block id in the table."""
        return [block for block in self.blocks if block is not None]


def content_names(group: GroupSpec, hashes: Sequence[bytes]) -> list[bytes]:
    """What tells the bytes of one group's block from another's with the same hash."""
    return [bytes((block_hash[0] ^ group.index,)) + block_hash[1:] for block_hash in hashes]
