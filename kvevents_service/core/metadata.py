"""What is remembered of a block when its request is gone: snapshots taken at submit.

`BlockStoreMeta` describes a run of consecutive blocks of one request and group. Its token ids and hashes are the
immutable bytes the engine sent, so taking the snapshot costs one object per run; lists appear only in the
publisher, long after. A future carries the `TransferMeta`, so no code looks a request up at completion.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kvevents_service.wire.control import GroupSpec, InnerHash, Offer

TOKEN_BYTES = 4
NO_SESSION = 0
"""Sessions count from 1."""

ExtraKeys = list[Any]
"""One entry per block, as the engine gave it: a tuple, or None."""


class BlockStoreMeta(msgspec.Struct, frozen=True, gc=False):
    """n consecutive blocks: packed hashes (n x hash_bytes), packed int32 token ids (n x block_size).

    `inner`: the name of a prefix that ends inside a block. Its tokens are those of its last hash unit.
    """

    group: GroupSpec
    medium: str
    hash_bytes: int
    block_hashes: bytes
    token_ids: bytes
    parent_block_hash: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: ExtraKeys | None
    inner: bool = False

    @property
    def blocks(self) -> int:
        return len(self.block_hashes) // self.hash_bytes

    @property
    def block_size(self) -> int:
        """Tokens of each hash: the group's block size, or one hash unit."""
        return len(self.token_ids) // TOKEN_BYTES // self.blocks if self.inner else self.group.block_size

    def hash_at(self, position: int) -> bytes:
        start = position * self.hash_bytes
        return self.block_hashes[start : start + self.hash_bytes]

    def part(self, start: int, stop: int) -> BlockStoreMeta:
        """Blocks [start, stop) of this run, with the parent that is theirs."""
        if start == 0 and stop == self.blocks:
            return self
        span = self.group.block_size * TOKEN_BYTES
        return msgspec.structs.replace(
            self,
            block_hashes=self.block_hashes[start * self.hash_bytes : stop * self.hash_bytes],
            token_ids=self.token_ids[start * span : stop * span],
            parent_block_hash=self.hash_at(start - 1) if start else self.parent_block_hash,
            extra_keys=self.extra_keys[start:stop] if self.extra_keys is not None else None,
        )


class RemovedRun(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one group that left a tier, leaves before their parents; or the `inner` names of such blocks."""

    group: GroupSpec
    medium: str
    block_hashes: tuple[bytes, ...]
    inner: bool = False


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Everything this publisher announced before is void."""


Announcement = BlockStoreMeta | RemovedRun | Cleared


class StoreRun(NamedTuple):
    """Where the blocks of one snapshot go: `slots[i]` takes block i of `meta`. `inner`: further names of them."""

    meta: BlockStoreMeta
    slots: list[int]
    inner: tuple[BlockStoreMeta, ...] = ()

    def inner_places(self) -> Iterator[tuple[int, BlockStoreMeta]]:
        """The inner names, each with the place in the run of the block that has it.

        A prefix ends in the block behind the one that its parent ends, or in the one inside which its parent ends.
        """
        places: dict[bytes | None, int] = {self.meta.parent_block_hash: 0}
        places |= {self.meta.hash_at(place): place + 1 for place in range(self.meta.blocks)}
        for name in self.inner:
            place = places.get(name.parent_block_hash)
            if place is not None and place < len(self.slots):
                places[name.block_hashes] = place
                yield place, name


class TransferMeta(msgspec.Struct, frozen=True, eq=False):
    """One copy; rides on the transfer's future. `kind` says from where to where:

        store, load       engine blocks -> slots, slots -> engine blocks
        demote, promote   host slots -> slots, slots -> host slots; no session's: `session_id` is NO_SESSION

    `engine_blocks[i]` and `slots[i]` belong together; in the last two the former are slots of the host tier.
    `tier` is whose slots those are: 0 the first one's, 1 those of the one below. `owner_id` is the step or load id
    of the session. `runs` say what will be announced when the copy completes; a load has none.
    """

    transfer_id: int
    kind: str
    session_id: int
    owner_id: int
    engine_blocks: array[int]
    slots: array[int]
    deadline: float
    runs: tuple[StoreRun, ...] = ()
    tier: int = 0

    @property
    def blocks(self) -> int:
        return len(self.slots)


def snapshot(
    offer: Offer, group: GroupSpec, medium: str, hash_bytes: int, parent: bytes | None = None
) -> BlockStoreMeta:
    """The snapshot of an offer's whole blocks. Cheap: it keeps the offer's own bytes, `parent` for its parent."""
    blocks = len(offer.block_hashes) // hash_bytes
    return BlockStoreMeta(
        group,
        medium,
        hash_bytes,
        offer.block_hashes,
        offer.token_ids[: blocks * group.block_size * TOKEN_BYTES],  # the same object unless there is a tail
        offer.parent if parent is None else parent,
        offer.lora_id,
        offer.lora_name,
        offer.extra_keys,
    )


def inner_snapshot(
    offer: Offer, name: InnerHash, group: GroupSpec, medium: str, hash_tokens: int
) -> BlockStoreMeta:
    """The snapshot of one inner hash of an offer: the hash unit that ends there."""
    end = (name.block * group.block_size + name.units * hash_tokens) * TOKEN_BYTES
    return BlockStoreMeta(
        group,
        medium,
        len(name.block_hash),
        name.block_hash,
        offer.token_ids[end - hash_tokens * TOKEN_BYTES : end],
        name.parent,
        offer.lora_id,
        offer.lora_name,
        None if name.extra_keys is None else [name.extra_keys],
        inner=True,
    )
