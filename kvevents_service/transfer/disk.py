"""The disk tier: one file, each rank's slots one after another in it.

It is unlinked as soon as it is made, so it leaves with the process. With `keep` it has a name and an index beside
it, and its blocks are found again. All its space is taken at start: the disk is not found full later. The file is
never mapped: bytes that it has lost are an error of one read.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvevents_service.core.metadata import StoreRun
from kvevents_service.transfer.crew import give_way
from kvevents_service.transfer.disk_arena import Device, DiskArena, stride_of
from kvevents_service.transfer.disk_file import kept_file, nameless_file
from kvevents_service.transfer.disk_index import DiskIndex
from kvevents_service.transfer.disk_io import DiskFaults
from kvevents_service.transfer.disk_layout import KeptLayout

IO_THREADS = 4
"""Reads, and writes, under way at once."""
BLOCKS_NAME, INDEX_NAME = "kvevents.blocks", "kvevents.index"


class DiskStorage:
    """`size_bytes` of the file system that `directory` is on. ConfigError if they cannot be had.

    `page_cache`: copies go through it. Else around it, where the file system can: the memory is then left to those
    who need it. `keep`: in a file that stays; see `recover`.
    """

    medium = "STORAGE"

    def __init__(self, directory: str, size_bytes: int, *, page_cache: bool = False, keep: bool = False) -> None:
        self.size_bytes = size_bytes
        self.faults = DiskFaults()
        self._index: DiskIndex | None = None
        self._arenas: list[DiskArena] = []
        direct = not page_cache
        blocks = os.path.join(directory, BLOCKS_NAME)
        self._file = kept_file(blocks, direct=direct) if keep else nameless_file(directory, direct=direct)
        self._open = contextlib.ExitStack()
        self._closing = weakref.finalize(self, self._open.close)
        self._open.callback(self._file.close)
        whole = os.fstat(self.fd).st_size == size_bytes
        self._file.take(size_bytes)
        if keep:
            self._open_index(os.path.join(directory, INDEX_NAME), usable=whole)
        self._readers, self._writers = (
            ThreadPoolExecutor(IO_THREADS, thread_name_prefix=f"kvevents-disk-{kind}", initializer=give_way)
            for kind in ("load", "store")
        )

    def __repr__(self) -> str:
        return f"<DiskStorage {self.size_bytes} bytes, {'direct' if self.direct else 'page cache'}>"

    @property
    def fd(self) -> int:
        """The file, through the page cache."""
        return self._file.fd

    @property
    def direct(self) -> bool:
        """Whether copies can go around the page cache."""
        return self._file.direct_fd is not None

    def close(self) -> None:
        """Give the space back, or leave it for the next start. No copy may be running."""
        self._readers.shutdown()
        self._writers.shutdown()
        if self._index is not None:
            self._index.close()
        self._closing()

    def slot_bytes(self, block_sizes: Sequence[int]) -> int:
        """What a block of these sizes, one a rank, takes of the file: whole sectors where that costs little."""
        return sum(stride_of(size, direct=self.direct) for size in block_sizes)

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[DiskArena]:
        """Their parts of the file, one behind the other: together they fit where `slots` x `slot_bytes` does."""
        device = Device(self.fd, self._file.direct_fd, self._readers, self._writers, self.faults, self._forget)
        starts = [slots * self.slot_bytes(block_sizes[:rank]) for rank in range(len(block_sizes))]
        self._arenas = [DiskArena(device, *part, slots) for part in zip(starts, block_sizes, strict=True)]
        return self._arenas

    def stats(self) -> dict[str, int]:
        """Faults by kind, whether the page cache is gone around, and what is kept."""
        index = {} if self._index is None else self._index.stats()
        return {**self.faults.stats(), "disk_direct": int(self.direct), **index}

    # what is kept

    def recover(self, layout: KeptLayout) -> list[StoreRun]:
        """Keep blocks of this layout in the arenas that were made last. Returns what is there of it already: runs
        with their slots, parents before children, none of them checked before it is loaded. [] without `keep`."""
        if self._index is None:
            return []
        cut = (self._arenas[0].slots, *(arena.stride for arena in self._arenas))
        return self._index.recover(msgspec.structs.replace(layout, cut=cut), self._arenas)

    def kept_slots(self) -> bytes:
        """1 for each slot that can be found again, by slot: right after `recover`, those of its runs."""
        return b"" if self._index is None else self._index.kept_slots()

    def keep(self, runs: Iterable[StoreRun]) -> None:
        """These blocks are announced now: find them again after a restart."""
        if self._index is not None:
            self._index.keep(runs)

    def void(self) -> None:
        """The blocks are worth nothing any more (a reset): never find them again."""
        if self._index is not None:
            self._index.void()

    def _forget(self, slots: array[int]) -> None:
        if self._index is not None:
            self._index.forget(slots)

    def _open_index(self, path: str, *, usable: bool) -> None:
        """`usable`: the blocks were found as they were left."""
        file = kept_file(path)
        self._open.callback(file.close)
        self._index = DiskIndex(file, self.medium, self.faults, usable=usable)
