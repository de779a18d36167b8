"""Snapshots: what is true of a block stays with it, however its run is cut."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.metadata import BlockStoreMeta, TransferMeta, snapshot
from kvevents_service.testing import make_chain
from kvevents_service.wire.packing import pack_int32

CHAIN = make_chain(range(12), 2, b"\x07" * 32)
KEYS = [("a",), None, ("b", 1), None, None, ("c",)]


def whole() -> BlockStoreMeta:
    keyed = msgspec.structs.replace(CHAIN.offer(range(6)), lora_id=1, lora_name="ada", extra_keys=list(KEYS))
    return snapshot(keyed, FULL, "CPU", 32)


def test_a_snapshot_keeps_the_offers_own_bytes() -> None:
    offer = CHAIN.offer(range(6))
    meta = snapshot(offer, FULL, "CPU", 32)
    assert meta.block_hashes is offer.block_hashes
    assert meta.token_ids is offer.token_ids
    assert meta.blocks == 6


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_part_says_what_is_true_of_its_blocks(start: int, stop: int) -> None:
    part = whole().part(start, max(start, stop))
    true = CHAIN.part(start, max(start, stop))
    assert (part.block_hashes, part.token_ids) == (true.packed, pack_int32(true.token_ids))
    assert part.parent_block_hash == true.parent
    assert part.extra_keys == KEYS[start : max(start, stop)]
    assert (part.lora_id, part.lora_name, part.medium, part.group) == (1, "ada", "CPU", FULL)


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_part_of_a_part_is_a_part(first: int, second: int) -> None:
    assert whole().part(first, 6).part(min(second, 6 - first), 6 - first) == whole().part(min(first + second, 6), 6)


def test_the_whole_is_no_copy() -> None:
    meta = whole()
    assert meta.part(0, 6) is meta


def test_no_extra_keys_stay_none() -> None:
    assert snapshot(CHAIN.offer(range(6)), FULL, "CPU", 32).part(1, 2).extra_keys is None


def test_hashes_by_position() -> None:
    assert tuple(whole().hash_at(position) for position in range(6)) == CHAIN.hashes


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        whole().medium = "GPU"  # type: ignore[misc]


def test_transfers_are_told_apart_by_identity() -> None:
    copies = [TransferMeta(1, "load", 1, 1, [], [], 0.0) for _ in range(2)]  # type: ignore[arg-type]
    assert copies[0] != copies[1]
    assert len(set(copies)) == 2
