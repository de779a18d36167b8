"""What every part of the offload scheduler shares: the tier's shape, its pool, its bounds, its counters."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from kvevents_service.core.commands import Command, Publish
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun, StoreRun
from kvevents_service.core.names import Evicted, Forgotten
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.slots import PENDING, READY
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.name_board import NameBoard
from kvevents_service.wire.packing import INT32_BYTES, unpack_int32

_KIND_OF: Final = attrgetter("group", "inner")
_HASH_OF: Final = attrgetter("block_hash")


class TierSpec(NamedTuple):
    """What the tier is: set by the first hello, the same for every session after it.

    keeps: it is to be told of every run that was announced. board: where the names of its blocks are to stand.
    """

    medium: str
    capacity_blocks: int
    hash_bytes: int
    groups: tuple[GroupSpec, ...]
    hash_tokens: int
    keeps: bool = False
    board: NameBoard | None = None


class Limits(NamedTuple):
    """Bounds of everything that can wait. Times in seconds.

    With a tier behind: the headroom is how many blocks should be able to leave without being lost, one in
    `headroom_divisor` of the tier; no more than that are being demoted at any time.
    `slice_blocks`: about so many one call removes by a reset, demotes, promotes or adopts; the rest is for `go_on`.
    `step_blocks`: a step that offers more is taken in parts.
    """

    max_pending_blocks: int = 65536
    max_leases: int = 16384
    max_lease_s: float = 60.0
    transfer_deadline_s: float = 30.0
    headroom_divisor: int = 4
    max_headroom_blocks: int = 4096
    max_demoting_blocks: int = 4096
    slice_blocks: int = 128
    step_blocks: int = 192


class Tier:
    """The pool of one tier with the counters and ids that stores and loads share."""

    def __init__(self, spec: TierSpec, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        self.pool = BlockPool(spec.capacity_blocks, len(spec.groups), spec.board)
        self.counters: Counter[str] = Counter()
        self.engine_blocks: dict[int, int] = {}
        self._last_id = 0
        self._kept: deque[StoreRun] = deque()

    def next_id(self) -> int:
        """A new id for a transfer or a lease; never repeats in this process."""
        self._last_id += 1
        return self._last_id

    def gauges(self) -> dict[str, int]:
        """How many slots are in which state."""
        return {
            "blocks_resident": self.pool.count(READY),
            "blocks_pending": self.pool.count(PENDING),
            "blocks_free": self.pool.free_slots,
        }

    # blocks that were in the tier before this process was

    @property
    def adopting(self) -> bool:
        """Some of them are not announced yet."""
        return bool(self._kept)

    def adopt(self, runs: Iterable[StoreRun], flags: bytes | None = None) -> list[Command]:
        """The announcement of the first of them, parents first; `adopt_more` until no more are left. flags: 1 for
        each of their slots, by slot, where that is known: for a million blocks it saves 0.1 s."""
        self._kept.extend(runs)
        self.pool.reserve(self._kept, flags)
        return self.adopt_more()

    def adopt_more(self) -> list[Command]:
        """About `slice_blocks` of them."""
        kept: list[BlockStoreMeta] = []
        taken = 0
        while self._kept and taken < self.limits.slice_blocks:
            run = self._kept.popleft()
            taken += len(run.slots)
            kept += self.pool.adopt(run)
        self.counters["blocks_stored"] += sum(meta.blocks for meta in kept)
        return [Publish(tuple(kept))] if kept else []

    def let_go(self) -> None:
        """They are not wanted any more, as far as they are not announced."""
        while self._kept:
            self.pool.let_go(self._kept.popleft())

    # what leaves

    def evicted(self, names: list[Evicted]) -> list[Command]:
        """The announcement that these names left to make room."""
        if not names:
            return []
        gone: dict[tuple[int, bool], list[bytes]] = {}
        for kind, own in groupby(names, _KIND_OF):
            gone.setdefault(kind, []).extend(map(_HASH_OF, own))
        return [self.removal([Forgotten(group, hashes, inner) for (group, inner), hashes in gone.items()])]

    def lose(self, slots: Iterable[int]) -> list[Command]:
        """The bytes in these slots are gone for good: no block that needs them is found any more."""
        lost = [slot for slot in slots if self.pool.state_of(slot) == READY]
        self.counters["blocks_lost"] += len(lost)
        gone = self.pool.forget(lost)
        return [self.removal(gone)] if gone else []

    def removal(self, gone: list[Forgotten]) -> Publish:
        """The announcement that these names left the tier, counted."""
        groups, medium = self.spec.groups, self.spec.medium
        self.counters["blocks_removed"] += sum(len(names.hashes) for names in gone)
        return Publish(
            tuple(RemovedRun(groups[group], medium, tuple(hashes), inner) for group, hashes, inner in gone)
        )

    # engines

    def block_ids(self, session_id: int, packed: bytes, field: str) -> array[int]:
        """Unpacked engine block ids, each one inside the session's memory; else ControlError."""
        if len(packed) % INT32_BYTES:
            raise ControlError("bad_block_ids", field, "packed int32 values")
        ids = unpack_int32(packed)
        limit = self.engine_blocks.get(session_id, 0)
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            raise ControlError("bad_block_ids", field, f"block ids below {limit}, none negative")
        return ids
