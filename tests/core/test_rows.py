"""Runs are one row where they continue each other and are alike in all that is said once."""

import msgspec
import pytest

from core.prompts import FULL, LATENT
from kvevents_service.core.metadata import BlockStoreMeta, Cleared, RemovedRun, snapshot
from kvevents_service.core.rows import head_of, rows_of
from kvevents_service.testing import make_chain

CHAIN = make_chain(range(5 * FULL.block_size), FULL.block_size)
RUN = msgspec.structs.replace(
    snapshot(CHAIN.offer(range(5)), FULL, "CPU", 32), lora_name="a", lora_id=1, extra_keys=[1, 2, 3, 4, 5]
)
FIRST, SECOND, THIRD = RUN.part(0, 2), RUN.part(2, 3), RUN.part(3, 5)


def test_runs_in_order_are_one_row_and_its_head_has_the_keys_of_all() -> None:
    (row,) = rows_of([FIRST, SECOND, THIRD])
    head = head_of(row)
    assert isinstance(head, BlockStoreMeta)
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
    assert [*rows_of([FIRST, differs])] == [[FIRST], [differs]]
    assert head_of([FIRST]) is FIRST


def test_what_follows_an_inner_name_begins_a_row() -> None:
    inner = msgspec.structs.replace(FIRST, inner=True)
    assert [*rows_of([inner, SECOND])] == [[inner], [SECOND]]


def test_everything_else_is_by_itself_and_all_is_in_order() -> None:
    removed = RemovedRun(FULL, "CPU", (b"h" * 32,))
    said = [Cleared(), FIRST, SECOND, removed, THIRD, Cleared()]
    assert [*rows_of(said)] == [[Cleared()], [FIRST, SECOND], [removed], [THIRD], [Cleared()]]
    assert head_of([removed]) is removed
    assert [*rows_of([])] == []
