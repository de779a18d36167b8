"""Memory made present ahead: real pages, as the kernel counts them."""

import gc
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from kvevents_service.transfer import prefault
from kvevents_service.transfer.arena import HostArena, HostStorage
from kvevents_service.transfer.prefault import PIECE_BYTES, Prefault, Span

WAIT_S = 60.0
SLOTS, BLOCK_BYTES = 40, 1 << 18


def resident_bytes(arena: HostArena) -> int:
    """Of its pages, as /proc tells."""
    address, size, _ = arena.span
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, _, stop = first.partition("-")
            inside = int(start, 16) < address + size and address < int(stop, 16)
        elif inside and first == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def test_every_page_is_there_and_no_byte_has_changed() -> None:
    arena = HostArena(SLOTS, BLOCK_BYTES)
    arena.view(torch.uint8)[7] = 99
    before = resident_bytes(arena)
    assert before < SLOTS * BLOCK_BYTES
    work = Prefault([arena.span])
    assert work.join(WAIT_S)
    assert work.present_bytes == SLOTS * BLOCK_BYTES <= resident_bytes(arena)
    assert bool((arena.view(torch.uint8)[7] == 99).all())
    assert not arena.view(torch.uint8)[8:].any()


def test_a_storage_does_it_for_its_newest_arenas_where_it_is_asked_to() -> None:
    lazy, eager = HostStorage(1), HostStorage(1, prefault=True)
    try:
        (arena,) = lazy.arenas(SLOTS, [BLOCK_BYTES])
        assert resident_bytes(arena) < SLOTS * BLOCK_BYTES
        eager.arenas(SLOTS, [BLOCK_BYTES])
        first, second = eager.arenas(3, [BLOCK_BYTES, 4096])
        assert eager._prefault.join(WAIT_S)
        assert eager.stats() == {"host_present_bytes": 3 * (BLOCK_BYTES + 4096)}
        assert resident_bytes(first) >= 3 * BLOCK_BYTES
        assert second.slots == 3
    finally:
        lazy.close()
        eager.close()


def test_a_stop_comes_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, calls = threading.Event(), threading.Event(), []

    class Kernel:
        @staticmethod
        def madvise(address: int, size: int, advice: int) -> int:
            calls.append((address, size, advice))
            began.set()
            assert go_on.wait(WAIT_S)
            return 0

    monkeypatch.setattr(prefault.ctypes, "CDLL", lambda _: Kernel)
    Kernel.madvise.argtypes = ()  # type: ignore[attr-defined]
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    work = Prefault([Span(1 << 30, 3 * PIECE_BYTES + 5, memory)])
    assert began.wait(WAIT_S)
    work.stop()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is not None, "the kernel is at work on it"
    go_on.set()
    assert work.join(WAIT_S)
    assert calls == [(1 << 30, PIECE_BYTES, prefault.MADV_POPULATE_WRITE)]
    assert "over" in repr(work)


def test_a_kernel_that_cannot_is_left_alone() -> None:
    work = Prefault([Span(1, PIECE_BYTES, None)])  # no page begins there: EINVAL, as of an unknown advice
    assert work.join(WAIT_S)
    assert work.present_bytes == 0
