"""An entry of the index comes back as it was, or not at all."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_blocks import LAYOUT, chain

from kvevents_service.transfer.disk_record import MAX_ENTRY_BYTES, Entry, Record, entry_bytes, name_of, pack, unpack
from kvevents_service.wire.control import GroupSpec

SLOT, GENERATION = 5, (1 << 64) - 3
ROOM = entry_bytes(LAYOUT)


@dataclass
class Odd:
    """Something that no engine can have sent."""


def entry(extra_keys: list[Any] | None = None, lora: str | None = None) -> Entry:
    meta = chain("a", 1, parent=bytes(32), extra_keys=extra_keys, lora=lora)
    return Entry(9, Record(0, name_of(meta), (1, (1 << 64) - 1)))


@pytest.mark.parametrize(
    "extra_keys",
    [None, [None], [("adapter", 3, None, b"\xff\0", 1.5, True, ("image", 7))], [()]],
)
def test_an_entry_comes_back(extra_keys: list[Any] | None) -> None:
    packed = pack(SLOT, GENERATION, entry(extra_keys, "lora"), ROOM)
    assert packed is not None
    assert len(packed) == ROOM
    back = unpack(SLOT, GENERATION, memoryview(packed))
    assert msgspec.msgpack.encode(back) == msgspec.msgpack.encode(entry(extra_keys, "lora"))


def test_every_bit_is_covered() -> None:
    packed = pack(SLOT, GENERATION, entry(), ROOM)
    assert packed is not None
    used = len(packed.rstrip(b"\0"))
    for place in range(used):
        for bit in range(8):
            changed = bytearray(packed)
            changed[place] ^= 1 << bit
            assert unpack(SLOT, GENERATION, memoryview(changed)) is None
    for length in range(used):  # a write that was torn: zeros, or what was there before
        assert unpack(SLOT, GENERATION, memoryview(packed[:length].ljust(ROOM, b"\0"))) is None


def test_an_entry_of_another_slot_or_generation_is_none() -> None:
    packed = memoryview(pack(SLOT, GENERATION, entry(), ROOM) or b"")
    assert unpack(SLOT + 1, GENERATION, packed) is None
    assert unpack(SLOT, GENERATION - 1, packed) is None
    assert unpack(SLOT, GENERATION, packed) is not None


@given(st.binary(min_size=64, max_size=200))
def test_anything_else_is_none(content: bytes) -> None:
    packed = GENERATION.to_bytes(8, "little").join([content[:8], content[16:]])
    assert unpack(SLOT, GENERATION, memoryview(packed)) is None


@pytest.mark.parametrize("extra_keys", [[("k" * ROOM,)], [(1 << 64,)], [(Odd(), Odd)]])
def test_what_cannot_be_written_down_is_none(extra_keys: list[Any]) -> None:
    assert pack(SLOT, GENERATION, entry(extra_keys), ROOM) is None


def test_any_block_of_a_layout_has_room() -> None:
    for size in (1, 16, 128, 1024):
        group = GroupSpec(0, "full_attention", size)
        layout = msgspec.structs.replace(LAYOUT, groups=(group,), hash_tokens=max(1, size // 4), sizes=((1,),) * 8)
        name = name_of(chain("a", 1, group, parent=bytes(32), extra_keys=[("k" * 100,)]))
        unit = name_of(chain("a", 1, GroupSpec(0, "full_attention", max(1, size // 4)), parent=bytes(32)))
        record = Record(0, name, ((1 << 64) - 1,) * 8, [unit] * (3 if size > 1 else 0))
        assert pack(SLOT, GENERATION, Entry(9, record), entry_bytes(layout)) is not None
    huge = msgspec.structs.replace(LAYOUT, groups=(GroupSpec(0, "full_attention", 65536),))
    assert entry_bytes(huge) == MAX_ENTRY_BYTES
