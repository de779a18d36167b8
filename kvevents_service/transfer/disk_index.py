"""The index of a kept disk tier: a file beside the blocks that says what each slot holds.

    index = header (64 KiB) | one entry a slot

The header names the layout and a random generation; entries of another generation are void, so a reset is one
write. Entries are written by one thread, behind the copies and through the page cache: what a crash of this process
has not let it write, or a crash of the machine has torn, is a block that is not found again. An entry that is older
than its slot's bytes does not match them: that is found out when the block is loaded.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from kvevents_service.core.column import column, count_set
from kvevents_service.core.metadata import StoreRun
from kvevents_service.errors import ConfigError
from kvevents_service.transfer.copy import consecutive_runs
from kvevents_service.transfer.disk_chains import recover
from kvevents_service.transfer.disk_file import DiskFile
from kvevents_service.transfer.disk_io import DiskFaults, read_all, write_all
from kvevents_service.transfer.disk_layout import KeptLayout
from kvevents_service.transfer.disk_record import Entry, Name, Record, entry_bytes, name_of, pack, unpack

MAGIC = b"KVEVIDX\n"
HEADER_BYTES = 64 * 1024
_HEAD = struct.Struct("<8sQI")
SCAN_BYTES = 1024 * 1024
MAX_QUEUED_BLOCKS = 65536
"""What may wait to be written. A block beyond that is not found again after a restart; it is served until then."""
COUNTERS = ("disk_blocks_recovered", "disk_blocks_not_kept", "disk_layouts_void")


class Sums(Protocol):
    """An arena: each slot's checksum."""

    sums: memoryview[int]


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What all entries have in common."""

    generation: int
    entry_bytes: int
    layout: KeptLayout


class Kept(NamedTuple):
    """What an index had when it was opened, as far as its file goes. sums: of each rank, by slot; found: 1 for each
    slot of a run."""

    header: Header
    runs: list[StoreRun]
    sums: list[memoryview[int]]
    found: bytearray
    stamp: int


class DiskIndex:
    """Reads at once what is there, if it is `usable`. Keeps nothing before `recover` has said with which layout."""

    def __init__(self, file: DiskFile, medium: str, faults: DiskFaults, *, usable: bool) -> None:
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._file = file
        self._faults = faults
        self._header: Header | None = None
        self._arenas: Sequence[Sums] = ()
        self._written = bytearray()
        self._stamp = self._queued = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvevents-disk-index")
        self._kept = read_index(file.fd, medium) if usable else None

    def __repr__(self) -> str:
        return f"<DiskIndex {'open' if self._header else 'closed'} queued={self._queued}>"

    def stats(self) -> dict[str, int]:
        """`disk_index`: 1 while blocks are kept for the next start."""
        with self._lock:
            return {**self._counters, "disk_index": int(self._header is not None)}

    def recover(self, layout: KeptLayout, arenas: Sequence[Sums]) -> list[StoreRun]:
        """Keep blocks of this layout from now on. Returns those that are kept already, parents before children.

        Their bytes have not been looked at: a load does. With another layout what was kept is void.
        """
        kept, self._kept = self._kept, None
        self._settle()
        self._arenas, self._written = arenas, bytearray(layout.cut[0])
        if kept is None or kept.header.layout != layout:
            self._count("disk_layouts_void", kept is not None)
            self._begin(layout)
            return []
        self._header, self._stamp = kept.header, kept.stamp
        self._written[: len(kept.found)] = kept.found
        for arena, sums in zip(arenas, kept.sums, strict=True):
            arena.sums[: len(sums)] = sums
        self._count("disk_blocks_recovered", count_set(kept.found))
        return kept.runs

    def kept_slots(self) -> bytes:
        """1 for each slot whose block was written down."""
        return bytes(self._written)

    def keep(self, runs: Iterable[StoreRun]) -> None:
        """These blocks were announced: write down, soon, that they are there. Call it before anything else can
        take their slots. A tail, which is not full, is not kept."""
        header = self._header
        for run in runs:
            if header is not None and not run.meta.inner and self._queue(len(run.slots)):
                sums = list(zip(*([arena.sums[slot] for slot in run.slots] for arena in self._arenas), strict=True))
                self._writer.submit(self._write, header, self._stamp, run, sums)
                self._stamp += len(run.slots)
                for slot in run.slots:
                    self._written[slot] = True

    def forget(self, slots: array[int]) -> None:
        """The bytes of these slots are gone, or about to be: they are not to be found again. From any thread."""
        header, written = self._header, self._written
        if header is None:
            return
        named = array("i", (slot for slot in slots if written[slot]))
        for slot in named:
            written[slot] = False
        if named:
            self._writer.submit(self._erase, header, named)

    def void(self) -> None:
        """Forget every block, before this returns and for good: the file is synced, which may take some ms.

        OSError if the file can neither be written nor emptied.
        """
        header, self._kept = self._header, None
        if header is None:
            self._give_up()
        else:
            self._write_header(header.layout)

    def close(self) -> None:
        """Write what is queued."""
        self._writer.shutdown(wait=True)
        self._header = None

    def _settle(self) -> None:
        """Wait for what is queued."""
        self._writer.submit(int).result()

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self._counters[name] += count

    def _queue(self, blocks: int) -> bool:
        """Take room for so many blocks; negative ones have been written. False if there is none."""
        with self._lock:
            fits = self._queued + blocks <= MAX_QUEUED_BLOCKS
            self._queued += blocks if fits else 0
            self._counters["disk_blocks_not_kept"] += 0 if fits else blocks
            return fits

    def _begin(self, layout: KeptLayout) -> None:
        """An empty index, or none where it finds no room."""
        self._give_up()
        try:
            self._file.take(HEADER_BYTES + layout.cut[0] * entry_bytes(layout))
        except ConfigError:
            self._faults.count("enospc")
            return
        self._write_header(layout)

    def _write_header(self, layout: KeptLayout) -> None:
        header = Header(int.from_bytes(os.urandom(8), "little"), entry_bytes(layout), layout)
        body = msgspec.msgpack.encode(header)
        try:
            if _HEAD.size + len(body) > HEADER_BYTES:
                raise OSError("the layout does not fit into a header")
            packed = _HEAD.pack(MAGIC, xxh3_64_intdigest(body), len(body)) + body
            write_all(self._file.fd, memoryview(packed), 0)
            os.fdatasync(self._file.fd)
        except OSError as error:
            self._faults.count_error(error)
            self._give_up()
        else:
            self._header = header

    def _give_up(self) -> None:
        """Leave nothing that a later start could take for true."""
        self._header = None
        os.ftruncate(self._file.fd, 0)

    # in the writer's thread

    def _write(self, header: Header, stamp: int, run: StoreRun, sums: list[tuple[int, ...]]) -> None:
        inner: dict[int, list[Name]] = {}
        for place, meta in run.inner_places():
            inner.setdefault(place, []).append(name_of(meta))
        packed = []
        for position, slot in enumerate(run.slots):
            name = name_of(run.meta.part(position, position + 1))
            record = Record(run.meta.group.index, name, sums[position], inner.get(position, []))
            packed.append(pack(slot, header.generation, Entry(stamp + position, record), header.entry_bytes))
        self._put(header, array("i", run.slots), packed)
        self._count("disk_blocks_not_kept", packed.count(None))
        self._queue(-len(run.slots))

    def _erase(self, header: Header, slots: array[int]) -> None:
        self._put(header, slots, [None] * len(slots))

    def _put(self, header: Header, slots: array[int], packed: list[bytes | None]) -> None:
        """Consecutive slots in one write. None: what was there goes, and nothing comes."""
        nothing = bytes(header.entry_bytes)
        for first, slot, count in consecutive_runs(array("i", range(len(slots))), slots):
            data = b"".join(entry or nothing for entry in packed[first : first + count])
            try:
                write_all(self._file.fd, memoryview(data), HEADER_BYTES + slot * header.entry_bytes)
            except OSError as error:
                self._faults.count_error(error)


def read_index(fd: int, medium: str) -> Kept | None:
    """Everything in an index that can be used, or None if there is no index."""
    header = _read_header(fd)
    if header is None:
        return None
    slots, ranks = _slots(fd, header), len(header.layout.sizes)
    entries = list(_scan(fd, header, slots))
    runs = recover(header.layout, medium, entries)
    found, sums = bytearray(slots), [column("Q", slots) for _ in range(ranks)]
    for slot in (slot for run in runs for slot in run.slots):
        found[slot] = True
    for slot, entry in entries:
        if found[slot]:
            for of_rank, value in zip(sums, entry.record.sums, strict=True):
                of_rank[slot] = value
    return Kept(header, runs, sums, found, max((entry.stamp + 1 for _, entry in entries), default=0))


def _read_header(fd: int) -> Header | None:
    packed = os.pread(fd, HEADER_BYTES, 0)
    if len(packed) < HEADER_BYTES:
        return None
    magic, checksum, length = _HEAD.unpack_from(packed)
    body = packed[_HEAD.size : _HEAD.size + length]
    if magic != MAGIC or checksum != xxh3_64_intdigest(body):
        return None
    try:
        header = msgspec.msgpack.decode(body, type=Header)
        fits = 0 < header.entry_bytes == entry_bytes(header.layout)
    except (msgspec.MsgspecError, ArithmeticError, ValueError):  # a layout that no engine can have
        return None
    return header if fits and header.layout.cut else None


def _slots(fd: int, header: Header) -> int:
    """Those of the header, as far as the file goes."""
    there = (os.fstat(fd).st_size - HEADER_BYTES) // header.entry_bytes
    return max(0, min(there, header.layout.cut[0]))


def _scan(fd: int, header: Header, slots: int) -> Iterator[tuple[int, Entry]]:
    """Slots and their entries."""
    size = header.entry_bytes
    many = max(1, SCAN_BYTES // size)
    chunk = memoryview(bytearray(many * size))
    for first in range(0, slots, many):
        part = chunk[: min(many, slots - first) * size]
        try:
            read_all(fd, part, HEADER_BYTES + first * size)
        except OSError:  # the rest of it is lost
            return
        for place in range(len(part) // size):
            entry = unpack(first + place, header.generation, part[place * size : (place + 1) * size])
            if entry is not None:
                yield first + place, entry
