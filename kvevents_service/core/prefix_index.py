"""Which publisher holds how much of a prompt on which tier, by the tokens alone: what a router asks.

A router does not know the engine's hash function, so a block is named here by what it holds: its key is the hash of
the parent's key, its tokens, and whatever else the publisher says went into its hash (adapter, salt, images). For
each key one int has a bit for every shelf (source and medium) that holds it, and one for every source, so a lookup
costs one hash and one `&` a block, however many sources there are.

A block on one shelf takes about 190 bytes. Blocks whose parent is not known wait, bounded, until it comes; they are
held by nobody meanwhile, and never taken for the start of a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Final, TypeAlias

from kvevents_service.core.block_keys import TOKEN_BYTES, asked_extras, normal_extra, packed, root_key
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.holders import Held, Holder, Orphan, Shelf, held_by_hash, held_by_key
from kvevents_service.core.residency import key64
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvevents_service.wire.extra_keys import is_deep
from kvevents_service.wire.media import canonical_medium

MAX_ORPHANS: Final = 65_536
_MAX_MASKS: Final = 65_536
COUNTED: Final = (
    *("stored", "removed", "removed_unknown", "orphans_linked", "orphans_dropped", "other_groups", "malformed"),
    "other_block_size",
)


Content: TypeAlias = tuple[int, bytes, Hashable]
"""The hash of a block, its tokens, what else went into the hash."""


class BlockIndex:
    """The blocks of many sources; a source is any hashable value.

    block_size: tokens, the only size taken; None: any, each with prefixes of its own. Only one group of a source
    counts: the first of a prefix kind (full attention) that it stores, or that says no kind.
    """

    def __init__(self, block_size: int | None = None, max_orphans: int = MAX_ORPHANS) -> None:
        self.block_size = block_size
        self.max_orphans = max_orphans
        self.counts: Counter[str] = Counter()
        self._holders: dict[Hashable, Holder] = {}
        self._masks: dict[int, int] = {}
        self._same: dict[int, int] = {}
        """One object for equal masks: there are few, and a block each."""
        self._free_bits: list[int] = []
        self._bits = 0

    def __repr__(self) -> str:
        orphans = self.stats()["orphans"]
        return f"<{type(self).__name__} {len(self)} blocks of {len(self._holders)} sources, {orphans} orphans>"

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._masks)

    @property
    def sources(self) -> tuple[Hashable, ...]:
        return tuple(self._holders)

    def stats(self) -> dict[str, int]:
        orphans = sum(len(holder.orphans) for holder in self._holders.values())
        counts = {name: self.counts[name] for name in COUNTED}
        return {**counts, "blocks": len(self), "orphans": orphans}

    # feeding it

    def apply(self, source: Hashable, events: Iterable[Event]) -> None:
        """Fold one batch of a source, in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(source, event)
                case BlockRemoved():
                    self._remove(source, event)
                case AllBlocksCleared():
                    self.forget(source)

    def forget(self, source: Hashable) -> None:
        """All that this source told is void. Takes time for each of its blocks."""
        holder = self._holders.pop(source, None)
        if holder is None:
            return
        gone = ~(holder.mask | holder.bit)
        for shelf in holder.shelves.values():
            for key in shelf.keys.values():
                self._set_mask(key, self._masks.get(key, 0) & gone)
            self._free_bits.append(shelf.bit)
        self._free_bits.append(holder.bit)

    def _store(self, source: Hashable, event: BlockStored) -> None:
        holder = self._holders.get(source)
        fault = self._fault(holder, event)
        data = b"" if fault else packed(event.token_ids)
        if fault or data is None:
            self.counts[fault or "malformed"] += 1
            return
        if holder is None:
            holder = self._holders[source] = Holder(self._bit())
        holder.group = event.group_idx or 0
        holder.sizes.add(event.block_size)
        self.counts["stored"] += len(event.block_hashes)
        self._chain(holder, event, data)

    def _fault(self, holder: Holder | None, event: BlockStored) -> str:
        """Why a store is not taken, as counted; "" if it is."""
        if self.block_size not in (None, event.block_size):
            return "other_block_size"
        kind, group = event.kv_cache_spec_kind, event.group_idx or 0
        main = holder.group if holder is not None else group if kind is not None else 0
        if (kind is not None and kind not in PREFIX_KINDS) or group != main:
            return "other_groups"
        blocks, extra = len(event.block_hashes), event.extra_keys
        whole = event.block_size > 0 and len(event.token_ids) == blocks * event.block_size
        return "" if whole and (not extra or (len(extra) == blocks and not is_deep(extra))) else "malformed"

    def _chain(self, holder: Holder, event: BlockStored, data: bytes) -> None:
        """Take the blocks of one store, each behind the one before it."""
        shelf, span = self._shelf(holder, canonical_medium(event.medium)), event.block_size * TOKEN_BYTES
        parent = None if event.parent_block_hash is None else key64(event.parent_block_hash)
        key = root_key(event.block_size, event.lora_name) if parent is None else holder.key_of(parent)
        chunks = (data[start : start + span] for start in range(0, len(data), span))
        extras = (normal_extra(entry, event.lora_name) for entry in event.extra_keys or repeat(None))
        blocks = zip(map(key64, event.block_hashes), chunks, extras, strict=False)
        if key is not None:
            self._extend(holder, shelf, key, blocks)
            return
        for block_hash, chunk, extra in blocks:
            self._wait(holder, Orphan(shelf.medium, block_hash, parent or 0, chunk, extra))
            parent = block_hash

    def _extend(
        self, holder: Holder, shelf: Shelf, key: int, blocks: Iterable[tuple[int, bytes, Hashable]]
    ) -> None:
        """Hold blocks behind the one of this key."""
        keys, masks, fresh = shelf.keys, self._masks, shelf.bit | holder.bit
        for block_hash, chunk, extra in blocks:
            key = hash((key, chunk, extra))
            if key in masks or block_hash in keys:
                self._put(holder, shelf, block_hash, key)
            else:
                keys[block_hash], masks[key] = key, fresh
            if holder.orphans:
                holder.unwait((shelf.medium, block_hash))
                self._link(holder, block_hash, key)

    def _link(self, holder: Holder, block_hash: int, key: int) -> None:
        """Hold the orphans that this block is the parent of, and theirs."""
        known = [(block_hash, key)]
        while known:
            block_hash, key = known.pop()
            for name in tuple(holder.waiting.get(block_hash, ())):
                orphan = holder.orphans[name]
                holder.unwait(name)
                self.counts["orphans_linked"] += 1
                known.append((orphan.block_hash, hash((key, orphan.data, orphan.extra))))
                self._put(holder, self._shelf(holder, orphan.medium), *known[-1])

    def _wait(self, holder: Holder, orphan: Orphan) -> None:
        holder.unwait((orphan.medium, orphan.block_hash))
        holder.wait(orphan)
        if len(holder.orphans) > self.max_orphans:
            holder.unwait(next(iter(holder.orphans)))
            self.counts["orphans_dropped"] += 1

    def _put(self, holder: Holder, shelf: Shelf, block_hash: int, key: int) -> None:
        old = shelf.keys.get(block_hash)
        if old == key:
            return
        if old is not None:
            self._drop(holder, shelf, old)
        shelf.keys[block_hash] = key
        mask = self._masks.get(key, 0)
        if mask & shelf.bit:
            shelf.again[key] += 1
        else:
            self._set_mask(key, mask | shelf.bit | holder.bit)

    def _remove(self, source: Hashable, event: BlockRemoved) -> None:
        holder = self._holders.get(source)
        if holder is None or (event.group_idx or 0) != holder.group:
            self.counts["removed_unknown" if holder is None else "other_groups"] += 1
            return
        medium = canonical_medium(event.medium)
        shelf = holder.shelves.get(medium)
        for block_hash in map(key64, event.block_hashes):
            key = None if shelf is None else shelf.keys.pop(block_hash, None)
            if shelf is not None and key is not None:
                self._drop(holder, shelf, key)
                self.counts["removed"] += 1
            elif not holder.unwait((medium, block_hash)):
                self.counts["removed_unknown"] += 1

    def _drop(self, holder: Holder, shelf: Shelf, key: int) -> None:
        if key in shelf.again:
            shelf.again[key] -= 1
            if not shelf.again[key]:
                del shelf.again[key]
            return
        mask = self._masks.get(key, 0) & ~shelf.bit
        self._set_mask(key, mask if mask & holder.mask else mask & ~holder.bit)

    def _set_mask(self, key: int, mask: int) -> None:
        if not mask:
            self._masks.pop(key, None)
            return
        if len(self._same) > _MAX_MASKS:
            self._same.clear()
        self._masks[key] = self._same.setdefault(mask, mask)

    def _shelf(self, holder: Holder, medium: str) -> Shelf:
        shelf = holder.shelves.get(medium)
        if shelf is None:
            shelf = holder.shelves[medium] = Shelf(medium, self._bit())
            holder.mask |= shelf.bit
        return shelf

    def _bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    # asking it

    def match(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[object] | None = None,
    ) -> dict[Hashable, Held]:
        """How much of a prompt each source holds; sources that hold nothing are left out.

        salt: what vLLM calls cache_salt, part of the first block. extra_keys: one entry a block, as far as it goes,
        without adapter and salt. Raises ValueError for token ids that are no int32.
        """
        data = packed(token_ids)
        if data is None:
            raise ValueError("token_ids: expected ints of 32 bits")
        extras = asked_extras(salt, extra_keys)
        found: dict[Hashable, Held] = {}
        for size in set().union(*(holder.sizes for holder in self._holders.values())):
            ends = self._ends(root_key(size, lora_name), data, size * TOKEN_BYTES, extras)
            for source, holder in self._holders.items():
                held = held_by_key(holder, ends, size)
                if held.tokens > (found[source].tokens if source in found else 0):
                    found[source] = held
        return found

    def _ends(self, key: int, data: bytes, span: int, extras: list[Hashable]) -> list[tuple[int, int]]:
        """Where bits end that are set from the first block on: (bits, blocks)."""
        ends, mask, blocks = [], (1 << self._bits) - 1, len(data) // span
        masks = self._masks
        for block in range(blocks):
            extra = extras[block] if block < len(extras) else None
            key = hash((key, data[block * span : (block + 1) * span], extra))
            still = mask & masks.get(key, 0)
            if still != mask:
                ends.append((mask ^ still, block))
                mask = still
                if not mask:
                    return ends
        return [*ends, (mask, blocks)]

    def match_hashes(self, block_hashes: Sequence[BlockHash]) -> dict[Hashable, Held]:
        """As `match`, by the engine's own hashes of the prompt's blocks."""
        keys = [key64(block_hash) for block_hash in block_hashes]
        found = {source: held_by_hash(holder, keys) for source, holder in self._holders.items()}
        return {source: held for source, held in found.items() if held.tokens}
