"""Announcements as wire events: hashes in the form vLLM publishes, metadata whole."""

import json
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.announce import int_hashes, low64, to_event
from kvevents_service.core.metadata import Cleared, RemovedRun, snapshot
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
CHAIN = make_chain(range(4), 2, b"\x07" * 32)


def captured_hashes(name: str) -> list:
    """Every hash vLLM stored in this capture, in order."""
    lines = [json.loads(line) for line in (VECTORS / f"vllm-0.33-gpu-{name}-hash.jsonl").read_text().splitlines()]
    payloads = [bytes.fromhex(line["frames"][-1]) for line in lines if "frames" in line]
    events = [event for payload in payloads for event in decode_batch(payload).batch.events]
    return [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes]


def test_int_hashes_are_those_vllm_publishes_for_the_same_digests() -> None:
    digests, ints = captured_hashes("bytes"), captured_hashes("int")
    assert len(digests) == len(ints) > 0
    assert int_hashes(b"".join(digests), 32) == ints
    assert list(map(low64, digests)) == ints


@pytest.mark.parametrize("hash_bytes", [*range(8, 41), 64])
def test_any_width_gives_the_low_64_bits(hash_bytes: int) -> None:
    names = [bytes((place * 31 + number) % 256 for place in range(hash_bytes)) for number in range(5)]
    expected = [int.from_bytes(name, "big") % 2**64 for name in names]
    assert int_hashes(b"".join(names), hash_bytes) == expected
    assert list(map(low64, names)) == expected


@given(st.lists(st.binary(min_size=32, max_size=32)))
def test_many_at_once_are_as_one_by_one(names: list[bytes]) -> None:
    assert int_hashes(b"".join(names), 32) == list(map(low64, names))


def test_a_stored_run_is_one_event_with_everything_said() -> None:
    group = GroupSpec(2, "sliding_window", 2, 64)
    keyed = msgspec.structs.replace(CHAIN.offer([0, 1]), lora_id=3, lora_name="ada", extra_keys=[("s",), None])
    assert to_event(snapshot(keyed, group, "CPU", 32)) == BlockStored(
        block_hashes=[low64(name) for name in CHAIN.hashes],
        parent_block_hash=0x0707070707070707,
        token_ids=[0, 1, 2, 3],
        block_size=2,
        lora_id=3,
        medium="CPU",
        lora_name="ada",
        extra_keys=[("s",), None],
        group_idx=2,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=64,
        locality="LOCAL",
    )


def test_a_root_has_no_parent() -> None:
    event = to_event(snapshot(make_chain([1, 2], 2).offer([0]), FULL, "CPU", 32))
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None


def test_token_ids_keep_their_sign_and_size() -> None:
    tokens = [0, 2**31 - 1, -1, -(2**31)]
    event = to_event(snapshot(make_chain(tokens, 2).offer([0, 1]), FULL, "CPU", 32))
    assert isinstance(event, BlockStored)
    assert event.token_ids == tokens


def test_a_removal_names_tier_and_group() -> None:
    run = RemovedRun(FULL, "CPU", CHAIN.hashes)
    expected = [low64(name) for name in CHAIN.hashes]
    assert to_event(run) == BlockRemoved(expected, "CPU", group_idx=0, locality="LOCAL")


def test_a_clear_is_a_clear() -> None:
    assert to_event(Cleared()) == AllBlocksCleared()


@pytest.mark.skipif(sys.byteorder != "little", reason="the fast form on the machines we have")
def test_the_fast_form_is_big_endian_too() -> None:
    assert int_hashes(bytes(24) + bytes(range(8)), 32) == [0x0001020304050607]
