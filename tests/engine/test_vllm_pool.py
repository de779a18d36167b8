"""vLLM's pool by block id: running steps' blocks hold nothing, and a record counts while the block holds it."""

import pytest
from engine.vllm_toy import FULL, UNIT, WINDOW, Pool, key

from kvevents_service.engine.lazy import BlockRecord
from kvevents_service.engine.spans import RequestView, Spans
from kvevents_service.engine.vllm_pool import EnginePool

NAMES = [bytes([number]) * 32 for number in range(4)]
VIEW = RequestView("r", NAMES, range(16))


class Ours:
    """Blocks 1 to 4 hold the four blocks of a request, and are free."""

    def __init__(self) -> None:
        self.pool = Pool(8)
        self.written: set[int] = set()
        self.engine = EnginePool(self.pool, self.written, key, [Spans(FULL, UNIT), Spans(WINDOW, UNIT)])
        blocks = [self.pool.allocate() for _ in NAMES]
        for block, name in zip(blocks, NAMES, strict=True):
            self.pool.name(block, key(name, 0))
        self.pool.free_blocks(blocks)
        self.engine.record([block.block_id for block in blocks], BlockRecord(VIEW, 0, 0))

    def queue(self, cursor: int | None = None) -> list[tuple[int, bytes | None]]:
        return list(self.engine.eviction_order.after(cursor))


@pytest.fixture
def ours() -> Ours:
    return Ours()


def test_references_go_up_and_down(ours: Ours) -> None:
    ours.engine.touch([1, 2, 2])
    assert [block.ref_cnt for block in ours.pool.blocks[:4]] == [0, 1, 2, 0]
    ours.engine.free([2, 1, 2])
    assert [block_id for block_id, _ in ours.queue()][-2:] == [1, 2]


def test_a_block_is_found_by_group_and_hash(ours: Ours) -> None:
    assert ours.engine.find(0, NAMES[2]) == 3
    assert ours.engine.find(1, NAMES[2]) is None


def test_a_block_that_a_running_step_writes_is_not_found(ours: Ours) -> None:
    ours.written.add(3)
    assert ours.engine.find(0, NAMES[2]) is None


def test_free_blocks_come_in_the_order_of_reuse(ours: Ours) -> None:
    assert ours.queue() == [(5, None), (6, None), (7, None)] + [(at + 1, key(NAMES[at], 0)) for at in range(4)]
    assert ours.queue(2) == [(3, key(NAMES[2], 0)), (4, key(NAMES[3], 0))]


def test_a_cursor_that_is_in_use_again_starts_over(ours: Ours) -> None:
    ours.engine.touch([2])
    assert ours.queue(2)[0] == (5, None)


def test_what_a_running_step_writes_has_no_name(ours: Ours) -> None:
    ours.written.add(2)
    assert dict(ours.queue())[2] is None


def test_a_block_is_described_while_it_holds_what_was_recorded(ours: Ours) -> None:
    describe = ours.engine.eviction_order.describe
    assert describe(3) == BlockRecord(VIEW, 0, 2)
    ours.pool.blocks[3].block_hash = key(NAMES[0], 0)
    assert describe(3) is None
    assert describe(7) is None
    ours.engine.forget()
    assert describe(2) is None


def test_null_blocks_have_no_record(ours: Ours) -> None:
    ours.engine.record([None, 6], BlockRecord(VIEW, 1, 0))
    ours.pool.name(ours.pool.blocks[6], key(NAMES[1], 1))
    assert ours.engine.eviction_order.describe(6) == BlockRecord(VIEW, 1, 1)
    assert len(ours.engine) == 8
