"""Host arenas: what they refuse, and an arena standing where an engine's memory stands."""

import random
from array import array

import pytest
import torch

from kvevents_service.errors import ConfigError
from kvevents_service.transfer.arena import HostArena

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
