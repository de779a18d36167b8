"""Hash forms: the low 64 bits are vLLM's, any width is taken, many at once are as one by one."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import BlockStored
from kvevents_service.wire.hashes import HashForm, hash_in, hashes_in

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
WORD = 0xFEDCBA9876543210
DIGEST = (0x8000000000000001).to_bytes(8, "big") + bytes(16) + WORD.to_bytes(8, "big")


def captured_hashes(name: str) -> list:
    """Every hash vLLM stored in this capture, in order."""
    lines = [json.loads(line) for line in (VECTORS / f"vllm-0.33-gpu-{name}-hash.jsonl").read_text().splitlines()]
    payloads = [bytes.fromhex(line["frames"][-1]) for line in lines if "frames" in line]
    events = [event for payload in payloads for event in decode_batch(payload).batch.events]
    return [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes]


def test_int_hashes_are_those_vllm_publishes_for_the_same_digests() -> None:
    digests, ints = captured_hashes("bytes"), captured_hashes("int")
    assert len(digests) == len(ints) > 0
    assert hashes_in(HashForm.LOW64, b"".join(digests), 32) == ints
    assert hashes_in(HashForm.DIGEST, b"".join(digests), 32) == digests


@pytest.mark.parametrize("hash_bytes", [*range(8, 41), 64])
def test_any_width_gives_the_low_64_bits(hash_bytes: int) -> None:
    names = [bytes((place * 31 + number) % 256 for place in range(hash_bytes)) for number in range(5)]
    expected = [int.from_bytes(name, "big") % 2**64 for name in names]
    assert hashes_in(HashForm.LOW64, b"".join(names), hash_bytes) == expected


@pytest.mark.parametrize("form", HashForm)
@given(st.integers(8, 64).flatmap(lambda width: st.lists(st.binary(min_size=width, max_size=width), min_size=1)))
def test_many_at_once_are_as_one_by_one(form: HashForm, names: list[bytes]) -> None:
    assert hashes_in(form, b"".join(names), len(names[0])) == [hash_in(form, name) for name in names]


@pytest.mark.parametrize("form", HashForm)
def test_no_hashes_are_none(form: HashForm) -> None:
    assert hashes_in(form, b"", 32) == []


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (HashForm.DIGEST, DIGEST),
        (HashForm.LOW64, WORD),
        (HashForm.LOW64_SIGNED, WORD - 2**64),
        (HashForm.HIGH64_SIGNED, 1 - 2**63),
        (HashForm.NARROW, WORD - 2**63),
    ],
)
def test_each_form_of_one_digest(form: HashForm, expected: int | bytes) -> None:
    assert hash_in(form, DIGEST) == expected


@pytest.mark.parametrize("low", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1])
def test_the_narrow_form_is_in_its_range(low: int) -> None:
    narrow = hash_in(HashForm.NARROW, low.to_bytes(32, "big"))
    assert isinstance(narrow, int)
    assert 2**32 <= narrow < 2**63
    assert narrow % 2**32 == low % 2**32


@pytest.mark.skipif(sys.byteorder != "little", reason="the fast form on the machines we have")
def test_the_fast_form_is_big_endian_too() -> None:
    assert hashes_in(HashForm.LOW64, bytes(24) + bytes(range(8)), 32) == [0x0001020304050607]
