"""Blocks of a source as they are kept: in runs that grow, as an engine that decodes says one block at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvevents_service.core.metadata import TOKEN_BYTES, BlockStoreMeta, ExtraKeys
from kvevents_service.wire.control import GroupSpec

if TYPE_CHECKING:
    from kvevents_service.core.source_table import Shelf

RUN_BLOCKS: Final = 64
"""A run is kept as long as any of its blocks is: a longer one would be mostly of blocks that are gone."""
RUN_TOKENS: Final = 4096
"""To grow is to copy, so a run of large blocks stops sooner."""


class Run(msgspec.Struct, gc=False, eq=False):
    """As `BlockStoreMeta`. It grows at its end only: what a cut saw of it stays."""

    shelf: Shelf
    group: GroupSpec
    medium: str
    hash_bytes: int
    block_hashes: bytes
    token_ids: bytes
    parent_block_hash: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: ExtraKeys | None
    inner: bool

    @property
    def blocks(self) -> int:
        return len(self.block_hashes) // self.hash_bytes

    def hash_at(self, position: int) -> bytes:
        start = position * self.hash_bytes
        return self.block_hashes[start : start + self.hash_bytes]

    def part(self, start: int, stop: int) -> BlockStoreMeta:
        """Blocks [start, stop), with the parent that is theirs."""
        width, span = self.hash_bytes, self.group.block_size * TOKEN_BYTES
        return BlockStoreMeta(
            self.group, self.medium, width, self.block_hashes[start * width : stop * width],
            self.token_ids[start * span : stop * span],
            self.block_hashes[(start - 1) * width : start * width] if start else self.parent_block_hash,
            self.lora_id, self.lora_name,
            None if self.extra_keys is None else self.extra_keys[start:stop], self.inner,
        )  # fmt: skip

    def is_continued_by(self, meta: BlockStoreMeta) -> bool:
        """Whether blocks behind its last one can be kept with it."""
        return (
            self.group is meta.group
            and self.hash_bytes == meta.hash_bytes
            and len(self.block_hashes) + len(meta.block_hashes) <= RUN_BLOCKS * self.hash_bytes
            and len(self.token_ids) + len(meta.token_ids) <= RUN_TOKENS * TOKEN_BYTES
            and self.lora_name == meta.lora_name
            and self.lora_id == meta.lora_id
            and (self.extra_keys is None) == (meta.extra_keys is None)
            and not self.inner
            and not meta.inner
        )

    def grow(self, meta: BlockStoreMeta) -> None:
        self.block_hashes += meta.block_hashes
        self.token_ids += meta.token_ids
        if self.extra_keys is not None and meta.extra_keys is not None:
            self.extra_keys = [*self.extra_keys, *meta.extra_keys]


def run_of(shelf: Shelf, meta: BlockStoreMeta) -> Run:
    return Run(
        shelf, meta.group, meta.medium, meta.hash_bytes, meta.block_hashes, meta.token_ids, meta.parent_block_hash,
        meta.lora_id, meta.lora_name, meta.extra_keys, meta.inner,
    )  # fmt: skip
