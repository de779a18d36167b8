"""The pools of two tiers read as one: a block is found in the front one if it can be loaded there, else behind.

Slots of the tier behind are numbered on from the front's. Each pool is prefix-closed by itself, so the tier that
holds the last block of a chain holds all of it, and pinning that block keeps the whole hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.core.pool import BlockPool
from kvevents_service.core.slots import READY


class Ladder(NamedTuple):
    """`front` is the faster tier."""

    front: BlockPool
    back: BlockPool

    def is_back(self, slot: int) -> bool:
        return slot >= self.front.capacity

    def back_slot(self, slot: int) -> int:
        """The slot's number in the pool behind."""
        return slot - self.front.capacity

    def _own(self, slot: int) -> tuple[BlockPool, int]:
        return (self.back, self.back_slot(slot)) if self.is_back(slot) else (self.front, slot)

    # lookup

    def ready_prefix(self, group: int, packed: bytes, hash_bytes: int) -> int:
        """How many leading blocks of the packed chain can be loaded now: the longer of the two prefixes."""
        ahead = self.front.ready_prefix(group, packed, hash_bytes)
        if ahead * hash_bytes == len(packed):
            return ahead
        return max(ahead, self.back.ready_prefix(group, packed, hash_bytes))

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        return self._first(self.front.slot_of(group, block_hash), self.back.slot_of(group, block_hash))

    def inner_slot(self, group: int, block_hash: bytes) -> int | None:
        """The block inside which the prefix of this hash ends."""
        return self._first(self.front.inner_slot(group, block_hash), self.back.inner_slot(group, block_hash))

    def _first(self, front: int | None, back: int | None) -> int | None:
        if back is None or (front is not None and self.front.state_of(front) == READY):
            return front
        return self.front.capacity + back

    def ready_slots(self, group: int, hashes: Sequence[bytes]) -> list[int | None]:
        """Where each of these can be loaded from now, if it can."""
        front, more = self.front.ready_slots(group, hashes), self.front.capacity
        if None not in front:
            return front
        both = zip(front, self.back.ready_slots(group, hashes), strict=True)
        return [own if own is not None or behind is None else more + behind for own, behind in both]

    def state_of(self, slot: int) -> int:
        pool, own = self._own(slot)
        return pool.state_of(own)

    def is_chain(self, slots: list[int]) -> bool:
        """Each of these blocks is the parent of the next, on the tier of the last one."""
        if not self.is_back(slots[-1]):
            return self.front.is_chain(slots)
        chain = self.back.chain(self.back_slot(slots[-1]), len(slots))
        more = self.front.capacity
        return chain is not None and (
            chain == [slot - more for slot in slots] or all(map(self._same_block, slots, chain))
        )

    def _same_block(self, slot: int, back: int) -> bool:
        if self.is_back(slot):
            return self.back_slot(slot) == back
        return self.front.hash_of(slot) == self.back.hash_of(back)

    # use

    def ends(self, slots: list[int]) -> list[int]:
        """What must be pinned of a chain so that all of it stays where it is."""
        front = [slot for slot in slots if slot < self.front.capacity]
        return front[-1:] + slots[-1:] if len(front) < len(slots) else slots[-1:]

    def pin(self, slot: int) -> None:
        pool, own = self._own(slot)
        pool.pin(own)

    def unpin(self, slot: int) -> None:
        pool, own = self._own(slot)
        pool.unpin(own)

    def touch(self, slot: int) -> None:
        pool, own = self._own(slot)
        pool.touch(own)
