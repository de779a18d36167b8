"""Blocks go to the disk from where they are if it can take them so."""

import pytest
from disk_engine import PADDED, SECTORS, Engine, ints

from kvevents_service.transfer.disk_window import Ring, in_place


def test_blocks_that_lie_one_behind_the_other_are_given_in_one_piece() -> None:
    engine = Engine(SECTORS, 8, layers=1)
    window = in_place(engine.memory.views, SECTORS)
    assert window is not None
    assert window.block(3) == engine[3]
    assert window.run(2, 3) == engine[2] + engine[3] + engine[4]
    window.run(6, 1)[:4] = b"back"
    assert engine[6][:4] == b"back"


@pytest.mark.parametrize("number", [-1, 8, 1 << 30])
def test_a_block_that_is_not_there_is_an_error(number: int) -> None:
    window = in_place(Engine(SECTORS, 8, layers=1).memory.views, SECTORS)
    assert window is not None
    window.check(ints())
    window.check(ints(0, 7))
    with pytest.raises(IndexError):
        window.check(ints(1, number, 2))


def test_what_a_disk_cannot_take_is_staged() -> None:
    views = Engine(SECTORS, 8, layers=1).memory.views
    assert in_place(views, SECTORS) is not None
    assert in_place([], SECTORS) is None  # a GPU's
    assert in_place([views[0].to("meta")], SECTORS) is None
    assert in_place(Engine(SECTORS, 8).memory.views, SECTORS) is None  # several regions
    assert in_place(views, SECTORS + 4096) is None  # slots with padding
    assert in_place([views[0][::2]], SECTORS) is None  # something between the blocks
    assert in_place(Engine(PADDED, 8, layers=1).memory.views, PADDED) is None  # not whole sectors
    shifted = views[0].reshape(-1)[8 : 8 + 7 * views[0].shape[1]].view(7, -1)
    assert in_place([shifted], SECTORS) is None  # not at a sector


def test_a_place_of_the_ring_is_given_without_its_padding() -> None:
    memory = memoryview(bytes(range(40)))
    ring = Ring(lambda place, count: memory[place * 10 : (place + count) * 10], 7)
    assert ring.run(1, 2) == bytes(range(10, 30))
    assert ring.block(2) == bytes(range(20, 27))
