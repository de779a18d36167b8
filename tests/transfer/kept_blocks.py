"""What the tests of a kept disk tier share: a layout, chains of blocks, the facts of runs."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec

from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.transfer.disk_layout import KeptLayout
from kvevents_service.wire.control import GroupSpec

MEDIUM = "STORAGE"
HASH_BYTES, UNIT = 32, 4
FULL, WINDOW = GroupSpec(0, "full_attention", 16, main=True), GroupSpec(1, "sliding_window", 8, 64)
LAYOUT = KeptLayout("model", HASH_BYTES, (FULL, WINDOW), UNIT, ((8192, 8192),))


def hash_of(*names: object) -> bytes:
    return hashlib.sha256(repr(names).encode()).digest()


def chain(
    name: object,
    blocks: int,
    group: GroupSpec = FULL,
    parent: bytes | None = None,
    extra_keys: list[Any] | None = None,
    lora: str | None = None,
) -> BlockStoreMeta:
    """The snapshot of `blocks` blocks that begin behind `parent`."""
    return BlockStoreMeta(
        group,
        MEDIUM,
        HASH_BYTES,
        b"".join(hash_of(name, number) for number in range(blocks)),
        random.Random(repr(name)).randbytes(4 * group.block_size * blocks),
        parent,
        None if lora is None else 7,
        lora,
        extra_keys,
    )


def inner(name: object, parent: bytes | None) -> BlockStoreMeta:
    """One more name: of the hash unit behind `parent`, inside a block."""
    one = chain(name, 1, GroupSpec(0, "full_attention", UNIT), parent)
    return msgspec.structs.replace(one, group=FULL, inner=True)


def facts(runs: list[StoreRun]) -> dict[tuple[int, bytes], tuple[Any, ...]]:
    """What is announced of every name, and its slot: the same however the blocks are cut into runs."""
    found = {}
    for run in runs:
        assert len(run.slots) == run.meta.blocks
        for place, slot in enumerate(run.slots):
            found[run.meta.group.index, run.meta.hash_at(place)] = (
                slot,
                *described(run.meta.part(place, place + 1)),
            )
        for meta in run.inner:
            found[run.meta.group.index, meta.block_hashes] = (None, *described(meta))
    return found


def described(meta: BlockStoreMeta) -> tuple[Any, ...]:
    extra = None if meta.extra_keys is None or meta.extra_keys[0] is None else meta.extra_keys[0]
    return meta.parent_block_hash, meta.token_ids, meta.lora_id, meta.lora_name, extra, meta.inner, meta.medium


def parents_come_first(runs: list[StoreRun]) -> bool:
    """Whether, in group 0, nothing comes before the block that it is behind."""
    seen: set[bytes | None] = {None}
    for run in runs:
        if run.meta.group.index == 0:
            if run.meta.parent_block_hash not in seen:
                return False
            seen |= {run.meta.hash_at(place) for place in range(run.meta.blocks)}
    return True
