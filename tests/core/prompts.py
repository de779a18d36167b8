"""A family of branching prompts. The hash of a block says its tokens, parent, adapter and extra keys: the truth."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from kvevents_service.wire.control import GroupSpec, Offer
from kvevents_service.wire.packing import pack_int32

BLOCK_SIZE = 2
MAX_DEPTH = 6
FULL = GroupSpec(0, "full_attention", BLOCK_SIZE)
LATENT = GroupSpec(1, "mla_attention", BLOCK_SIZE)
SCRATCH = GroupSpec(1, "mamba", BLOCK_SIZE, None, False)

Path = tuple[int, ...]
"""Which branch a prompt took at each block. The first one is its adapter too."""


class Block(NamedTuple):
    """What is true of one block."""

    block_hash: bytes
    token_ids: tuple[int, ...]
    parent: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_key: tuple[object, ...] | None

    @property
    def key64(self) -> int:
        return int.from_bytes(self.block_hash[-8:], "big")


@lru_cache(None)
def block(path: Path) -> Block:
    parent = block(path[:-1]).block_hash if path[:-1] else None
    tokens = tuple(1000 * len(path) + 10 * path[-1] + place for place in range(BLOCK_SIZE))
    lora = (7, "ada") if path[0] else (None, None)
    extra = ("image", len(path)) if path[-1] else None
    block_hash = sha256((parent or b"") + pack_int32(tokens) + repr((lora, extra)).encode()).digest()
    BY_KEY64[int.from_bytes(block_hash[-8:], "big")] = found = Block(block_hash, tokens, parent, *lora, extra)
    return found


BY_KEY64: dict[int, Block] = {}


def chain(path: Path) -> list[Block]:
    return [block(path[:depth]) for depth in range(1, len(path) + 1)]


def chain_to(key64: int) -> list[Block]:
    """The prompt that ends in this block."""
    found = BY_KEY64[key64]
    before = [] if found.parent is None else chain_to(int.from_bytes(found.parent[-8:], "big"))
    return [*before, found]


def hashes(path: Path) -> bytes:
    return b"".join(item.block_hash for item in chain(path))


def offer(path: Path, block_ids: list[int], start: int = 0, group: int = 0, request_id: str = "r") -> Offer:
    """Blocks [start, len(path)) of a prompt."""
    blocks = chain(path)[start:]
    extra = [item.extra_key for item in blocks]
    return Offer(
        request_id,
        group,
        b"".join(item.block_hash for item in blocks),
        pack_int32([token for item in blocks for token in item.token_ids]),
        pack_int32(block_ids),
        blocks[0].parent,
        blocks[0].lora_id,
        blocks[0].lora_name,
        extra if any(extra) else None,
    )
