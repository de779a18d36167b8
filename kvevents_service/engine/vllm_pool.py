"""vLLM's block pool, by block id: references, its prefix cache, and its free queue with a record of every block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvevents_service.engine.lazy import BlockRecord, EvictionOrder
from kvevents_service.engine.spans import Spans

NULL_BLOCK = 0
"""The block that stands for none: the first one that vLLM's pool takes out of its queue."""

CacheKey = Callable[[bytes, int], bytes]
"""The name of a group's block in the pool: of its hash and the group's index."""


class PoolBlock(Protocol):
    """`vllm.v1.core.kv_cache_utils.KVCacheBlock`."""

    block_id: int
    ref_cnt: int
    block_hash: bytes | None
    is_null: bool


class BlockPool(Protocol):
    """The part of `vllm.v1.core.block_pool.BlockPool` that is used."""

    blocks: Sequence[Any]
    free_block_queue: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def get_num_free_blocks(self) -> int: ...

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...


class EnginePool:
    """A block that is in use already, or stays so, costs no call of the pool's: only its reference is counted.

    `written` are the blocks that running steps write: the pool has named them already, and they hold nothing."""

    def __init__(self, pool: BlockPool, written: Collection[int], key: CacheKey, spans: Sequence[Spans]) -> None:
        self._pool = pool
        self._written = written
        self._key = key
        self._spans = spans
        self._records: dict[int, BlockRecord] = {}

    def __repr__(self) -> str:
        return f"<EnginePool {len(self._pool.blocks)} blocks, {len(self._records)} records>"

    def __len__(self) -> int:
        return len(self._pool.blocks)

    @property
    def free_blocks(self) -> int:
        """How many the engine may take without letting go of any."""
        return self._pool.get_num_free_blocks()

    # references

    def touch(self, block_ids: Iterable[int]) -> None:
        idle = []
        for block in map(self._pool.blocks.__getitem__, block_ids):
            if block.ref_cnt:
                block.ref_cnt += 1
            else:
                idle.append(block)
        if idle:
            self._pool.touch(idle)

    def free(self, block_ids: Iterable[int]) -> None:
        """The first one is reused first."""
        blocks = list(map(self._pool.blocks.__getitem__, block_ids))
        if blocks and blocks[0].ref_cnt == 1:  # then most of them are: the pool can count for itself
            self._pool.free_blocks(blocks)
            return
        idle = []
        for block in blocks:
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
            else:
                idle.append(block)
        if idle:
            self._pool.free_blocks(idle)

    # the prefix cache

    def find(self, group: int, block_hash: bytes) -> int | None:
        found = self._pool.get_cached_block(block_hash, [group])
        if not found or found[0].block_id in self._written:
            return None
        block_id: int = found[0].block_id
        return block_id

    # the free queue

    @property
    def eviction_order(self) -> EvictionOrder:
        return EvictionOrder(self._after, self._describe)

    def record(self, block_ids: Iterable[int | None], record: BlockRecord) -> None:
        """These blocks are consecutive ones of a request, the first one as `record` says."""
        view, group, first = record
        for number, block_id in enumerate(block_ids, first):
            if block_id is not None:
                self._records[block_id] = BlockRecord(view, group, number)

    def forget(self) -> None:
        """Of no block anything is known."""
        self._records.clear()

    def _after(self, cursor: int | None) -> Iterator[tuple[int, bytes | None]]:
        start = None if cursor is None else self._pool.blocks[cursor]
        if start is not None and start.ref_cnt:
            start = None
        for block in self._pool.free_block_queue.iter_blocks_after(start):
            nameless = block.is_null or block.block_id in self._written
            yield block.block_id, None if nameless else block.block_hash

    def _describe(self, block_id: int) -> BlockRecord | None:
        """The record, if it is of what the block holds now."""
        record = self._records.get(block_id)
        if record is None:
            return None
        name = self._spans[record.group].name(record.view.unit_hashes, record.number)
        held: bytes | None = self._pool.blocks[block_id].block_hash
        return record if held == self._key(name, record.group) else None
