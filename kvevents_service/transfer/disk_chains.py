"""From the records of single blocks back to runs: what a pool takes in and what is announced, parents first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.metadata import TOKEN_BYTES, BlockStoreMeta, StoreRun
from kvevents_service.transfer.disk_layout import KeptLayout
from kvevents_service.transfer.disk_record import Entry, Name, Record
from kvevents_service.wire.control import GroupSpec

MAX_RUN_BLOCKS = 256
"""A recovered run is cut here: it becomes one event."""


class Found(NamedTuple):
    """One block of the index."""

    slot: int
    entry: Entry

    @property
    def record(self) -> Record:
        return self.entry.record

    @property
    def name(self) -> Name:
        return self.entry.record.name


def recover(layout: KeptLayout, medium: str, entries: Iterable[tuple[int, Entry]]) -> list[StoreRun]:
    """Every block whose chain is whole, each name once, parents before children, in groups of their order.

    What cannot belong to this layout is left out, and so is a block behind one that is left out (I6).
    """
    found = _newest(layout, entries)
    runs = []
    for group in layout.groups:
        own = [block for block in found if block.record.group == group.index]
        for chain in _chains(own) if group.kind in PREFIX_KINDS else ([block] for block in own):
            runs.append(_run(layout, group, medium, chain))
    return _with_inner(runs, layout, medium, {block.slot: block for block in found})


def _newest(layout: KeptLayout, entries: Iterable[tuple[int, Entry]]) -> list[Found]:
    """One block for each name of a group, the last one that was written; the oldest first."""
    named: dict[tuple[int, bytes], Found] = {}
    blocks = (Found(slot, entry) for slot, entry in entries)
    for block in sorted(blocks, key=lambda block: block.entry.stamp):
        if _fits(layout, block.record):
            key = (block.record.group, block.name.block_hash)
            named.pop(key, None)
            named[key] = block
    return list(named.values())


def _fits(layout: KeptLayout, record: Record) -> bool:
    name, groups = record.name, {group.index: group for group in layout.groups}
    if record.group not in groups or len(record.sums) != len(layout.sizes):
        return False
    tokens = groups[record.group].block_size
    return len(name.block_hash) == layout.hash_bytes and len(name.token_ids) == tokens * TOKEN_BYTES


def _chains(blocks: list[Found]) -> Iterator[list[Found]]:
    """Depth first from the blocks that begin a prompt, a child in the run of its parent where it can be."""
    children: dict[bytes | None, list[Found]] = defaultdict(list)
    for block in blocks:
        children[block.name.parent].append(block)
    waiting = children.pop(None, [])[::-1]
    while waiting:
        chain = [waiting.pop()]
        while True:
            last = chain[-1]
            behind = children.pop(last.name.block_hash, [])
            joined = len(chain) < MAX_RUN_BLOCKS and behind and _joins(last, behind[0])
            waiting += reversed(behind[1:] if joined else behind)
            if not joined:
                break
            chain.append(behind[0])
        yield chain


def _joins(last: Found, following: Found) -> bool:
    one, other = last.name, following.name
    return (one.lora_id, one.lora_name) == (other.lora_id, other.lora_name)


def _run(layout: KeptLayout, group: GroupSpec, medium: str, chain: list[Found]) -> StoreRun:
    names = [block.name for block in chain]
    return StoreRun(_meta(layout, group, medium, names, inner=False), [block.slot for block in chain])


def _with_inner(runs: list[StoreRun], layout: KeptLayout, medium: str, found: dict[int, Found]) -> list[StoreRun]:
    """Inner names of the blocks that were recovered, each once in a group and no block's own name."""
    taken = {(run.meta.group.index, run.meta.hash_at(i)) for run in runs for i in range(run.meta.blocks)}
    whole = []
    for run in runs:
        metas = []
        for name in (name for slot in run.slots for name in found[slot].record.inner):
            key = (run.meta.group.index, name.block_hash)
            if key not in taken and len(name.block_hash) == layout.hash_bytes:
                taken.add(key)
                metas.append(_meta(layout, run.meta.group, medium, [name], inner=True))
        whole.append(StoreRun(run.meta, run.slots, tuple(metas)))
    return whole


def _meta(layout: KeptLayout, group: GroupSpec, medium: str, names: list[Name], *, inner: bool) -> BlockStoreMeta:
    first = names[0]
    keys = [None if name.extra_keys is None else _plain(name.extra_keys) for name in names]
    return BlockStoreMeta(
        group,
        medium,
        layout.hash_bytes,
        b"".join(name.block_hash for name in names),
        b"".join(name.token_ids for name in names),
        first.parent,
        first.lora_id,
        first.lora_name,
        keys if any(key is not None for key in keys) else None,
        inner,
    )


def _plain(value: list[Any]) -> tuple[Any, ...]:
    """Extra keys are tuples, msgpack has lists only."""
    return tuple(_plain(item) if isinstance(item, list) else item for item in value)
