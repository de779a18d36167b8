"""Announcements as batches: every dialect tells exactly what it lets through, metadata whole."""

import msgspec
import pytest
from doubles.stream import BLOCK, GROUPS, MAIN, MEDIA, PROMPTS, STATE, Source
from hypothesis import given, settings
from hypothesis import strategies as st

from core.prompts import FULL
from kvevents_service.core.announce import (
    EVENT_WEIGHT,
    MAX_BATCH_EVENTS,
    MAX_BATCH_TOKENS,
    encode,
    encoding_key,
    in_batches,
    to_event,
)
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, Cleared, RemovedRun, snapshot
from kvevents_service.core.residency import Residency, key64
from kvevents_service.errors import WireError
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import MAX_PAYLOAD_BYTES, decode_batch, encode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.dialects import DIALECTS, VLLM, Dialect, Groups, Layout
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.hashes import hash_in
from kvevents_service.wire.media import canonical_medium
from kvevents_service.wire.packing import pack_int32

CHAIN = make_chain(range(4), 2, b"\x07" * 32)
EVERY = [*DIALECTS.values()]
PUBLISHER = b"0123456789abcdef"
seeds = st.integers(0, 2**32)


def low64(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


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


# dialects


def name_of(dialect: Dialect) -> str:
    return dialect.name


def told(dialect: Dialect, *announcements: Announcement) -> list[Event]:
    """What a reader makes of a batch in a dialect."""
    return decode_batch(encode(dialect, announcements, 1.5, 0)).batch.events


def raw(dialect: Dialect, *announcements: Announcement, **more) -> list:
    return msgspec.msgpack.decode(encode(dialect, announcements, 1.5, 3, **more))


def chain_of(prompt: int = 0, medium: str = "GPU", group: GroupSpec = MAIN) -> BlockStoreMeta:
    """A whole prompt on a tier."""
    chosen = PROMPTS[prompt]
    digests = b"".join(block.name for block in chosen.blocks)
    keys = [block.extra_keys for block in chosen.blocks]
    return BlockStoreMeta(
        group, medium, 32, digests, pack_int32(chosen.tokens), None, chosen.lora_id, chosen.lora_name, keys
    )


def let_through(dialect: Dialect, source: Source) -> dict[tuple[str, int], set[int]]:
    """What a reader of this dialect must believe: per tier and group, hashes by their low 64 bits."""
    shelves = {}
    for medium in MEDIA:
        for group in GROUPS:
            if dialect.medium(medium) is not None and (dialect.groups is Groups.ALL or group == MAIN):
                names = source.names(medium, group, inner=dialect.inner)
                hashes = {key64(hash_in(dialect.hashes, digest)) for digest in names}
                shelves[medium, group.index if dialect.groups is Groups.ALL else 0] = hashes
    return {shelf: hashes for shelf, hashes in shelves.items() if hashes}


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
@given(seeds)
@settings(max_examples=40)
def test_the_fold_of_a_dialect_is_what_it_lets_through_at_every_number(dialect: Dialect, seed: int) -> None:
    source, residency = Source(seed), Residency({group.index: BLOCK for group in GROUPS})
    for _ in range(30):
        residency.apply(told(dialect, *source.batch()))
        folded = {(shelf.medium, shelf.group): set(there) for shelf, there in residency.shelves.items() if there}
        assert folded == let_through(dialect, source)
    residency.check()


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
@given(seeds)
@settings(max_examples=20)
def test_what_is_said_of_a_run_is_true_of_every_block(dialect: Dialect, seed: int) -> None:
    for batch in Source(seed).batches(20):
        for item in batch:
            events = told(dialect, item) if isinstance(item, BlockStoreMeta) else []
            if events:
                check_run(dialect, item, events)


def check_run(dialect: Dialect, item: BlockStoreMeta, events: list) -> None:
    names = [hash_in(dialect.hashes, item.hash_at(place)) for place in range(item.blocks)]
    parent = item.parent_block_hash
    assert [name for event in events for name in event.block_hashes] == names
    parents = [None if parent is None else hash_in(dialect.hashes, parent), *names]
    assert [event.parent_block_hash for event in events] == parents[: len(events)]
    assert [token for event in events for token in event.token_ids] == to_event(item).token_ids
    assert {(event.block_size, event.lora_name) for event in events} == {(item.block_size, item.lora_name)}
    assert {canonical_medium(event.medium) for event in events} == {item.medium}


@given(seeds)
@settings(max_examples=40)
def test_vllm_is_byte_for_byte_the_common_layout(seed: int) -> None:
    for batch in Source(seed).batches(20):
        common = encode_batch(EventBatch(1.5, [to_event(item) for item in batch], 3))
        assert encode(VLLM, batch, 1.5, 3) == common


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_what_is_filtered_out_leaves_an_empty_batch(dialect: Dialect) -> None:
    gone = RemovedRun(STATE, "GPU", (PROMPTS[0].blocks[0].name,))
    for item in (chain_of(0, "GPU", STATE), gone):
        assert (raw(dialect, item) == [1.5, [], 3]) is (dialect.groups is Groups.MAIN)
    for item in (chain_of(0, "TAPE"), RemovedRun(MAIN, "TAPE", gone.block_hashes)):
        assert (raw(dialect, item) == [1.5, [], 3]) is (dialect.media is not None)


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_a_hash_inside_a_block_is_told_where_blocks_may_have_several_sizes(dialect: Dialect) -> None:
    name = PROMPTS[0].blocks[0].name
    unit = msgspec.structs.replace(chain_of().part(0, 1), token_ids=pack_int32([100, 101]), inner=True)
    for item in (unit, RemovedRun(MAIN, "GPU", (name,), inner=True)):
        assert bool(told(dialect, item)) is dialect.inner
    if dialect.inner:
        (event,) = told(dialect, unit)
        assert (event.block_size, event.token_ids) == (2, [100, 101])


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_a_clear_is_let_through_in_every_dialect(dialect: Dialect) -> None:
    wanted = ["AllBlocksCleared"] if dialect.layout is Layout.ARRAY else {"type": "AllBlocksCleared"}
    assert raw(dialect, Cleared()) == [1.5, [wanted], 3]


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_events_have_the_declared_keys_in_their_order(dialect: Dialect) -> None:
    full, *_ = raw(dialect, msgspec.structs.replace(chain_of(6), lora_name="ada"))[1]
    bare, *_ = raw(dialect, msgspec.structs.replace(chain_of(), extra_keys=None))[1]
    gone, *_ = raw(dialect, RemovedRun(MAIN, "GPU", (PROMPTS[0].blocks[0].name,)))[1]
    if dialect.layout is Layout.ARRAY:
        assert {len(full), len(bare)} == {1 + len(dialect.stored)}
        assert len(gone) == 1 + len(dialect.removed)
    else:
        keys = [key for key in dialect.stored_if_set if key != "kv_cache_spec_sliding_window"]
        unset = {"extra_keys", "lora_name"}
        assert list(full) == ["type", *dialect.stored, *keys]
        assert list(bare) == ["type", *dialect.stored, *(key for key in keys if key not in unset)]
        assert list(gone) == ["type", *dialect.removed, *dialect.removed_if_set]


def test_aibrix_gets_an_event_for_each_block_and_each_removal() -> None:
    removed = RemovedRun(MAIN, "GPU", (b"\xff" * 32, b"\x01" * 32))
    events = raw(DIALECTS["aibrix"], chain_of(2), removed)[1]
    names = [hash_in(DIALECTS["aibrix"].hashes, block.name) for block in PROMPTS[2].blocks]
    assert [event[1] for event in events[:3]] == [[name] for name in names]
    assert [event[2] for event in events[:3]] == [None, *names[:2]]
    assert [event[3] for event in events[:3]] == [[*block.tokens] for block in PROMPTS[2].blocks]
    assert events[3:] == [["BlockRemoved", [-1], "GPU"], ["BlockRemoved", [0x0101010101010101], "GPU"]]


def test_one_hash_an_event_takes_each_block_its_own_extra_keys() -> None:
    single = msgspec.structs.replace(VLLM, one_hash=True)
    keys = [event.extra_keys for event in told(single, chain_of(6))]
    image = PROMPTS[6].blocks[1].extra_keys
    assert image is not None
    assert keys == [[None], [[[*image[0]]]], *[[None]] * 6]


def test_sglang_spells_the_tiers_its_own_way() -> None:
    said = [raw(DIALECTS["sglang"], chain_of(0, medium))[1][0]["medium"] for medium in MEDIA[:4]]
    assert said == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]


def test_extra_keys_are_as_given_plain_or_left_out() -> None:
    odd = {name: getattr(told(dialect, chain_of(8))[0], "extra_keys", None) for name, dialect in DIALECTS.items()}
    assert odd["vllm"] == odd["vllm-array"] != odd["dynamo"] == odd["llm-d"]
    assert odd["vllm-router"] is odd["mooncake"] is odd["aibrix"] is odd["sglang"] is None


@pytest.mark.parametrize("dialect", EVERY, ids=name_of)
def test_only_vllm_has_a_place_for_the_publisher_id(dialect: Dialect) -> None:
    batch = raw(dialect, publisher_id=PUBLISHER)
    assert batch == [1.5, [], 3, *([PUBLISHER] if dialect is VLLM else [])]


def test_a_batch_that_is_too_big_is_refused() -> None:
    huge = msgspec.structs.replace(chain_of(), extra_keys=["x" * MAX_PAYLOAD_BYTES, *[None] * 7])
    with pytest.raises(WireError, match="payload"):
        encode(VLLM, (huge,), 1.5, 0)
    assert told(DIALECTS["mooncake"], huge)


def test_dialects_of_the_same_bytes_have_the_same_key() -> None:
    other = msgspec.structs.replace(VLLM, name="mine", readers="me")
    assert encoding_key(other) == encoding_key(VLLM)
    assert hash(encoding_key(other)) == hash(encoding_key(VLLM))
    assert len({encoding_key(dialect) for dialect in EVERY}) == len(EVERY)


@pytest.mark.parametrize("field", [name for name in Dialect.__struct_fields__ if name not in ("name", "readers")])
def test_every_other_word_of_a_declaration_is_in_the_key(field: str) -> None:
    changed = msgspec.structs.replace(VLLM, **{field: "another"})
    assert encoding_key(changed) != encoding_key(VLLM)


def test_batches_are_split_before_any_dialect_is_known() -> None:
    said = (chain_of(), Cleared(), chain_of(0, "TAPE"))
    assert list(in_batches(said)) == [said]


def test_an_adapters_name_is_weighed_with_every_event_that_says_it() -> None:
    block = msgspec.structs.replace(chain_of().part(0, 1), lora_name="l" * 1024)
    batches = list(in_batches([block] * 8192))
    assert len(batches) == 2
    assert sum(map(len, batches)) == 8192


def test_a_batch_has_no_more_events_than_every_reader_takes() -> None:
    block = chain_of().part(0, 1)
    assert [len(batch) for batch in in_batches([block] * MAX_BATCH_EVENTS)] == [MAX_BATCH_EVENTS]
    assert [len(batch) for batch in in_batches([block] * (2 * MAX_BATCH_EVENTS + 1))] == [
        MAX_BATCH_EVENTS,
        MAX_BATCH_EVENTS,
        1,
    ]


def test_parts_of_a_large_removal_of_inner_hashes_are_of_inner_hashes() -> None:
    names = tuple(number.to_bytes(8, "big") for number in range(MAX_BATCH_TOKENS // EVENT_WEIGHT + 1))
    batches = list(in_batches((RemovedRun(MAIN, "GPU", names, inner=True),)))
    assert [told(DIALECTS["dynamo"], *batch) for batch in batches] == [[], []]
