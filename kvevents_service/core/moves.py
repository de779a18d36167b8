"""Blocks of one tier get slots in another: as many as can stand there by its own rules, parents first."""

from __future__ import annotations

from array import array

import msgspec

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.core.names import Evicted
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.tier import Tier


class Move:
    """Blocks that are to be copied: `source[i]` to `target[i]`; what will be announced, and what had to leave.

    `pins`: slots of the source that keep all of them; `target_pins`: those of the target.
    """

    __slots__ = ("evicted", "pins", "runs", "source", "target", "target_pins")

    def __init__(self) -> None:
        self.source, self.target = array("i"), array("i")
        self.runs: list[StoreRun] = []
        self.evicted: list[Evicted] = []
        self.pins: list[int] = []
        self.target_pins: list[int] = []

    def __len__(self) -> int:
        return len(self.source)

    def add(self, source: BlockPool, slots: list[int], target: Tier) -> int:
        """Take in these READY blocks of one group, each behind its parent; returns how many got a place.

        Those behind the first one that got none get none. The caller pins `pins`, before anything else can leave.
        """
        before = len(self)
        for piece in source.pieces(slots):
            if self._add_piece(source, piece, target) < len(piece):
                break
        placed = self.source[before:].tolist()
        if placed:
            prefix = source.group_of(placed[0], target.spec.groups).kind in PREFIX_KINDS
            put = self.target[before:].tolist()
            self.pins += source.ends(placed) if prefix else placed
            self.target_pins += target.pool.ends(put) if prefix else put
        return len(placed)

    def _add_piece(self, source: BlockPool, piece: list[int], target: Tier) -> int:
        meta = msgspec.structs.replace(source.run_of(piece), medium=target.spec.medium)
        group = meta.group.index
        hashes = [name for slot in piece if (name := source.hash_of(slot)) is not None]
        before, pool = source.parent_of(piece[0]), target.pool
        parent = None if before is None else pool.slot_of(group, source.hash_of(before) or b"")
        if (before is not None and parent is None) or not pool.is_fresh_chain(group, hashes):
            return 0
        slots, evicted = pool.allocate(meta, hashes, parent)
        self.evicted += evicted
        if slots:
            names = _inner_names(source, piece, slots, target)
            self.runs.append(StoreRun(meta.part(0, len(slots)), slots, names))
            self.source.extend(piece[: len(slots)])
            self.target.extend(slots)
        return len(slots)


def _inner_names(source: BlockPool, piece: list[int], slots: list[int], target: Tier) -> tuple[BlockStoreMeta, ...]:
    """The inner names of these blocks that no other block of the target has."""
    if not source.has_more_names:
        return ()
    own = [
        (slot, msgspec.structs.replace(meta, medium=target.spec.medium))
        for from_slot, slot in zip(piece, slots, strict=False)
        for meta in source.more_names(from_slot)
    ]
    return tuple(meta for slot, meta in own if target.pool.add_name(slot, meta))
