"""Every router's double takes its own dialect whole, holds exactly what that lets through, and refuses others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import aibrix, dynamo, llm_d, mooncake, sglang, vllm_router
from doubles.reading import Refused, leading
from doubles.stream import BLOCK, MAIN, MEDIA, PROMPTS, Prompt, Source
from kvevents_service.core.announce import encode
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, Cleared, RemovedRun
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.frames import live_frames
from kvevents_service.wire.hashes import HashForm, hash_in
from kvevents_service.wire.packing import pack_int32

TOPIC = {"llm-d": b"kv@pod-1@model"}
DOUBLES: dict[str, tuple[str, Callable[[], Any]]] = {
    "dynamo": ("dynamo", lambda: dynamo.Index(BLOCK)),
    "dynamo relay": ("dynamo", lambda: dynamo.Index(BLOCK, relay=True)),
    "vllm-router": ("vllm-router", lambda: vllm_router.Index(BLOCK)),
    "llm-d": ("llm-d", lambda: llm_d.Index(BLOCK)),
    "llm-d, old": ("llm-d", lambda: llm_d.Index(BLOCK, old=True)),
    "mooncake": ("mooncake", lambda: mooncake.Index(BLOCK)),
    "aibrix": ("aibrix", lambda: aibrix.Index(BLOCK)),
    "sglang": ("sglang", lambda: sglang.Index(BLOCK)),
}
TIERS = {
    "dynamo": {"GPU": "device", "CPU": "host", "STORAGE": "disk", "EXTERNAL": "external"},
    "dynamo relay": {"GPU": "device", "CPU": "host", "STORAGE": "disk", "EXTERNAL": "external"},
    "vllm-router": {"GPU": "GPU", "CPU": "CPU", "STORAGE": "STORAGE"},
    "llm-d": {"GPU": "gpu", "CPU": "cpu"},
    "llm-d, old": {"GPU": "gpu", "CPU": "cpu"},
    "sglang": {"GPU": "GPU", "CPU": "CPU_PINNED", "STORAGE": "DISK", "EXTERNAL": "EXTERNAL"},
}
"""Which of our tiers a double that keeps hashes by tier has under which name."""
DYNAMO = ("dynamo", "dynamo relay")
TREES = tuple(double for double in TIERS if double not in DYNAMO)
"""Readers that look at tokens and adapter only: they take a salted or an image's prompt for the plain one. So does
Dynamo, but of two blocks that it cannot tell apart it keeps one."""
DISTINCT = PROMPTS[:5]
"""Prompts that differ by tokens or adapter."""

Batches = Iterable[tuple[Announcement, ...]]


def feed(index: Any, dialect: str, batches: Batches, first_seq: int = 0) -> None:
    for seq, batch in enumerate(batches, first_seq):
        payload = encode(DIALECTS[dialect], batch, 1.5, 0)
        index.feed(live_frames(TOPIC.get(dialect, b""), seq, payload))


def held(double: str, index: Any) -> dict[str, set[Any]]:
    return index.held() if double in DYNAMO else index.tree.held()


def expected(double: str, source: Source) -> dict[str, set[Any]]:
    """The hashes that its dialect lets through, by the double's names of the tiers."""
    by_tier = {theirs: said(DOUBLES[double][0], source.names(ours)) for ours, theirs in TIERS[double].items()}
    return {tier: hashes for tier, hashes in by_tier.items() if hashes}


def build(double: str, source: Source, batches: int = 40) -> Any:
    dialect, make = DOUBLES[double]
    index = make()
    feed(index, dialect, source.batches(batches))
    return index


def said(dialect: str, digests: Iterable[bytes]) -> set[Any]:
    return {hash_in(DIALECTS[dialect].hashes, digest) for digest in digests}


def with_plain(chosen: Prompt, place: int) -> set[bytes]:
    """Blocks that a reader of tokens and adapter cannot tell from this one of the prompt."""
    same = (other for other in PROMPTS if other.lora_name == chosen.lora_name)
    tokens = chosen.tokens[: (place + 1) * BLOCK]
    return {other.blocks[place].name for other in same if other.tokens[: (place + 1) * BLOCK] == tokens}


seeds = st.integers(0, 2**32)


@given(seeds)
@settings(max_examples=25)
@pytest.mark.parametrize("double", TREES)
def test_an_index_holds_exactly_what_its_dialect_lets_through(double: str, seed: int) -> None:
    source = Source(seed)
    index = build(double, source)
    assert held(double, index) == expected(double, source)


@given(seeds)
@settings(max_examples=25)
@pytest.mark.parametrize("double", TREES)
def test_a_reader_of_tokens_and_adapters_finds_every_prefix(double: str, seed: int) -> None:
    source = Source(seed)
    index = build(double, source)
    for chosen in PROMPTS:
        found = index.match(chosen.tokens, lora=chosen.lora_name)
        for ours, theirs in TIERS[double].items():
            there = source.names(ours)
            length = leading(bool(with_plain(chosen, place) & there) for place in range(len(chosen.blocks)))
            assert found.get(theirs, 0) == length


@given(seeds)
@settings(max_examples=25)
@pytest.mark.parametrize("double", DYNAMO)
def test_dynamo_holds_and_finds_exactly_what_it_can_tell_apart(double: str, seed: int) -> None:
    source = Source(seed, DISTINCT)
    index = build(double, source)
    assert index.held() == expected(double, source)
    for chosen in DISTINCT:
        assert index.match(chosen.tokens, lora=chosen.lora_name) == overlap(source, chosen)


def overlap(source: Source, chosen: Prompt) -> dict[str, int]:
    """Leading blocks on the GPU, from there on the host, from there on the lower tiers."""
    depth, depths = 0, []
    for medium in MEDIA[:4]:
        there = source.names(medium)
        depth += leading(block.name in there for block in chosen.blocks[depth:])
        depths.append(depth)
    return {"gpu": depths[0], "cpu": depths[1], "disk": depths[3]}


@given(seeds)
@settings(max_examples=25)
@pytest.mark.parametrize("double", DYNAMO)
def test_dynamo_never_holds_what_is_gone(double: str, seed: int) -> None:
    source = Source(seed)
    index = build(double, source)
    there = expected(double, source)
    assert all(hashes <= there[tier] for tier, hashes in index.held().items())


@given(seeds)
@settings(max_examples=25)
def test_mooncake_has_the_base_models_gpu_blocks_by_vllms_hashes(seed: int) -> None:
    source = Source(seed)
    index = build("mooncake", source)
    base = {block.name for chosen in PROMPTS if chosen.lora_name is None for block in chosen.blocks}
    assert index.held == said("mooncake", source.names("GPU") & base)
    for chosen in PROMPTS:
        if chosen.lora_name is None:
            hashes = [int.from_bytes(block.name[-8:], "big") for block in chosen.blocks]
            assert index.match(hashes) == {"GPU": source.prefix("GPU", chosen)}
    assert not index.stale


@given(seeds)
@settings(max_examples=25)
def test_aibrix_has_the_gpu_blocks_of_prompts_that_differ_by_tokens(seed: int) -> None:
    source = Source(seed, PROMPTS[:3])
    index = build("aibrix", source)
    assert index.tree.held().get("pod", set()) == said("aibrix", source.names("GPU"))
    for chosen in source.prompts:
        assert index.match(chosen.tokens) == {"GPU": source.prefix("GPU", chosen)}


@given(seeds)
@settings(max_examples=25)
def test_aibrix_never_holds_what_is_gone(seed: int) -> None:
    """It removes a prefix whoever else has it: less than there is, never more."""
    source = Source(seed)
    held = build("aibrix", source).tree.held().get("pod", set())
    assert held <= said("aibrix", source.names("GPU"))


def test_aibrix_hashes_are_those_it_makes_of_the_engines_digests() -> None:
    digest = PROMPTS[0].blocks[0].name
    assert hash_in(HashForm.HIGH64_SIGNED, digest) == aibrix.int64(digest)


# strictness


def run_of(chosen: Prompt, medium: str = "GPU", **changes: Any) -> BlockStoreMeta:
    """The whole prompt, stored at once."""
    digests = b"".join(block.name for block in chosen.blocks)
    keys = [block.extra_keys for block in chosen.blocks]
    meta = BlockStoreMeta(MAIN, medium, 32, digests, pack_int32(chosen.tokens), None, None, None, keys)
    return msgspec.structs.replace(meta, **changes)


ODD = PROMPTS[8]
REFUSES = {
    "dynamo": {"vllm", "vllm-array"},
    "dynamo relay": {"vllm", "vllm-array"},
    "vllm-router": {"vllm-array", "llm-d", "aibrix", "sglang"},
    "llm-d": set(),
    "llm-d, old": {"vllm", "dynamo", "vllm-router", "mooncake", "sglang"},
    "mooncake": {"vllm-array", "llm-d", "aibrix", "sglang"},
    "aibrix": {"vllm", "dynamo", "vllm-router", "mooncake", "sglang"},
    "sglang": {"vllm", "vllm-array", "dynamo", "vllm-router", "mooncake"},
}
"""Dialects of which a batch with high hashes and odd extra keys is refused."""


def refused(double: str, dialect: str, *batch: Announcement) -> bool:
    index = DOUBLES[double][1]()
    payload = encode(DIALECTS[dialect], batch, 1.5, 0)
    try:
        index.feed(live_frames(TOPIC.get(DOUBLES[double][0], b""), 0, payload))
    except Refused:
        return True
    return False


def high_hashes(chosen: Prompt) -> bytes:
    """The prompt's digests with every word's top bit set."""
    return b"".join(bytes(byte | 0x80 for byte in block.name) for block in chosen.blocks)


@pytest.mark.parametrize("double", DOUBLES)
def test_a_double_refuses_what_the_real_one_refuses(double: str) -> None:
    batch = run_of(ODD, block_hashes=high_hashes(ODD))
    assert {name for name in DIALECTS if refused(double, name, batch)} == REFUSES[double]


def broken(double: str, change: Callable[[list[Any]], Any], *batch: Announcement) -> bool:
    """Whether the double refuses its own dialect after a change to the decoded batch."""
    dialect = DIALECTS[DOUBLES[double][0]]
    value = msgspec.msgpack.decode(encode(dialect, batch or (run_of(PROMPTS[0]),), 1.5, 0))
    value = change(value) or value
    index = DOUBLES[double][1]()
    try:
        index.feed(live_frames(TOPIC.get(dialect.name, b""), 0, msgspec.msgpack.encode(value)))
    except Refused:
        return True
    return False


def put(key: Hashable, value: Any) -> Callable[[list[Any]], None]:
    def change(batch: list[Any]) -> None:
        batch[1][0][key] = value

    return change


def drop(key: str) -> Callable[[list[Any]], None]:
    def change(batch: list[Any]) -> None:
        del batch[1][0][key]

    return change


@pytest.mark.parametrize(
    ("double", "change", "refuses"),
    [
        ("dynamo", lambda batch: [*batch, b"p" * 16], True),
        ("dynamo", lambda batch: batch[:2], True),
        ("dynamo", lambda batch: [*batch[:2], None], False),
        ("dynamo", put("block_hashes", [b"h" * 32] * 8), True),
        ("dynamo", put("block_hashes", [-5] * 8), False),
        ("dynamo", put("type", "BlockPinned"), True),
        ("dynamo", put("brand_new", 1), False),
        ("dynamo", put("extra_keys", [[b"x"]]), True),
        ("dynamo", put("extra_keys", [["x"]]), False),
        ("dynamo", drop("token_ids"), True),
        ("vllm-router", lambda batch: batch[:2], False),
        ("vllm-router", lambda batch: [*batch, b"p" * 16], True),
        ("vllm-router", lambda batch: [*batch[:2], 1], True),
        ("vllm-router", put("lookahead_token_ids", [[1]] * 8), True),
        ("vllm-router", put("locality", "LOCAL"), False),
        ("vllm-router", put("block_hashes", [-5] * 8), True),
        ("vllm-router", put("block_hashes", [b"h" * 32] * 8), False),
        ("vllm-router", put("block_hashes", []), True),
        ("vllm-router", drop("lora_id"), True),
        ("llm-d", put(0, "BlockPinned"), True),
        ("llm-d", put(1, [5] * 8), False),
        ("llm-d, old", put(1, [5] * 8), True),
        ("mooncake", lambda batch: [1, *batch[1:]], True),
        ("mooncake", lambda batch: batch[:2], True),
        ("mooncake", lambda batch: [*batch[:2], 3], True),
        ("mooncake", put("brand_new", 1), False),
        ("mooncake", put("block_hashes", [-5] * 8), True),
        ("mooncake", drop("medium"), True),
        ("aibrix", lambda batch: [1, *batch[1:]], True),
        ("aibrix", lambda batch: [*batch[:2], None], True),
        ("aibrix", put(1, [b"h" * 32]), False),
        ("sglang", put("block_hashes", [2**63] * 8), True),
        ("sglang", drop("medium"), False),
        ("sglang", put("brand_new", 1), False),
    ],
)
def test_single_rules_of_the_table(double: str, change: Callable[[list[Any]], Any], refuses: bool) -> None:
    assert broken(double, change) is refuses


@pytest.mark.parametrize("double", DOUBLES)
def test_an_empty_batch_and_a_clear_are_taken(double: str) -> None:
    assert not refused(double, DOUBLES[double][0])
    assert not refused(double, DOUBLES[double][0], Cleared())


def test_small_hashes_are_lifted_for_the_old_llm_d() -> None:
    digests = b"".join(bytes(31) + bytes([number]) for number in range(8))
    index = llm_d.Index(BLOCK, old=True)
    feed(index, "llm-d", [(run_of(PROMPTS[0], block_hashes=digests),)])
    assert index.match(PROMPTS[0].tokens) == {"gpu": 8}
    feed(index, "llm-d", [(RemovedRun(MAIN, "GPU", (digests[-32:],)),)], 1)
    assert index.match(PROMPTS[0].tokens) == {"gpu": 7}


# what an index does with numbers, topics and parents


@pytest.mark.parametrize("double", ["vllm-router", "llm-d"])
def test_a_lower_number_is_a_restart(double: str) -> None:
    dialect, make = DOUBLES[double]
    index = make()
    feed(index, dialect, [(run_of(PROMPTS[0]),)], 9)
    feed(index, dialect, [(run_of(PROMPTS[2]),)], 3)
    assert not any(index.match(PROMPTS[0].tokens).values())
    assert any(index.match(PROMPTS[2].tokens).values())


def test_dynamo_takes_a_lower_number_for_stale_and_the_relay_does_not() -> None:
    for double, blocks in (("dynamo", 0), ("dynamo relay", 3)):
        index = DOUBLES[double][1]()
        feed(index, "dynamo", [()], 9)
        feed(index, "dynamo", [(run_of(PROMPTS[2]),)], 3)
        assert index.match(PROMPTS[2].tokens)["gpu"] == blocks


def test_dynamo_drops_a_device_block_whose_parent_is_only_on_the_host() -> None:
    whole = run_of(PROMPTS[0])
    index = dynamo.Index(BLOCK)
    host = msgspec.structs.replace(whole.part(0, 4), medium="CPU")
    feed(index, "dynamo", [(host, whole.part(4, 8))])
    assert index.match(PROMPTS[0].tokens) == {"gpu": 0, "cpu": 4, "disk": 4}


def test_dynamo_finds_a_host_block_whose_parent_is_only_on_the_device() -> None:
    whole = run_of(PROMPTS[0])
    index = dynamo.Index(BLOCK)
    feed(index, "dynamo", [(whole.part(0, 4), msgspec.structs.replace(whole.part(4, 8), medium="CPU"))])
    assert index.match(PROMPTS[0].tokens) == {"gpu": 4, "cpu": 8, "disk": 8}


@pytest.mark.parametrize(("medium", "left"), [("GPU", 4), ("CPU", 8), ("STORAGE", 8)])
def test_dynamo_loses_what_hangs_behind_a_removed_device_block(medium: str, left: int) -> None:
    index = dynamo.Index(BLOCK)
    whole = run_of(PROMPTS[0], medium=medium)
    gone = RemovedRun(MAIN, medium, (whole.hash_at(3),))
    feed(index, "dynamo", [(whole, gone)])
    assert index.match(PROMPTS[0].tokens)["disk"] == 3
    feed(index, "dynamo", [(whole.part(3, 4),)], 1)
    assert index.match(PROMPTS[0].tokens)["disk"] == left


@pytest.mark.parametrize("change", [put("ownership", "fs"), put("locality", "REMOTE"), put("medium", "gpu")])
def test_dynamo_drops_events_without_a_word(change: Callable[[list[Any]], None]) -> None:
    batch = msgspec.msgpack.decode(encode(DIALECTS["dynamo"], (run_of(PROMPTS[0]), run_of(PROMPTS[2])), 1.5, 0))
    change(batch)
    index = dynamo.Index(BLOCK)
    index.feed(live_frames(b"", 0, msgspec.msgpack.encode(batch)))
    assert [index.match(chosen.tokens)["gpu"] for chosen in (PROMPTS[0], PROMPTS[2])] == [0, 3]


def test_the_relay_counts_references_and_the_indexer_does_not() -> None:
    gone = RemovedRun(MAIN, "GPU", tuple(block.name for block in reversed(PROMPTS[0].blocks)))
    for relay, left in ((True, 8), (False, 0)):
        index = dynamo.Index(BLOCK, relay=relay)
        feed(index, "dynamo", [(run_of(PROMPTS[0]), run_of(PROMPTS[0]), gone)])
        assert index.match(PROMPTS[0].tokens)["gpu"] == left
        feed(index, "dynamo", [(gone,)], 1)
        assert index.held() == {}


def test_mooncake_is_stale_after_a_hole() -> None:
    index = mooncake.Index(BLOCK)
    feed(index, "mooncake", [(run_of(PROMPTS[0]),)], 4)
    feed(index, "mooncake", [()], 6)
    assert (index.stale, index.held) == (True, set())


def test_topics() -> None:
    payload = encode(DIALECTS["llm-d"], (run_of(PROMPTS[0]),), 1.5, 0)
    with pytest.raises(Refused, match="topic"):
        llm_d.Index(BLOCK).feed(live_frames(b"kv-events", 0, payload))
    llm_d.Index(BLOCK).feed(live_frames(b"node:n1", 0, payload))
    router = vllm_router.Index(BLOCK)
    router.feed(live_frames(b"kv@pod@model", 0, payload))
    assert router.tree.held() == {}


@pytest.mark.parametrize(("count", "why"), [(4096, ""), (4097, "events")])
def test_vllm_router_refuses_a_batch_of_too_many_events(count: int, why: str) -> None:
    payload = encode(DIALECTS["vllm-router"], [Cleared()] * count, 1.5, 0)
    with pytest.raises(Refused, match=why) if why else nullcontext():
        vllm_router.Index(BLOCK).feed(live_frames(b"", 0, payload))


@pytest.mark.parametrize(("more", "why"), [(0, "no array"), (1, "16 MiB")])
def test_vllm_router_refuses_a_payload_that_is_too_large(more: int, why: str) -> None:
    size = vllm_router.MOST_BYTES + more
    payload = b"\xc6" + (size - 5).to_bytes(4, "big") + bytes(size - 5)
    with pytest.raises(Refused, match=why):
        vllm_router.Index(BLOCK).feed(live_frames(b"", 0, payload))


def test_llm_d_would_take_a_disk_for_the_gpu() -> None:
    index = llm_d.Index(BLOCK)
    feed(index, "llm-d", [(run_of(PROMPTS[0], medium="STORAGE"), run_of(PROMPTS[2], medium="CPU"))])
    assert (index.score(PROMPTS[0].tokens), index.score(PROMPTS[2].tokens)) == (0.0, pytest.approx(2.4))


def test_aibrix_chains_many_hashes_wrongly() -> None:
    index = aibrix.Index(BLOCK)
    payload = encode(msgspec.structs.replace(DIALECTS["aibrix"], one_hash=False), (run_of(PROMPTS[0]),), 1.5, 0)
    index.feed(live_frames(b"", 0, payload))
    assert index.match(PROMPTS[0].tokens) == {"GPU": 1}


def test_the_stream_is_rich() -> None:
    """Else the tests above would prove little."""
    items = [item for seed in range(10) for batch in Source(seed).batches(40) for item in batch]
    kinds = Counter((type(item).__name__, getattr(item, "inner", False)) for item in items)
    assert set(kinds) == {("BlockStoreMeta", False), ("BlockStoreMeta", True), ("RemovedRun", False),
                          ("RemovedRun", True), ("Cleared", False)}  # fmt: skip
    assert min(kinds.values()) >= 10
    stored = [item for item in items if isinstance(item, BlockStoreMeta)]
    assert {item.medium for item in stored} == set(MEDIA)
    assert {item.lora_name for item in stored} == {None, "ada", "bob"}
    assert any(item.parent_block_hash for item in stored if not item.inner)
