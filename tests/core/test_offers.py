"""Which offers may be stored."""

import msgspec
import pytest

from core.prompts import FULL, SCRATCH
from kvevents_service.core.metadata import snapshot
from kvevents_service.core.offers import chain_fault, parent_slot, shape_fault, split_hashes
from kvevents_service.core.pool import BlockPool
from kvevents_service.testing import make_chain

ABCD = make_chain(range(8), 2)
GOOD = ABCD.part(1).offer(range(3))


def meta(chain):
    return snapshot(chain.offer(range(len(chain.hashes))), FULL, "CPU", 32)


def pool_of(chain) -> BlockPool:
    pool = BlockPool(8, 1)
    pool.allocate(meta(chain), list(chain.hashes), None)
    return pool


def test_a_good_offer_has_no_fault() -> None:
    assert shape_fault(GOOD, FULL, 32, 2) is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"block_hashes": GOOD.block_hashes[:-1]}, "bad_lengths"),
        ({"block_hashes": GOOD.block_hashes[:-32]}, "bad_lengths"),
        ({"token_ids": GOOD.token_ids + b"\0"}, "bad_lengths"),
        ({"token_ids": GOOD.token_ids[:-8]}, "bad_lengths"),
        ({"block_ids": GOOD.block_ids[:-4]}, "bad_lengths"),
        ({"extra_keys": []}, "bad_lengths"),
        ({"extra_keys": [None] * 4}, "bad_lengths"),
        ({"parent": b""}, "bad_hash"),
        ({"parent": b"\0" * 33}, "bad_hash"),
        ({"token_ids": GOOD.token_ids[:-1] + b"\xff"}, "bad_tokens"),
        ({"extra_keys": [None, ("salt",), None]}, None),
        ({"extra_keys": [("lora", ("img", 3), b"digest"), (), (1.5, None)]}, None),
        ({"extra_keys": [None, "salt", None]}, "bad_extra_keys"),
        ({"extra_keys": [None, ((("deep",),),), None]}, "bad_extra_keys"),
        ({"extra_keys": [None, ({"a": 1},), None]}, "bad_extra_keys"),
        ({"parent": None}, None),
        ({"lora_id": 2**63 - 1}, None),
        ({"lora_id": 2**63}, "bad_lora"),
        ({"lora_id": -1}, "bad_lora"),
        ({"lora_name": "l" * 1024}, None),
        ({"lora_name": "l" * 1025}, "bad_lora"),
        ({"extra_keys": [("s" * 2000,), None, (b"d" * 1000, ("i" * 1000, 1))]}, None),
        ({"extra_keys": [("s" * 2100,), None, None]}, "bad_extra_keys"),
        ({"extra_keys": [None, None, (b"d" * 1050, ("i" * 1050, 1))]}, "bad_extra_keys"),
        ({"extra_keys": [tuple(range(400)), None, None]}, "bad_extra_keys"),
    ],
)
def test_lengths_must_describe_the_same_blocks(fields: dict, fault: str | None) -> None:
    assert shape_fault(msgspec.structs.replace(GOOD, **fields), FULL, 32, 2) == fault


def test_a_scratch_group_is_not_stored() -> None:
    assert shape_fault(GOOD, SCRATCH, 32, 2) == "scratch_group"


def test_another_block_size_is_another_shape() -> None:
    assert shape_fault(GOOD, msgspec.structs.replace(FULL, block_size=4), 32, 2) == "bad_lengths"


def test_hashes_are_split_in_order() -> None:
    assert split_hashes(ABCD.packed, 32) == list(ABCD.hashes)
    assert split_hashes(b"", 32) == []


def test_the_parent_is_the_last_known_block() -> None:
    pool = pool_of(ABCD.part(0, 2))
    hashes = list(ABCD.hashes)
    assert parent_slot(pool, meta(ABCD), hashes, 2) == pool.slot_of(0, ABCD.hashes[1])
    assert parent_slot(pool, meta(ABCD), hashes, 0) is None
    assert parent_slot(pool, meta(ABCD.part(2)), hashes[2:], 0) == pool.slot_of(0, ABCD.hashes[1])


def test_a_root_needs_no_parent() -> None:
    assert chain_fault(BlockPool(8, 1), meta(ABCD), list(ABCD.hashes), 0, None) is None


def test_a_run_behind_an_absent_parent_is_not_stored() -> None:
    tail = ABCD.part(2)
    assert chain_fault(BlockPool(8, 1), meta(tail), list(tail.hashes), 0, None) == "parent_absent"


def test_hashes_that_are_known_later_on_are_no_chain() -> None:
    other = make_chain([9] * 4, 2)
    pool = pool_of(ABCD)
    assert chain_fault(pool, meta(other), [other.hashes[0], ABCD.hashes[0]], 0, None) == "not_a_chain"
    assert chain_fault(pool, meta(other), [other.hashes[0]] * 2, 0, None) == "not_a_chain"
