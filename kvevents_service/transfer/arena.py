"""Arenas: where a tier's blocks are, one slot a block. The host's are anonymous memory, gone with the process."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kvevents_service.errors import ConfigError, KvEventsError
from kvevents_service.transfer.copy import Moves, copy_blocks, shelves
from kvevents_service.transfer.crew import Crew, default_threads
from kvevents_service.transfer.cuda_device import HostSpan
from kvevents_service.transfer.cuda_memory import CudaMemory
from kvevents_service.transfer.marks import Marks
from kvevents_service.transfer.memory import BlockMemory, widest
from kvevents_service.transfer.pieces import pieces_of, slot_rows
from kvevents_service.transfer.prefault import Prefault, Span
from kvevents_service.transfer.sheet import sheets_of

MIN_PART_BYTES = 4 * 1024 * 1024
"""Less is not worth another thread."""
MAP_HUGETLB = 0x40000  # Linux; not in the mmap module before 3.13
HUGE_PAGE_BYTES = 2 * 1024 * 1024

Side = list[torch.Tensor]


class BlocksLost(KvEventsError):
    """What was read is not what was stored: the bytes in `slots` are gone for good."""

    def __init__(self, slots: array[int], reason: str) -> None:
        super().__init__(f"{len(slots)} blocks lost: {reason}")
        self.slots = slots


Rest = Callable[[], None]
"""Waits for the end of a copy that was begun. May be called in another thread."""


class Arena(Protocol):
    """Slots of `block_bytes` bytes. `store` and `load` copy pairwise, and may each run in a thread of its own.

    They return None when the bytes are there, or what waits for that: a device copies by itself.

    An exception means that the bytes did not come over; what was written to is then worth nothing. `BlocksLost`
    from a load says which slots will never come over again.
    """

    block_bytes: int

    def store(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest | None:
        """Engine blocks -> slots."""

    def load(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest | None:
        """Slots -> engine blocks."""


class Storage(Protocol):
    """What arenas are made of."""

    medium: str

    def slot_bytes(self, block_sizes: Sequence[int]) -> int:
        """What a block of these sizes, one a rank, takes of the tier."""

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[Arena]:
        """An arena of `slots` slots for each block size. Those that were made before are void."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges of its own."""

    def close(self) -> None:
        """No copy may be running."""


class Crews(NamedTuple):
    """The threads of each direction: loads never wait for stores."""

    store: Crew
    load: Crew


class HostStorage:
    """The memory of this machine. Each direction copies with `threads` threads.

    `hugetlb`: of the huge pages that the system has set aside, instead of those that it finds. `prefault`: all of
    an arena is made present behind its making, not when it is first written to.
    """

    medium = "CPU"

    def __init__(self, threads: int | None = None, *, hugetlb: bool = False, prefault: bool = False) -> None:
        self.hugetlb = hugetlb
        self.prefault = prefault
        self._prefault = Prefault(())
        threads = default_threads() if threads is None else threads
        self._crews = Crews(Crew(threads, "kvevents-store-crew"), Crew(threads, "kvevents-load-crew"))

    def slot_bytes(self, block_sizes: Sequence[int]) -> int:
        return sum(block_sizes)

    def stats(self) -> dict[str, int]:
        """What of the arenas has been made present ahead."""
        return {"host_present_bytes": self._prefault.present_bytes}

    def arenas(self, slots: int, block_sizes: Sequence[int]) -> Sequence[Arena]:
        made = [HostArena(slots, block_bytes, self._crews, hugetlb=self.hugetlb) for block_bytes in block_sizes]
        self._prefault.stop()
        if self.prefault:
            self._prefault = Prefault([arena.span for arena in made])
        return made

    def close(self) -> None:
        """Memory goes with its arenas."""
        self._prefault.stop()
        for crew in self._crews:
            crew.close()


ALONE = Crews(Crew(), Crew())
"""The thread that asks for a copy makes it."""


def _anonymous(size_bytes: int) -> mmap.mmap:
    """Memory of huge pages, as far as the system has them when it is first touched."""
    try:
        made = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError("host_bytes", f"an amount this machine can map ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _hugetlb(size_bytes: int) -> mmap.mmap:
    """Memory of huge pages that were set aside: all of it is taken now."""
    whole = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        return mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    except OSError as error:
        pages = whole // HUGE_PAGE_BYTES
        expected = f"false, or {pages} free pages of 2 MiB in /proc/sys/vm/nr_hugepages ({error.strerror})"
        raise ConfigError("host_hugetlb", expected) from error


class HostArena:
    """Memory for `slots` blocks. A slot holds a block's regions one after another."""

    def __init__(self, slots: int, block_bytes: int, crews: Crews = ALONE, *, hugetlb: bool = False) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self._crews = crews
        self._map = _hugetlb(slots * block_bytes) if hugetlb else _anonymous(slots * block_bytes)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    @property
    def span(self) -> Span:
        """All of it."""
        return Span(self._address, self.slots * self.block_bytes, self._map)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The arena as a tensor [slots, block_bytes / itemsize]; block_bytes is a multiple of the item size."""
        words = self.slots * self.block_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=words).view(self.slots, -1)

    def store(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest | None:
        self._check(memory, blocks, slots)
        moves = Moves.of(slots, blocks)
        if isinstance(memory, CudaMemory):
            return self._begin("store", memory, moves)
        self._perform(self._crews.store, *self._sides(memory), moves)
        return None

    def load(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest | None:
        self._check(memory, blocks, slots)
        moves = Moves.of(blocks, slots)
        if isinstance(memory, CudaMemory):
            return self._begin("load", memory, moves)
        self._perform(self._crews.load, *self._sides(memory)[::-1], moves)
        return None

    def _begin(self, kind: str, memory: CudaMemory, moves: Moves) -> Rest:
        host = slot_rows(memory.rows, self._address, self.block_bytes)
        targets, sources = (host, memory.rows) if kind == "store" else (memory.rows, host)
        span = HostSpan(self._address, self.slots * self.block_bytes, self._map, self)
        return memory.device.begin(kind, pieces_of(targets, sources, moves), memory.after(), span)

    def _check(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> None:
        """ValueError for a copy that leaves one of its sides."""
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks for {len(slots)} slots")
        _check_within("blocks", blocks, memory.blocks)
        _check_within("slots", slots, self.slots)

    def _sides(self, memory: BlockMemory) -> tuple[Side, Side]:
        """The arena's side of each sheet, and the memory's."""
        host = shelves(self.view(memory.dtype), memory.sheets)
        return host, [sheet.blocks for sheet in memory.sheets]

    def _perform(self, crew: Crew, targets: Side, sources: Side, moves: Moves) -> None:
        parts = min(crew.threads, moves.blocks * self.block_bytes // MIN_PART_BYTES) or 1
        crew.perform([partial(copy_blocks, targets, sources, part) for part in moves.parts(parts)])

    def as_memory(self) -> ArenaMemory:
        """The arena in the place of an engine's memory: slots are its blocks, each of one region."""
        return ArenaMemory(self)

    def bytes_of(self, slot: int, count: int) -> memoryview:
        """The bytes of consecutive slots, to read and write."""
        return memoryview(self._map)[slot * self.block_bytes : (slot + count) * self.block_bytes]

    def __repr__(self) -> str:
        return f"<HostArena {self.slots} slots of {self.block_bytes} bytes>"


class ArenaMemory:
    """A host arena as memory that another arena stores from and loads into: one region, a slot a block."""

    def __init__(self, arena: HostArena) -> None:
        self.marks = Marks()
        self.dtype = widest(arena.block_bytes)
        self.views = [arena.view(self.dtype)]
        self.sheets = sheets_of(self.views)
        self.blocks = arena.slots
        self.block_sizes: tuple[int, ...] = (arena.block_bytes,)
        self.block_bytes = arena.block_bytes

    def __repr__(self) -> str:
        return f"<ArenaMemory {self.blocks} blocks of {self.block_bytes} bytes>"

    def intact(self) -> bool:
        """It is this process's own."""
        return True


def _check_within(what: str, numbers: array[int], count: int) -> None:
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        raise ValueError(f"{what} from {min(numbers)} to {max(numbers)}, of {count}")
