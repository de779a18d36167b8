"""A snapshot holds exactly the state, in parts of bounded weight and bounded number."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.announce import EVENT_WEIGHT
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import BlockStoreMeta, snapshot
from kvevents_service.core.residency import Residency
from kvevents_service.core.rows import Row
from kvevents_service.core.snapshot import (
    STEP_RUNS,
    MessageLimits,
    PartLimits,
    Snapshot,
    block_weight,
    most_parts,
    parts_of,
    steps_of,
)
from kvevents_service.errors import WireError
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import MAX_PAYLOAD_BYTES, decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import AllBlocksCleared

EACH = FULL.block_size + EVENT_WEIGHT


class FixedCut:
    """A cut of these runs."""

    def __init__(self, *runs: BlockStoreMeta) -> None:
        self._runs = runs

    def sizes(self) -> list[tuple[int, int]]:
        return [(run.blocks, run.group.block_size) for run in self._runs]

    def rows(self) -> Iterator[Row]:
        return map(Row.of, self._runs)


def run_of(blocks: int, seed: int = 0, block_size: int = FULL.block_size) -> BlockStoreMeta:
    chain = make_chain(range(1000 * seed, 1000 * seed + blocks * block_size), block_size)
    group = GroupSpec(0, "full_attention", block_size)
    return snapshot(chain.offer(range(blocks)), group, "CPU", 32)


def rendered(limits: PartLimits, *cuts: FixedCut) -> Snapshot:
    made = Snapshot(cuts, 7, Encoding(), limits, made_at=0.0, ts=1.0)
    while not made.done:
        made.render_next()
    return made


def test_a_clear_comes_first_even_if_nothing_is_resident() -> None:
    made = rendered(PartLimits())
    assert [decode_batch(part).batch.events for part in made.parts] == [[AllBlocksCleared()]]
    assert made.numbers_needed == 1


def test_a_run_is_split_where_a_part_is_full() -> None:
    parts = list(parts_of([FixedCut(run_of(5), run_of(2, 1))], 3 * EACH))
    assert [[row.blocks for row in part] for part in parts] == [[3], [2, 1], [1]]
    assert parts[1][0] == Row.of(run_of(5).part(3, 5))


def test_parts_get_heavier_instead_of_too_many() -> None:
    made = rendered(PartLimits(weight=EACH, parts=4), FixedCut(run_of(100)))
    assert len(made.parts) <= 5
    assert made.blocks == 100


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 40])), max_size=8),
    st.integers(1, 200),
    st.integers(1, 5),
)
def test_any_state_is_whole_within_its_bounds(runs: list[tuple[int, int]], weight: int, parts: int) -> None:
    metas = [run_of(blocks, seed, block_size) for seed, (blocks, block_size) in enumerate(runs)]
    made = rendered(PartLimits(weight, parts), FixedCut(*metas))
    residency = Residency()
    for part in made.parts:
        residency.apply(decode_batch(part).batch.events)
    residency.check()
    assert len(residency) == sum(meta.blocks for meta in metas) == made.blocks
    before = Snapshot([FixedCut(*metas)], 7, Encoding(), PartLimits(weight, parts), made_at=0.0, ts=1.0)
    assert len(made.parts) <= before.numbers_needed


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 200))
def test_no_part_is_heavier_than_one_block_allows(blocks: list[int], weight: int) -> None:
    cut = FixedCut(*(run_of(count, seed) for seed, count in enumerate(blocks)))
    parts = list(parts_of([cut], weight))
    for part in parts:
        heavy = sum(row.blocks for row in part) * block_weight(FULL.block_size)
        assert heavy <= max(weight, EACH)
    assert len(parts) <= most_parts([cut], weight)


def test_a_part_of_many_runs_is_made_in_steps() -> None:
    cut = FixedCut(*(run_of(1, seed) for seed in range(2 * STEP_RUNS + 3)))
    steps = list(steps_of([cut], 1000 * EACH))
    assert [step and len(step) for step in steps] == [None, None, 2 * STEP_RUNS + 3]
    made = Snapshot([cut], 7, Encoding(), PartLimits(1000 * EACH), made_at=0.0, ts=1.0)
    parts = []
    while not made.done:
        made.render_next()
        parts.append(len(made.parts))
    assert parts == [0, 0, 1, 1]
    assert (made.blocks, made.numbers_needed) == (2 * STEP_RUNS + 3, 1)


def test_runs_that_continue_each_other_count_one_by_one() -> None:
    whole = run_of(STEP_RUNS)
    cut = FixedCut(*(whole.part(place, place + 1) for place in range(STEP_RUNS)), run_of(1, 1))
    steps = list(steps_of([cut], 1000 * EACH))
    assert [step and [len(row.runs) for row in step] for step in steps] == [None, [STEP_RUNS, 1]]


def test_what_cannot_be_encoded_fails_it_and_ends_it() -> None:
    meta = BlockStoreMeta(FULL, "CPU", 32, b"h" * 32, bytes(8), None, None, None, [("x" * MAX_PAYLOAD_BYTES,)])
    made = Snapshot([FixedCut(meta)], 7, Encoding(), PartLimits(), made_at=0.0, ts=1.0)
    with pytest.raises(WireError):
        made.render_next()
    assert (made.done, made.failed, made.parts) == (True, True, [])
    assert "failed" in repr(made)


def test_all_parts_are_one_payload_for_readers_that_take_only_one() -> None:
    made = rendered(PartLimits(3 * EACH), FixedCut(run_of(9), run_of(2, 1)))
    assert len(made.parts) == 4
    whole = made.joined(MessageLimits())
    assert whole is not None
    events = [event for part in made.parts for event in decode_batch(part).batch.events]
    assert decode_batch(whole).batch.events == events
    assert made.joined(MessageLimits()) is whole


def test_a_state_that_no_reader_takes_at_once_is_not_joined() -> None:
    made = rendered(PartLimits(), FixedCut(run_of(9)))
    assert made.events == 2
    assert made.joined(MessageLimits(made.bytes - 1)) is None
    assert made.joined(MessageLimits(made.bytes, made.events - 1)) is None
    assert made.joined(MessageLimits(made.bytes, made.events)) is not None
