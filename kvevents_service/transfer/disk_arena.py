"""One rank's slots in the file of the disk tier: batched, several reads or writes at once, every load verified.

A copy is cut into parts. While some parts are written, the next one is filled from the engine's memory; while some
are read, one that has come goes to the engine. The parts lie in a ring of staging memory, one ring a direction.
Checksums stay in memory, where a disk cannot lose them; a part that has nothing but bad slots costs no other one.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from typing import NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from kvevents_service.core.column import column
from kvevents_service.transfer.arena import BlocksLost, HostArena
from kvevents_service.transfer.copy import CopyRun, consecutive_runs
from kvevents_service.transfer.disk_io import GONE, SECTOR_BYTES, DiskFaults, read_all, write_all
from kvevents_service.transfer.disk_window import InPlace, Ring, Window, in_place
from kvevents_service.transfer.memory import BlockMemory

PART_BYTES = 4 * 1024 * 1024
"""What one thread reads or writes at a time, or one block if that is more."""
STAGING_BYTES = 32 * 1024 * 1024
"""What a ring holds, or two parts if that is more."""
DIRECT_PADDING = 8
"""Direct I/O may cost one part in so many of a block's bytes. Smaller blocks go through the page cache."""
NOTHING = 0
"""The checksum of a slot that holds no whole block."""


class Device(NamedTuple):
    """What every arena of a storage shares."""

    fd: int
    direct_fd: int | None
    readers: Executor
    writers: Executor
    faults: DiskFaults
    forget: Callable[[array[int]], None]


Rest = Callable[[], None] | None
"""Waits for a copy that was begun; None where it has ended."""


class Staging(Protocol):
    """Host memory as slots. A device may copy by itself: what waits for it comes back."""

    slots: int

    def store(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest: ...

    def load(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Rest: ...

    def bytes_of(self, slot: int, count: int) -> memoryview: ...


class Part(NamedTuple):
    """Blocks that go together, their places in the window, and runs of places and slots."""

    blocks: array[int]
    places: array[int]
    runs: list[CopyRun]


Bad = list[tuple[int, str]]
"""Slots whose bytes are gone, and what kind of fault said so."""


def stride_of(block_bytes: int, *, direct: bool) -> int:
    """Bytes from one slot to the next: whole sectors where that costs little and helps."""
    padded = -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES
    return padded if direct and (padded - block_bytes) * DIRECT_PADDING <= block_bytes else block_bytes


class DiskArena:
    """`slots` slots from byte `start` on. `sums[slot]` is the checksum of what was stored, or NOTHING."""

    def __init__(self, device: Device, start: int, block_bytes: int, slots: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self.stride = stride_of(block_bytes, direct=device.direct_fd is not None)
        self.direct = device.direct_fd is not None and not (self.stride | start) % SECTOR_BYTES
        self.sums = column("Q", slots)
        self._device = device
        self._start = start
        self._fd = device.direct_fd if self.direct and device.direct_fd is not None else device.fd
        self._unit = SECTOR_BYTES if self.direct else 1
        self._part_blocks = max(1, min(slots, PART_BYTES // self.stride))
        part_bytes = self._part_blocks * self.stride
        self._parts = max(2, min(STAGING_BYTES // part_bytes, -(-slots // self._part_blocks)))
        ring = self._part_blocks * self._parts
        self._outgoing: Staging = HostArena(ring, self.stride)
        self._incoming: Staging = HostArena(ring, self.stride)

    def __repr__(self) -> str:
        way = "direct" if self.direct else "page cache"
        return f"<DiskArena {self.slots} slots of {self.block_bytes} bytes, {way}>"

    def store(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> None:
        """Engine blocks -> slots. OSError if one write failed; until all is well the slots hold nothing."""
        for slot in slots:
            self.sums[slot] = NOTHING
        self._device.forget(slots)

        window = self._in_place(memory, blocks)

        def begin(part: Part) -> Future[None]:
            if window is not None:
                return self._device.writers.submit(self._write, window, part, None)
            rest = self._outgoing.store(memory, part.blocks, part.places)
            return self._device.writers.submit(self._write, self._ring(self._outgoing), part, rest)

        with closing(overlapped(self._cut(blocks, slots, window), self._parts, begin)) as written:
            deque(written, maxlen=0)

    def load(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> None:
        """Slots -> engine blocks. BlocksLost, at the end, names every slot whose bytes are not what was stored."""

        window = self._in_place(memory, blocks)

        def begin(part: Part) -> Future[Bad]:
            return self._device.readers.submit(self._read, window or self._ring(self._incoming), part)

        bad: Bad = []
        with closing(overlapped(self._cut(blocks, slots, window), self._parts, begin)) as came:
            for part, lost in came:
                bad += lost
                if window is None and not bad:
                    _await(self._incoming.load(memory, part.blocks, part.places))
        if bad:
            self._lose(bad)

    def _lose(self, bad: Bad) -> None:
        slots = array("i", sorted({slot for slot, _ in bad}))
        for slot in slots:
            self.sums[slot] = NOTHING
        self._device.forget(slots)
        kinds = Counter(kind for _, kind in bad)
        raise BlocksLost(slots, ", ".join(f"{count} {kind}" for kind, count in kinds.items()))

    def _in_place(self, memory: BlockMemory, blocks: array[int]) -> InPlace | None:
        window = in_place(memory.views, self.stride)
        if window is not None:
            window.check(blocks)
        return window

    def _ring(self, staging: Staging) -> Window:
        return Ring(staging.bytes_of, self.block_bytes)

    def _cut(self, blocks: array[int], slots: array[int], window: Window | None) -> Iterator[Part]:
        room = self._part_blocks
        for number, start in enumerate(range(0, len(blocks), room)):
            some = blocks[start : start + room]
            first = number % self._parts * room
            places = array("i", range(first, first + len(some))) if window is None else some
            yield Part(some, places, list(consecutive_runs(places, slots[start : start + room])))

    # in the threads of the storage

    def _write(self, window: Window, part: Part, rest: Rest) -> None:
        _await(rest)
        for place, slot, count in part.runs:
            sums = array("Q", (checksum(window.block(place + row)) for row in range(count)))
            try:
                write_all(self._fd, window.run(place, count), self._offset(slot), self._unit)
            except OSError as error:
                self._device.faults.count_error(error)
                raise
            self.sums[slot : slot + count] = sums

    def _read(self, window: Window, part: Part) -> Bad:
        bad: Bad = []
        for run in part.runs:
            bad += self._read_run(window, run)
        return bad

    def _read_run(self, window: Window, run: CopyRun) -> Bad:
        """Where a run of slots cannot be read, each of them is tried: the good ones among them are not lost."""
        place, slot, count = run
        try:
            read_all(self._fd, window.run(place, count), self._offset(slot), self._unit)
        except OSError as error:
            if count > 1:
                ones = (CopyRun(place + row, slot + row, 1) for row in range(count))
                return [bad for one in ones for bad in self._read_run(window, one)]
            self._device.faults.count_error(error)
            if error.errno not in GONE:
                raise
            return [(slot, error.strerror or "error")]
        return [bad for row in range(count) for bad in self._verify(window.block(place + row), slot + row)]

    def _verify(self, block: memoryview, slot: int) -> Bad:
        expected = self.sums[slot]
        if expected == NOTHING:
            return [(slot, "never stored whole")]
        if checksum(block) == expected:
            return []
        self._device.faults.count("checksum")
        return [(slot, "checksum does not match")]

    def _offset(self, slot: int) -> int:
        return self._start + slot * self.stride


def checksum(block: memoryview) -> int:
    """XXH3, 64 bits; never NOTHING."""
    return xxh3_64_intdigest(block) or 1


def _await(rest: Rest) -> None:
    if rest is not None:
        rest()


T = TypeVar("T")


def overlapped(
    parts: Iterator[Part], depth: int, begin: Callable[[Part], Future[T]]
) -> Generator[tuple[Part, T], None, None]:
    """Begin parts and yield them in their order as they end, at most `depth` of them begun and not yet yielded.

    However it ends, closed by its reader or with a part's exception, no part is under way any more.
    """
    running: deque[tuple[Part, Future[T]]] = deque()
    try:
        for part in parts:
            if len(running) == depth:
                done, future = running.popleft()
                yield done, future.result()
            running.append((part, begin(part)))
        while running:
            done, future = running.popleft()
            yield done, future.result()
    finally:
        wait([future for _, future in running])
