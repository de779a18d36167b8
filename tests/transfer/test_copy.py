"""Blocks go over whole and to their place, whatever the layout, in every way that they can be copied."""

import random
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.engine.layout import SharedMemory
from kvevents_service.transfer import arena as arenas
from kvevents_service.transfer import copy
from kvevents_service.transfer.arena import Crews, HostArena
from kvevents_service.transfer.copy import CopyRun, Moves, consecutive_runs
from kvevents_service.transfer.crew import Crew
from kvevents_service.transfer.memory import EngineMemory, attach
from kvevents_service.wire.control import Memory, Region

BLOCKS, SLOTS = 32, 48
GATHER, RUNS, ROWS = "_gather", "_copy_runs", "_copy_rows"
LAYOUTS = [([64, 64], 0), ([64], 64), ([24, 104], 8), ([5, 3], 0), ([1], 2), ([16] * 5, 0), ([8, 8, 16, 16, 16], 8)]


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


def numbered(values: list[int]) -> array:
    return array("i", values)


def check_round_trip(memory: EngineMemory, arena: HostArena, blocks: list[int], slots: list[int]) -> None:
    """Store and load at other blocks: every byte arrives, and nothing else changes."""
    before = [block_bytes(memory, block) for block in range(BLOCKS)]
    arena.store(memory, numbered(blocks), numbered(slots))
    kept = {slot: before[block] for block, slot in zip(blocks, slots, strict=True)}
    for slot in range(SLOTS):
        assert bytes(arena.bytes_of(slot, 1)) == kept.get(slot, bytes(memory.block_bytes))
    back = [(block + 11) % BLOCKS for block in blocks]
    arena.load(memory, numbered(back), numbered(slots))
    arrived = {to: before[block] for block, to in zip(blocks, back, strict=True)}
    for block in range(BLOCKS):
        assert block_bytes(memory, block) == arrived.get(block, before[block])


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize("way", [GATHER, RUNS, ROWS])
@pytest.mark.parametrize(("sizes", "gap"), LAYOUTS)
def test_every_way_of_copying_is_a_copy(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], gap: int, way: str, scattered: bool
) -> None:
    monkeypatch.setattr(copy, "_copy", getattr(copy, way))
    monkeypatch.setattr(copy, "VIEWS_A_CALL", 3)
    memory, rng = engine_memory(sizes, gap), random.Random(3)
    blocks = rng.sample(range(BLOCKS), 20) if scattered else list(range(3, 23))
    slots = rng.sample(range(SLOTS), 20) if scattered else list(range(7, 27))
    check_round_trip(memory, HostArena(SLOTS, memory.block_bytes), blocks, slots)


@given(
    layout=st.sampled_from(LAYOUTS),
    pairs=st.integers(0, BLOCKS).flatmap(
        lambda count: st.tuples(
            st.permutations(range(BLOCKS)).map(lambda order: order[:count]),
            st.permutations(range(SLOTS)).map(lambda order: order[:count]),
        )
    ),
    large_bytes=st.sampled_from([1, 100, 1 << 20]),
    threads=st.integers(1, 3),
)
def test_any_copy_is_a_copy(
    layout: tuple[list[int], int], pairs: tuple[list[int], list[int]], large_bytes: int, threads: int
) -> None:
    memory, crews = engine_memory(*layout), Crews(Crew(threads), Crew(threads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "LARGE_BYTES", large_bytes)
        patch.setattr(arenas, "MIN_PART_BYTES", 64)
        check_round_trip(memory, HostArena(SLOTS, memory.block_bytes, crews), *pairs)
    for crew in crews:
        crew.close()
    memory.close()


@pytest.mark.parametrize(
    ("sizes", "large_bytes", "slots", "way"),
    [
        ([64], 1 << 20, range(20), GATHER),
        ([64] * 5, 1 << 20, range(20), GATHER),
        ([64], 1 << 20, range(0, 40, 2), ROWS),
        ([64] * 2, 1 << 20, range(0, 40, 2), ROWS),
        ([64] * 5, 1 << 20, range(0, 40, 2), RUNS),
        ([64], 64, range(20), RUNS),
        ([64], 64, range(0, 40, 2), RUNS),
    ],
)
def test_the_way_is_chosen_by_size_and_order(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], large_bytes: int, slots: range, way: str
) -> None:
    chosen = []
    monkeypatch.setattr(copy, "LARGE_BYTES", large_bytes)
    for name in (GATHER, RUNS, ROWS):
        monkeypatch.setattr(copy, name, lambda *_, name=name: chosen.append(name))
    memory = engine_memory(sizes, 0)
    HostArena(SLOTS, memory.block_bytes).store(memory, numbered([*range(0, 32, 2), 1, 3, 5, 7]), numbered([*slots]))
    assert chosen == [way]


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(
    ("blocks", "slots", "said"),
    [
        ([0, BLOCKS], [0, 1], "blocks"),
        ([-1], [0], "blocks"),
        ([0], [SLOTS], "slots"),
        ([0], [-1], "slots"),
        ([0, 1], [0], "2 blocks"),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused(
    verb: str, blocks: list[int], slots: list[int], said: str
) -> None:
    memory = engine_memory([64], 0)
    arena = HostArena(SLOTS, 64)
    with pytest.raises(ValueError, match=said):
        getattr(arena, verb)(memory, numbered(blocks), numbered(slots))


def test_parts_are_all_of_it_in_order() -> None:
    moves = Moves.of(numbered([9, 3, 4, 7, 1]), numbered([0, 1, 2, 3, 4]))
    parts = moves.parts(2)
    assert [(list(part.targets), list(part.sources)) for part in parts] == [
        ([1, 3, 4], [4, 1, 2]),
        ([7, 9], [3, 0]),
    ]
    assert Moves.of(numbered([]), numbered([])).parts(1) == []


def test_runs_are_consecutive_on_both_sides() -> None:
    blocks, slots = numbered([4, 5, 6, 9, 10, 2]), numbered([0, 1, 2, 3, 7, 8])
    assert list(consecutive_runs(blocks, slots)) == [
        CopyRun(4, 0, 3),
        CopyRun(9, 3, 1),
        CopyRun(10, 7, 1),
        CopyRun(2, 8, 1),
    ]


def test_nothing_to_copy_is_no_run() -> None:
    assert list(consecutive_runs(numbered([]), numbered([]))) == []
