"""The reference engine's KV cache: real bytes, prefix caching, reuse under pressure.

Each block's bytes are a function of its content hash and the layer, so that every byte can be verified. A block
that is handed out anew is poisoned at once: a copy that still reads it would be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvevents_service.engine.free_queue import FreeQueue
from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.engine.lazy import BlockRecord
from kvevents_service.wire.control import Memory, Region

POISON = 0x5A5A5A5A5A5A5A5A
_WORD_BYTES = 8
_ODD = 0x2545F4914F6CDD1D


class PagedCache:
    """`blocks` blocks of `layers` x `layer_bytes` bytes (a multiple of 8)."""

    def __init__(self, blocks: int, layers: int, layer_bytes: int) -> None:
        self.block_bytes = layers * layer_bytes
        self.memory = SharedMemory.create(blocks * self.block_bytes)
        words = layer_bytes // _WORD_BYTES
        self._view = torch.frombuffer(self.memory.map, dtype=torch.int64).view(layers, blocks, words)
        self._ramp = torch.arange(layers * words, dtype=torch.int64).view(layers, 1, words) * _ODD
        self.regions: list[Region] = uniform_layers(layers, blocks, layer_bytes)
        self.memories = [Memory(blocks * self.block_bytes)]
        self.blocks = blocks
        self._references = [0] * blocks
        self._free = FreeQueue(blocks)
        self._hash: list[bytes | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}
        self._record: list[BlockRecord | None] = [None] * blocks

    def __repr__(self) -> str:
        return f"<PagedCache {len(self._free)}/{self.blocks} free, {len(self._cached)} cached>"

    # block tables

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks used longest ago, poisoned; whatever was cached in them is forgotten."""
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            self._uncache(block)
        if taken:
            self._view.index_fill_(1, torch.tensor(taken), POISON)
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        """One more user of each block."""
        references, free = self._references, self._free
        for block in blocks:
            if not references[block]:
                free.remove(block)
            references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One user less; a block without users can be reused, the first given first."""
        references, unused = self._references, []
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                unused.append(block)
        self._free.extend(unused)

    # prefix cache

    def find(self, name: bytes) -> int | None:
        """The block that holds this content."""
        return self._cached.get(name)

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes], records: Sequence[BlockRecord]) -> None:
        """These blocks hold these contents from now on."""
        for block, block_hash, record in zip(blocks, hashes, records, strict=True):
            if block_hash not in self._cached:
                self._cached[block_hash] = block
                self._hash[block], self._record[block] = block_hash, record

    def _uncache(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hash[block] = self._record[block] = None

    def free_after(self, cursor: int | None) -> Iterator[tuple[int, bytes | None]]:
        """Free blocks in the order of reuse, from behind `cursor` if it is free, and what is cached in each."""
        for block in self._free.after(cursor):
            yield block, self._hash[block]

    def describe(self, block: int) -> BlockRecord | None:
        """What is cached in this block."""
        return self._record[block]

    # bytes

    def fill(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """What a forward pass does: write the content of these blocks, all layers."""
        if blocks:
            self._view.index_copy_(1, torch.tensor(blocks), self._content(hashes))

    def corrupt(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """How many of these blocks do not hold exactly the bytes of their hash."""
        if not blocks:
            return 0
        equal = self._view.index_select(1, torch.tensor(blocks)) == self._content(hashes)
        return len(blocks) - int(equal.all(dim=2).all(dim=0).sum())

    def _content(self, hashes: Sequence[bytes]) -> torch.Tensor:
        """[layers, n, words]: every word depends on the hash, the layer and the place."""
        seeds = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.int64).view(len(hashes), -1)[:, 0]
        mixed = (seeds.view(1, -1, 1) ^ self._ramp) * _ODD
        return mixed ^ (mixed >> 29)
