"""Runs are one row where they continue each other and are alike in all that is said once."""

import msgspec
import pytest

from core.prompts import FULL, LATENT
from kvevents_service.core.metadata import snapshot
from kvevents_service.core.rows import LONG, Row, are_alike, joined
from kvevents_service.testing import make_chain

CHAIN = make_chain(range(5 * FULL.block_size), FULL.block_size)
RUN = msgspec.structs.replace(
    snapshot(CHAIN.offer(range(5)), FULL, "CPU", 32), lora_name="a", lora_id=1, extra_keys=[1, 2, 3, 4, 5]
)
FIRST, SECOND, THIRD = RUN.part(0, 2), RUN.part(2, 3), RUN.part(3, 5)


def test_runs_in_order_are_one_row_and_its_head_has_the_keys_of_all() -> None:
    (row,) = joined(map(Row.of, (FIRST, SECOND, THIRD)))
    head = row.head()
    assert row == Row([FIRST, SECOND, THIRD], 5)
    assert (head.extra_keys, head.parent_block_hash) == ([1, 2, 3, 4, 5], None)
    assert b"".join(run.block_hashes for run in (FIRST, SECOND, THIRD)) == RUN.block_hashes


@pytest.mark.parametrize(
    "other",
    [
        {"parent_block_hash": None},
        {"parent_block_hash": RUN.hash_at(0)},
        {"parent_block_hash": RUN.hash_at(1)[16:]},
        {"group": LATENT},
        {"medium": "STORAGE"},
        {"lora_name": "b"},
        {"lora_id": 2},
        {"extra_keys": None},
        {"inner": True},
        {"hash_bytes": 16},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_run_that_differs_begins_a_row(other: dict) -> None:
    differs = msgspec.structs.replace(SECOND, **other)
    rows = [Row.of(FIRST), Row.of(differs)]
    assert [*joined(rows)] == rows
    assert rows[0].head() is FIRST


def test_what_follows_an_inner_name_begins_a_row() -> None:
    inner = msgspec.structs.replace(FIRST, inner=True)
    rows = [Row.of(inner), Row.of(SECOND)]
    assert [*joined(rows)] == rows


def test_a_row_that_is_long_enough_is_told() -> None:
    rows = [Row([FIRST], LONG), Row.of(SECOND), Row.of(THIRD)]
    assert [*joined(rows)] == [rows[0], Row([SECOND, THIRD], 3)]
    assert [*joined([])] == []


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 2), (1, 4), (2, 3), (4, 5)])
def test_a_part_of_a_row_has_just_those_blocks(start: int, stop: int) -> None:
    part = Row([FIRST, SECOND, THIRD], 5).part(start, stop)
    assert part.blocks == sum(run.blocks for run in part.runs) == stop - start
    assert [run.hash_at(place) for run in part.runs for place in range(run.blocks)] == [
        RUN.hash_at(place) for place in range(start, stop)
    ]
    assert part.runs[0].parent_block_hash == (RUN.hash_at(start - 1) if start else None)
    assert part.head().extra_keys == RUN.extra_keys[start:stop]


PLAIN = msgspec.structs.replace(RUN, extra_keys=None)


@pytest.mark.parametrize(
    "other",
    [
        {"group": LATENT},
        {"medium": "STORAGE"},
        {"lora_name": "b"},
        {"lora_id": 2},
        {"extra_keys": [1]},
        {"inner": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_runs_that_one_event_cannot_tell_are_not_alike(other: dict) -> None:
    differs = msgspec.structs.replace(PLAIN, **other)
    assert are_alike([PLAIN, PLAIN])
    assert not are_alike([PLAIN, differs])
    assert not are_alike([RUN, RUN])
    assert not are_alike([msgspec.structs.replace(PLAIN, inner=True)])
