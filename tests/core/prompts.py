"""A family of branching prompts. The hash of a unit says its tokens, parent, adapter and extra keys: the truth.

Prompts that differ only by adapter, salt or image have the same tokens and other hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec.structs import replace

from core.models import FINE, PREFIX, UNIT
from kvevents_service.wire.control import GroupSpec, InnerHash, Offer
from kvevents_service.wire.packing import pack_int32

FULL = GroupSpec(0, "full_attention", UNIT)
LATENT = GroupSpec(1, "mla_attention", UNIT)
SCRATCH = GroupSpec(1, "mamba", UNIT, None, False)

Path = tuple[int, ...]
"""Which branch a prompt took at each unit. The first one says its adapter (bit 0) and salt (bit 1)."""

PATHS: dict[int, Path] = {}
"""The prompt that ends in a hash, by the hash's low 64 bits."""


class Block(NamedTuple):
    """What is true of one block."""

    block_hash: bytes
    token_ids: tuple[int, ...]
    parent: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_key: tuple[Any, ...] | None
    units: int


def key64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def tokens_of(path: Path) -> tuple[int, ...]:
    """The tokens of its last unit."""
    branch = path[-1] >> (1 if path[1:] else 2)
    return tuple(1000 * len(path) + 10 * branch + place for place in range(UNIT))


def lora_of(path: Path) -> tuple[int, str] | tuple[None, None]:
    return (7, "ada") if path[0] & 1 else (None, None)


def image_of(path: Path) -> list[Any]:
    """The image that its last unit shows a part of."""
    return [("image", len(path))] if path[1:] and path[-1] & 1 else []


def salt_of(path: Path) -> list[Any]:
    return [f"salt {path[0]}"] if path[0] & 2 else []


@lru_cache(None)
def unit_hash(path: Path) -> bytes:
    """The hash of the last unit of a prompt."""
    parent = unit_hash(path[:-1]) if path[1:] else b""
    keys = (lora_of(path), image_of(path), salt_of(path) if not path[1:] else [])
    found = sha256(parent + pack_int32(tokens_of(path)) + repr(keys).encode()).digest()
    PATHS[key64(found)] = path
    return found


@lru_cache(None)
def block(path: Path, units: int = 1) -> Block:
    """The block of so many units that ends where the prompt does."""
    assert len(path) % units == 0
    ends = [path[:depth] for depth in range(len(path) - units + 1, len(path) + 1)]
    tokens = tuple(token for end in ends for token in tokens_of(end))
    before = path[: len(path) - units]
    lora_id, lora_name = lora_of(path)
    extra = [lora_name] if lora_name else []
    extra += [image for end in ends for image in image_of(end)]
    extra += salt_of(path) if not before else []
    parent = unit_hash(before) if before else None
    return Block(unit_hash(path), tokens, parent, lora_id, lora_name, tuple(extra) or None, units)


def units_of(group: GroupSpec) -> int:
    return group.block_size // UNIT


def block_at(path: Path, group: GroupSpec, number: int) -> Block:
    """A logical block of a prompt."""
    units = units_of(group)
    return block(path[: (number + 1) * units], units)


def blocks_of(path: Path, group: GroupSpec) -> int:
    """How many whole blocks a prompt has."""
    return len(path) // units_of(group)


def hashes(path: Path, start: int = 0) -> bytes:
    """The packed hashes of its units from this one on."""
    return b"".join(unit_hash(path[:depth]) for depth in range(start + 1, len(path) + 1))


def offer(
    path: Path, block_ids: list[int], first: int = 0, group: GroupSpec = FULL, request_id: str = "r"
) -> Offer:
    """The logical blocks from `first` on, as many as there are ids."""
    own = [block_at(path, group, first + place) for place in range(len(block_ids))]
    extra = [item.extra_key for item in own]
    return Offer(
        request_id,
        group.index,
        b"".join(item.block_hash for item in own),
        pack_int32([token for item in own for token in item.token_ids]),
        pack_int32(block_ids),
        own[0].parent,
        own[0].lora_id,
        own[0].lora_name,
        extra if any(extra) else None,
    )


def inner_hash(path: Path, group: GroupSpec, first: int = 0) -> InnerHash:
    """The name of the prefix that ends where a prompt does, inside a block; for an offer from block `first` on."""
    own, units = block(path), units_of(group)
    number, inside = divmod(len(path), units)
    assert inside
    return InnerHash(number - first, inside, own.block_hash, own.parent, own.extra_key)


def with_inner(good: Offer, path: Path, group: GroupSpec, first: int, ends: Iterable[int]) -> Offer:
    """The offer with names for prefixes that end inside its blocks, after so many units of the prompt."""
    whole = range(first * units_of(group), blocks_of(path, group) * units_of(group))
    inside = [end for end in sorted(ends) if end in whole and end % units_of(group)]
    return replace(good, inner=[inner_hash(path[:end], group, first) for end in inside])


def with_tail(good: Offer, path: Path, group: GroupSpec, first: int, block_id: int) -> Offer:
    """The offer of a prompt's whole blocks from `first` on, and of the one that it ends in."""
    inside = range(blocks_of(path, group) * units_of(group) + 1, len(path) + 1)
    tokens = [token for depth in inside for token in tokens_of(path[:depth])]
    return replace(
        good,
        token_ids=good.token_ids + pack_int32(tokens),
        block_ids=good.block_ids + pack_int32([block_id]),
        inner=[*(good.inner or ()), inner_hash(path, group, first)],
    )


def tail_offer(path: Path, block_id: int, group: GroupSpec = FULL, request_id: str = "r") -> Offer:
    """The block that a prompt ends in, alone."""
    first = blocks_of(path, group)
    before = path[: first * units_of(group)]
    parent = unit_hash(before) if before else None
    alone = Offer(request_id, group.index, b"", b"", b"", parent, *lora_of(path))
    return with_tail(alone, path, group, first, block_id)


def named_offers(path: Path, group: GroupSpec, first: int, ends: Iterable[int], ids: Iterator[int]) -> list[Offer]:
    """Blocks from `first` on with names for prefixes that end inside them, and the tail; of a state, only that."""
    blocks = blocks_of(path, group)
    first = min(first, blocks) if group.kind in PREFIX else blocks
    tail = group.kind in FINE and len(path) % units_of(group) > 0
    if first == blocks:
        return [tail_offer(path, next(ids), group)] if tail else []
    whole = with_inner(
        offer(path, [next(ids) for _ in range(first, blocks)], first, group), path, group, first, ends
    )
    return [with_tail(whole, path, group, first, next(ids)) if tail else whole]
