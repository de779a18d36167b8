"""The tiers with an engine's layout: how many blocks fit into each, its scheduler, and the lanes of every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvevents_service.config import ServeConfig, TierSettings
from kvevents_service.core.cascade import Cascade
from kvevents_service.core.commands import Command
from kvevents_service.core.metadata import StoreRun, TransferMeta
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.errors import ControlError
from kvevents_service.service.roster import Head
from kvevents_service.service.shared_board import SharedBoard
from kvevents_service.transfer.arena import HostArena, HostStorage, Storage
from kvevents_service.transfer.disk import DiskStorage
from kvevents_service.transfer.disk_layout import KeptLayout
from kvevents_service.transfer.lanes import Lanes
from kvevents_service.transfer.memory import BlockMemory

log = logging.getLogger(__name__)

MAX_SLOTS = 1 << 24
"""A slot can cost some 90 bytes beside what it holds: tiny blocks must not make the books larger than the tier."""
MAX_DEMOTING_BYTES = 256 * 1024 * 1024
"""On their way from the host tier to the disk at any time, or one block if that is more."""

BlockSizes = tuple[tuple[int, ...], ...]
"""Per rank, the bytes of a block in each region."""


class OpenTier(NamedTuple):
    """What engines of one layout share. Until all ranks of a first engine are there it has no sizes and no lanes.

    lanes: of the first tier, one a rank. below: likewise, of the tier behind. host: the first tier's as memory.
    """

    head: Head
    sizes: BlockSizes
    scheduler: OffloadScheduler
    lanes: tuple[Lanes, ...] = ()
    below: tuple[Lanes, ...] = ()
    host: tuple[BlockMemory, ...] = ()

    @property
    def block_bytes(self) -> int:
        return sum(map(sum, self.sizes))

    @property
    def all_lanes(self) -> tuple[Lanes, ...]:
        return self.lanes + self.below

    def lanes_of(self, transfer: TransferMeta) -> tuple[Lanes, ...]:
        """Whose slots are copied, by rank."""
        return self.below if transfer.tier else self.lanes

    def medium_of(self, transfer: TransferMeta) -> str:
        """Of those slots."""
        return self.scheduler.tiers[transfer.tier].spec.medium


class Tiers:
    """What the settings ask for, the first tier first. Makes one open tier after the other."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float]) -> None:
        self.settings = config.tiers
        self.names = SharedBoard()
        self.storages = [_storage(tier, config) for tier in self.settings]
        self._disk = next((storage for storage in self.storages if isinstance(storage, DiskStorage)), None)
        self._clock = clock

    def capacities(self, block_sizes: Sequence[int]) -> list[int]:
        """Blocks of each tier, of these sizes, one a rank. ControlError if one holds too few."""
        made = zip(self.settings, self.storages, strict=True)
        return [_capacity(tier, storage.slot_bytes(block_sizes)) for tier, storage in made]

    def stats(self) -> dict[str, int]:
        """Of what the tiers are made of."""
        return {name: value for storage in self.storages for name, value in storage.stats().items()}

    def empty(self, head: Head) -> OpenTier:
        """Before there is a size."""
        return OpenTier(head, (), self._scheduler(head, [0] * len(self.settings), 1))

    def open(self, head: Head, sizes: BlockSizes, capacities: list[int]) -> OpenTier:
        """With memory and workers. Arenas that were opened before are void."""
        of_ranks = [sum(of_rank) for of_rank in sizes]
        made = list(zip(self.storages, capacities, strict=True))
        arenas = [storage.arenas(slots, of_ranks) for storage, slots in made]
        lanes = [tuple(Lanes(arena, self._clock) for arena in own) for own in arenas]
        for storage, slots in made:
            log.info("tier %s: %d blocks of %d bytes", storage.medium, slots, sum(of_ranks))
        scheduler = self._scheduler(head, capacities, sum(of_ranks))
        host = tuple(arena.as_memory() for arena in arenas[0] if isinstance(arena, HostArena))
        return OpenTier(head, sizes, scheduler, lanes[0], lanes[1] if lanes[1:] else (), host)

    def _scheduler(self, head: Head, capacities: list[int], block_bytes: int) -> OffloadScheduler:
        board = self.names.board
        if board is not None:
            board.clear()  # of the names of the tiers before
        first, *behind = (
            TierSpec(storage.medium, slots, head.hash_bytes, head.groups, head.hash_tokens, tier.keep, board)
            for tier, storage, slots in zip(self.settings, self.storages, capacities, strict=True)
        )
        if not behind:
            return OffloadScheduler(first)
        most = min(Limits().max_demoting_blocks, max(1, MAX_DEMOTING_BYTES // block_bytes))
        return Cascade(first, behind[0], Limits(max_demoting_blocks=most))

    # a disk that keeps its blocks

    def adopt(self, tier: OpenTier) -> list[Command]:
        """What is to be announced first of the blocks that are on the disk from the life before, if their layout is
        the one of this tier; the scheduler goes on with the rest. What is kept of another layout is void."""
        if self._disk is None:
            return []
        head = tier.head
        layout = KeptLayout(head.namespace, head.hash_bytes, head.groups, head.hash_tokens, tier.sizes)
        found = self._disk.recover(layout)
        if found:
            blocks = sum(len(run.slots) for run in found)
            log.info("tier %s: %d blocks from the life before", self._disk.medium, blocks)
        return tier.scheduler.tiers[-1].adopt(found, self._disk.kept_slots() if found else None)

    def keep(self, runs: Iterable[StoreRun]) -> None:
        """Find these again after a restart."""
        if self._disk is not None:
            self._disk.keep(runs)

    def void(self) -> None:
        """Find nothing again that is there now. ControlError if the disk does not let itself be told."""
        try:
            if self._disk is not None:
                self._disk.void()
        except OSError as error:
            expected = f"an index that can be written: blocks may come back at the next start ({error.strerror})"
            raise ControlError("not_forgotten", "disk_path", expected) from error

    def close(self) -> None:
        """No copy may be running."""
        self.names.close()
        for storage in self.storages:
            storage.close()


def carry_on(before: OpenTier, after: OpenTier) -> None:
    """Counters go on over a change of the tier."""
    for old, new in zip(before.scheduler.tiers, after.scheduler.tiers, strict=True):
        new.counters.update(old.counters)


def _storage(tier: TierSettings, config: ServeConfig) -> Storage:
    if tier.directory is not None:
        return _disk_storage(tier, tier.directory)
    return HostStorage(config.copy_threads, hugetlb=config.host_hugetlb, prefault=config.host_prefault)


def _disk_storage(tier: TierSettings, directory: str) -> DiskStorage:
    storage = DiskStorage(directory, tier.size_bytes, page_cache=tier.page_cache, keep=tier.keep)
    if not (storage.direct or tier.page_cache):
        log.warning("disk_path: no direct I/O in %s: copies go through the page cache", directory)
    return storage


def _capacity(tier: TierSettings, block_bytes: int) -> int:
    fitting = tier.size_bytes // block_bytes
    if not fitting:
        raise ControlError("tier_too_small", f"{tier.prefix}_bytes", f"at least one block, {block_bytes} bytes")
    if (tier.max_blocks or 0) > fitting:
        expected = f"at most {fitting}: {tier.prefix}_bytes holds no more blocks of {block_bytes} bytes"
        raise ControlError("tier_too_small", f"{tier.prefix}_blocks", expected)
    return min(tier.max_blocks or fitting, MAX_SLOTS)
