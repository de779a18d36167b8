"""The lazy planner: cached blocks are offered before they are reused, with all that is to be said of them."""

import pytest
from engine.toy import FULL, HYBRID, SCRATCH, WINDOW, Toy

from kvevents_service.engine import lazy
from kvevents_service.engine.identity import Identity, MediaItem
from kvevents_service.engine.lazy import lazy_target
from kvevents_service.wire.control import GroupSpec, StepDone


def cached(toy: Toy, request_id: str, tokens: range, identity: Identity | None = None) -> None:
    """A request computes these tokens and is gone."""
    life = toy.start(request_id, tokens, identity or Identity())
    toy.compute(life, len(tokens))
    held = [block for table in life.tables for block in reversed(table) if block is not None]
    toy.planner.finish(request_id, life.computed)
    del toy.lives[request_id]
    toy.free(held)


def use_up(toy: Toy, blocks: int) -> list[int]:
    return [toy.allocate() for _ in range(blocks)]


GROUPS = {
    "full": [GroupSpec(0, "full_attention", 16)],
    "hybrid": [
        GroupSpec(0, "full_attention", 16),
        GroupSpec(1, "sliding_window", 32, 256),
        GroupSpec(2, "mamba", 128),
        GroupSpec(3, "mamba", 128, None, False),
    ],
    "chunks": [GroupSpec(0, "full_attention", 32), GroupSpec(1, "chunked_local_attention", 16, 64)],
    "window": [GroupSpec(0, "sliding_window_mla", 16, 100), GroupSpec(1, "full_attention", 48)],
}
TARGETS = {"full": [2, 256, 1024], "hybrid": [24, 278, 1046], "chunks": [4, 384, 1536], "window": [18, 102, 358]}
"""For steps of 1, 2048 and 8192 tokens; printed by `_estimate_lazy_target_blocks` of vLLM 0.33."""


@pytest.mark.parametrize("model", sorted(GROUPS))
def test_the_target_is_that_of_vllm(model: str) -> None:
    assert [lazy_target(GROUPS[model], tokens) for tokens in (1, 2048, 8192)] == TARGETS[model]


def test_blocks_in_use_are_not_offered() -> None:
    toy = Toy(lazy_tokens=256)
    toy.compute(toy.start("r", 32), 32)
    assert toy.blocks_of() == []


def test_what_is_near_reuse_is_offered_behind_its_parents() -> None:
    toy = Toy(blocks=20, lazy_tokens=16)
    cached(toy, "r", range(40))
    assert toy.planner.target == 8  # type: ignore[attr-defined]
    assert toy.send()[0] == []  # ten blocks without content are reused first
    assert toy.blocks_of() == [("r", 0, [*range(10)])]
    assert toy.book.held_blocks == 10
    toy.end(0)
    toy.end(1)
    assert (toy.book.held_blocks, toy.blocks_of()) == (0, [])


def test_a_walk_goes_on_where_the_last_one_stopped() -> None:
    toy = Toy(blocks=24, lazy_tokens=8)
    for number in range(6):
        cached(toy, f"r{number}", range(100 * number, 100 * number + 16))
    offered = []
    for step in range(12):
        offered += [request_id for request_id, _, _ in toy.blocks_of()]
        toy.end(step)
    assert offered == [f"r{number}" for number in range(6)]


def test_a_cursor_that_was_used_and_freed_again_hides_nothing() -> None:
    toy = Toy(blocks=16, lazy_tokens=8)
    cached(toy, "first", range(16))
    cached(toy, "second", range(100, 116))
    assert toy.send()[0] == []
    cursor = toy.planner._cursor  # type: ignore[attr-defined]
    toy.touch([cursor])
    toy.free([cursor])  # it is the last of all now
    offered = [blocks[0] for _ in range(8) if (blocks := toy.blocks_of())]
    assert [request_id for request_id, _, _ in offered] == ["first", "second"]


def test_lazy_offers_say_as_much_as_eager_ones() -> None:
    toy = Toy(HYBRID, blocks=64, lazy_tokens=256)
    identity = Identity(3, "adapter", "salt", (MediaItem("cat", 6, 20),))
    cached(toy, "r", range(48), identity)
    said, step = toy.send()  # Toy checks each of them against its request
    assert [(each.group, each.blocks) for each in said] == [(0, range(12)), (1, range(6)), (2, range(6))]
    assert step.offers[0].extra_keys is not None
    assert step.offers[0].extra_keys[:3] == [("adapter", "salt"), ("adapter", ("cat", 2)), ("adapter", ("cat", -2))]
    assert step.finished == ["r"]


def test_blocks_that_need_no_parent_are_offered_by_themselves() -> None:
    toy = Toy((FULL, WINDOW), blocks=64, lazy_tokens=256)
    life = toy.start("r", 64)
    toy.compute(life, 64, trim=True)
    assert toy.blocks_of() == [("r", 1, [*range(6)])]
    toy.drop(life, 1, 7)
    assert toy.blocks_of() == [("r", 1, [7])]


def test_parents_that_are_in_use_are_offered_too() -> None:
    toy = Toy(blocks=12, lazy_tokens=256)
    cached(toy, "first", range(16))
    life = toy.start("second", range(16))
    for number in range(4):  # a hit in the engine's own cache
        block = toy.find(0, life.view.unit_hashes[number])
        assert block is not None
        toy.touch([block])
        life.tables[0].append(block)
    cached(toy, "third", range(24))
    assert ("third", 0, [*range(6)]) in toy.blocks_of()


def test_blocks_whose_parents_are_gone_are_counted() -> None:
    toy = Toy(blocks=10, lazy_tokens=256)
    life = toy.start("r", 40)
    toy.compute(life, 40)
    toy.finish("r")  # in the wrong order: the first block is reused first
    use_up(toy, 3)
    assert toy.blocks_of() == []
    assert toy.planner.counts.orphans == 7


def test_blocks_of_which_there_is_no_record_are_counted() -> None:
    toy = Toy(blocks=10, lazy_tokens=256)
    cached(toy, "r", range(40))
    toy.records[:] = [None] * 10
    assert [toy.blocks_of(), toy.blocks_of()] == [[], []]
    assert toy.planner.counts.undescribed == 10
    assert toy.planner.counts.offered == 0


def test_scratch_groups_are_never_offered() -> None:
    toy = Toy((*HYBRID[:3], SCRATCH), blocks=64, lazy_tokens=256)
    cached(toy, "r", range(48))
    assert {group for _, group, _ in toy.blocks_of()} == {0, 1, 2}


def test_a_chain_longer_than_the_room_is_offered_in_parts() -> None:
    toy = Toy(blocks=16, room=4, lazy_tokens=256)
    cached(toy, "r", range(40))
    offered = []
    for step in range(4):
        offered += toy.blocks_of()
        toy.end(step)
    assert offered == [("r", 0, [0, 1, 2, 3]), ("r", 0, [4, 5, 6, 7]), ("r", 0, [8, 9])]


def test_loose_blocks_count_into_the_room() -> None:
    toy = Toy((FULL, WINDOW), blocks=64, room=3, lazy_tokens=256)
    toy.compute(toy.start("r", 64), 64, trim=True)
    offered = []
    for step in range(4):
        offered += [block for _, _, blocks in toy.blocks_of() for block in blocks]
        toy.end(step)
    assert sorted(offered) == [*range(6)]


def test_chains_and_loose_blocks_share_the_room() -> None:
    toy = Toy((FULL, WINDOW), blocks=64, room=8, lazy_tokens=256)
    toy.compute(toy.start("r", 64), 64, trim=True)
    cached(toy, "other", range(100, 124))
    offered = 0
    for step in range(4):
        offered += sum(len(blocks) for _, _, blocks in toy.blocks_of())
        assert toy.book.held_blocks <= 8
        toy.end(step)
    assert offered == 6 + 6 + 3


def test_a_declined_step_is_offered_again_after_a_rest() -> None:
    toy = Toy(blocks=16, lazy_tokens=256)
    cached(toy, "r", range(40))
    for rest in (1, 1, 2, 4):
        assert [bool(toy.blocks_of()) for _ in range(rest)] == [False] * (rest - 1) + [True]
        toy.end(toy.steps - 1, declined=1)
    assert toy.planner.counts.losses == 4


def test_a_new_sidecar_is_offered_what_the_old_one_had() -> None:
    toy = Toy(blocks=16, lazy_tokens=256)
    cached(toy, "r", range(40))
    first = toy.blocks_of()
    toy.end(0)
    assert toy.blocks_of() == []
    toy.planner.offer_all_again()
    assert toy.blocks_of() == first


def test_a_late_answer_to_what_was_sent_before_a_reset_changes_nothing() -> None:
    toy = Toy(blocks=16, lazy_tokens=256)
    cached(toy, "r", range(40))
    toy.send()
    cached(toy, "other", range(100, 116))
    toy.send()
    toy.planner.reset()
    for step in range(2):
        toy.settle(StepDone(step, 0, 0, 4))
    assert toy.book.held_blocks == 0
    assert len(toy.blocks_of()) == 2


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "MAX_KNOWN", 4)
    toy = Toy(blocks=16, lazy_tokens=256)
    cached(toy, "r", range(40))
    toy.send()
    assert "known=4" in repr(toy.planner)
