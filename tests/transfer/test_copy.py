"""Blocks go over whole and to their place, whatever the layout, in runs and one by one."""

import random
from array import array

import pytest
import torch

from kvevents_service.engine.layout import SharedMemory
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.copy import CopyRun, consecutive_runs, load_blocks, store_blocks
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.wire.control import Memory, Region

BLOCKS, SLOTS = 32, 48


def engine_memory(sizes: list[int], gap: int) -> EngineMemory:
    """Regions of the given block sizes, `gap` bytes between blocks, filled with random bytes."""
    regions, offset = [], 0
    for number, size in enumerate(sizes):
        regions.append(Region(f"l{number}", 0, offset, size, size + gap, BLOCKS))
        offset += BLOCKS * (size + gap)
    shared = SharedMemory.create(offset)
    shared.map[:] = random.Random(5).randbytes(offset)
    return attach([Memory(offset)], regions, [shared.fd])


def block_bytes(memory: EngineMemory, block: int) -> bytes:
    return b"".join(view[block].contiguous().view(torch.uint8).numpy().tobytes() for view in memory.views)


def slot_bytes(arena: HostArena, slot: int) -> bytes:
    return arena.view(torch.uint8)[slot].numpy().tobytes()


def pairs(count: int, scattered: bool) -> tuple[array, array]:
    if not scattered:
        return array("i", range(3, 3 + count)), array("i", range(7, 7 + count))
    rng = random.Random(3)
    return array("i", rng.sample(range(BLOCKS), count)), array("i", rng.sample(range(SLOTS), count))


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize(("sizes", "gap"), [([64, 64], 0), ([64], 64), ([24, 104], 8), ([5, 3], 0), ([1], 2)])
def test_every_byte_arrives_and_nothing_else_changes(sizes: list[int], gap: int, scattered: bool) -> None:
    memory = engine_memory(sizes, gap)
    arena = HostArena(SLOTS, memory.block_bytes)
    blocks, slots = pairs(20, scattered)
    before = {block: block_bytes(memory, block) for block in range(BLOCKS)}
    store_blocks(memory, arena, blocks, slots)
    assert all(slot_bytes(arena, slot) == before[block] for block, slot in zip(blocks, slots, strict=True))
    assert all(slot_bytes(arena, slot) == bytes(memory.block_bytes) for slot in set(range(SLOTS)) - set(slots))
    back = array("i", [(block + 11) % BLOCKS for block in blocks])
    load_blocks(memory, arena, back, slots)
    assert all(block_bytes(memory, to) == before[block] for block, to in zip(blocks, back, strict=True))
    assert all(block_bytes(memory, block) == before[block] for block in set(range(BLOCKS)) - set(back))


def test_runs_are_consecutive_on_both_sides() -> None:
    blocks, slots = array("i", [4, 5, 6, 9, 10, 2]), array("i", [0, 1, 2, 3, 7, 8])
    assert list(consecutive_runs(blocks, slots)) == [
        CopyRun(4, 0, 3),
        CopyRun(9, 3, 1),
        CopyRun(10, 7, 1),
        CopyRun(2, 8, 1),
    ]


def test_nothing_to_copy_is_no_run() -> None:
    assert list(consecutive_runs(array("i"), array("i"))) == []
