"""Host arenas: what they refuse, and an arena standing where an engine's memory stands."""

import random
from array import array
from pathlib import Path

import pytest
import torch

from kvevents_service.errors import ConfigError
from kvevents_service.transfer import arena as arenas
from kvevents_service.transfer.arena import HostArena, HostStorage
from kvevents_service.transfer.crew import default_threads

SLOTS = 12


def filled(block_bytes: int, seed: int) -> HostArena:
    arena = HostArena(SLOTS, block_bytes)
    arena.bytes_of(0, SLOTS)[:] = random.Random(seed).randbytes(SLOTS * block_bytes)
    return arena


def test_an_arena_no_machine_can_map_names_its_setting() -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        HostArena(1 << 20, 1 << 42)


@pytest.mark.parametrize(("block_bytes", "dtype"), [(64, torch.int64), (60, torch.uint8)])
def test_an_arena_is_memory_of_one_region(block_bytes: int, dtype: torch.dtype) -> None:
    memory = HostArena(SLOTS, block_bytes).as_memory()
    assert (memory.blocks, memory.block_sizes, memory.block_bytes) == (SLOTS, (block_bytes,), block_bytes)
    assert (memory.dtype, memory.views[0].dtype, memory.intact()) == (dtype, dtype, True)


@pytest.mark.parametrize("block_bytes", [64, 60])
def test_what_is_stored_from_an_arena_comes_back_into_one(block_bytes: int) -> None:
    above, below, back = filled(block_bytes, 1), HostArena(SLOTS, block_bytes), HostArena(SLOTS, block_bytes)
    before = [bytes(above.bytes_of(slot, 1)) for slot in range(SLOTS)]
    order, straight = random.Random(2).sample(range(SLOTS), SLOTS), array("i", range(SLOTS))
    below.store(above.as_memory(), array("i", order), straight)
    below.load(back.as_memory(), straight, straight)
    assert [bytes(back.bytes_of(slot, 1)) for slot in range(SLOTS)] == [before[slot] for slot in order]


def free_huge_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)


def test_huge_pages_that_were_not_set_aside_name_their_setting() -> None:
    if free_huge_pages() > 1:
        pytest.skip("this machine has huge pages")
    with pytest.raises(ConfigError, match=r"host_hugetlb.* 2 free pages"):
        HostStorage(1, hugetlb=True).arenas(3, [1 << 20])


def test_an_arena_of_more_than_its_slots_shows_only_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "MAP_HUGETLB", 0)
    (arena,) = HostStorage(1, hugetlb=True).arenas(3, [64])
    assert (arena.view(torch.int64).shape, arena.as_memory().blocks) == ((3, 8), 3)


def test_a_storage_copies_with_the_threads_it_is_told() -> None:
    storage = HostStorage(3)
    assert [crew.threads for crew in storage._crews] == [3, 3]
    assert HostStorage()._crews.load.threads == default_threads()
    storage.close()
