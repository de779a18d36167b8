"""Our side against vLLM's recorded answers, and a side broken on purpose: the comparison must see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvevents_service.wire.control import Offer
from kvevents_service.wire.events import BlockRemoved, BlockStored, Event
from oracle.compare import KINDS, Verdict, compare
from oracle.our_side import Breakage, play
from oracle.recorded import FOLDER, recorded
from oracle.script import Answer, Script

CASES = list(recorded())
NAMES = [script["name"] for script, _ in CASES]
MAX_BYTES = 300_000


def judge(script: Script, answers: list[Answer], breakage: Breakage | None = None) -> Verdict:
    return compare(script, answers, play(script, answers, breakage))


@pytest.mark.parametrize(("script", "answers"), CASES, ids=NAMES)
def test_we_agree_with_vllm(script: Script, answers: list[Answer]) -> None:
    verdict = judge(script, answers)
    assert verdict.unexplained == []
    assert verdict.compared or verdict.argued
    assert set(verdict.argued) <= set(KINDS)


def test_the_recorded_set_is_small_and_shows_every_difference() -> None:
    assert len(CASES) >= 12
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < MAX_BYTES
    shown = {kind for script, answers in CASES for kind in judge(script, answers).argued}
    assert shown == set(KINDS)


class BreakOffer(Breakage):
    def __init__(self, change: Callable[[Offer], Offer]) -> None:
        self.change = change

    def offer(self, offer: Offer) -> Offer:
        return self.change(offer)


class BreakEvent(Breakage):
    def __init__(self, change: Callable[[BlockStored], Event | None]) -> None:
        self.change = change

    def event(self, event: Event) -> Event | None:
        return self.change(event) if isinstance(event, BlockStored) else event


def replace(**fields: object) -> BreakEvent:
    return BreakEvent(lambda event: msgspec.structs.replace(event, **fields))


def wrong_parent(event: BlockStored) -> BlockStored:
    return msgspec.structs.replace(event, parent_block_hash=(event.parent_block_hash or 0) and 1)


def shifted_tokens(event: BlockStored) -> BlockStored:
    return msgspec.structs.replace(event, token_ids=[*event.token_ids[1:], 0])


def shifted_image(event: BlockStored) -> BlockStored:
    """Every image lies one token further on."""
    keys = [[moved(key) for key in entry] for entry in event.extra_keys or [] if isinstance(entry, list | tuple)]
    return msgspec.structs.replace(event, extra_keys=keys)


def moved(key: Any) -> Any:
    return (key[0], key[1] + 1) if isinstance(key, list | tuple) else key


def short(event: BlockStored) -> BlockStored:
    """Without its last block."""
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[:-1],
        token_ids=event.token_ids[: -event.block_size],
        extra_keys=event.extra_keys and event.extra_keys[:-1],
    )


def renamed(event: BlockStored) -> BlockStored:
    return msgspec.structs.replace(event, block_hashes=[7, *event.block_hashes[1:]])


BROKEN = {
    "the chain starts anew": BreakOffer(lambda offer: msgspec.structs.replace(offer, parent=None)),
    "tokens of another block": BreakOffer(
        lambda offer: msgspec.structs.replace(offer, token_ids=offer.token_ids[4:] + offer.token_ids[:4])
    ),
    "no adapter": BreakOffer(lambda offer: msgspec.structs.replace(offer, lora_id=None, lora_name=None)),
    "no extra keys": BreakOffer(lambda offer: msgspec.structs.replace(offer, extra_keys=None)),
    "wrong parent": BreakEvent(wrong_parent),
    "shifted tokens": BreakEvent(shifted_tokens),
    "image offset": BreakEvent(shifted_image),
    "adapter's number": replace(lora_id=9),
    "medium": replace(medium="GPU"),
    "group": replace(group_idx=1),
    "kind": replace(kv_cache_spec_kind="sliding_window"),
    "window": replace(kv_cache_spec_sliding_window=128),
    "locality": replace(locality="REMOTE"),
    "block size": replace(block_size=5),
    "a store that is not told": BreakEvent(lambda event: None),
    "the last block is not told": BreakEvent(short),
    "another hash": BreakEvent(renamed),
    "removed instead": BreakEvent(lambda event: BlockRemoved(event.block_hashes, event.medium, event.group_idx)),
}


@pytest.mark.parametrize("breakage", BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_unexplained(breakage: Breakage) -> None:
    by_name = {script["name"]: (script, answers) for script, answers in CASES}
    assert judge(*by_name["everything"], breakage).unexplained


def of_group(index: int, change: Callable[[Offer], Offer]) -> BreakOffer:
    return BreakOffer(lambda offer: change(offer) if offer.group == index else offer)


def of_kind(kind: str, **fields: object) -> BreakEvent:
    """Fields of the stored events of one kind."""
    changed = replace(**fields).change
    return BreakEvent(lambda event: changed(event) if event.kv_cache_spec_kind == kind else event)


def null_blocks_shift(offer: Offer) -> Offer:
    """The tokens of a run behind null blocks are taken as if those blocks were not there."""
    return msgspec.structs.replace(offer, token_ids=offer.token_ids[4:] + offer.token_ids[:4])


def without_metadata(event: BlockStored) -> BlockStored:
    """As vLLM announces what it has no snapshot of."""
    empty = {"token_ids": [], "parent_block_hash": None, "lora_id": None, "lora_name": None, "extra_keys": None}
    return msgspec.structs.replace(event, **empty)


def resized(event: BlockStored, size: int) -> BlockStored:
    """An inner name with the size of a whole block."""
    inner = event.block_size < size and event.kv_cache_spec_kind == "full_attention"
    return msgspec.structs.replace(event, block_size=size) if inner else event


def with_parents(offer: Offer, parent: bytes) -> Offer:
    """Every inner name behind another unit."""
    inner = [msgspec.structs.replace(name, parent=parent) for name in offer.inner or ()]
    return msgspec.structs.replace(offer, inner=inner or None)


def with_extra_keys(offer: Offer, keys: tuple[str, ...]) -> Offer:
    inner = [msgspec.structs.replace(name, extra_keys=keys) for name in offer.inner or ()]
    return msgspec.structs.replace(offer, inner=inner or None)


class OneRankIsEnough(Breakage):
    def ranks(self, ranks: int) -> int:
        return 1


CHUNK = "chunked_local_attention"
BROKEN_GROUPS = {
    "null blocks shift the tokens": ("all kinds", of_group(1, null_blocks_shift)),
    "null blocks and the parent": ("all kinds", of_group(1, lambda o: msgspec.structs.replace(o, parent=None))),
    "a state's tokens": ("all kinds", of_group(2, null_blocks_shift)),
    "a state's parent": ("all kinds", of_group(2, lambda o: msgspec.structs.replace(o, parent=None))),
    "the window in the other group": ("all kinds", of_kind("sliding_window", group_idx=0)),
    "the state in the other group": ("all kinds", of_kind("mamba", group_idx=1)),
    "a kind too plain": ("mla window", of_kind("sliding_window_mla", kv_cache_spec_kind="sliding_window")),
    "mla is full attention": ("mla window", of_kind("mla_attention", kv_cache_spec_kind="full_attention")),
    "no window": ("all kinds", of_kind("sliding_window", kv_cache_spec_sliding_window=None)),
    "the chunk is another": ("a hit in the middle of a chunk", of_kind(CHUNK, kv_cache_spec_sliding_window=4)),
    "the block of one rank": ("dcp groups", of_kind("mla_attention", block_size=2)),
    "an empty state": ("all kinds", BreakEvent(without_metadata)),
    "an empty lazy store": ("lazy window", BreakEvent(without_metadata)),
    "no inner names": ("wide full", BreakOffer(lambda offer: msgspec.structs.replace(offer, inner=None))),
    "an inner name's size": ("wide full", BreakEvent(lambda event: resized(event, 8))),
    "an inner name's parent": ("wide full", BreakOffer(lambda offer: with_parents(offer, b"p" * 32))),
    "a tail's extra keys": ("a prompt's tail", BreakOffer(lambda offer: with_extra_keys(offer, ("another",)))),
    "one rank is enough": ("four ranks", OneRankIsEnough()),
    "a group is never stored": (
        "mla window", BreakEvent(lambda event: None if event.kv_cache_spec_kind == "sliding_window_mla" else event),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "breakage"), BROKEN_GROUPS.values(), ids=BROKEN_GROUPS)
def test_what_is_wrong_in_a_group_is_unexplained(name: str, breakage: Breakage) -> None:
    by_name = {script["name"]: (script, answers) for script, answers in CASES}
    assert judge(*by_name[name], breakage).unexplained


@pytest.mark.parametrize(("name", "kind"), [("all kinds", "mamba"), ("lazy window", "full_attention")])
def test_half_the_metadata_of_vllm_is_not_argued(name: str, kind: str) -> None:
    """What may be empty may not be wrong."""
    script, answers = next(case for case in CASES if case[0]["name"] == name)
    changed = json.loads(json.dumps(answers))
    events = [event for answer in changed for event in answer["events"] if event.get("kind") == kind]
    events[0]["tokens"] = [1, 2, 3, 4]
    assert not judge(script, answers).unexplained
    assert judge(script, changed).unexplained


def test_removals_that_are_not_told_are_unexplained() -> None:
    class Silent(Breakage):
        def event(self, event: Event) -> Event | None:
            return None if isinstance(event, BlockRemoved) else event

    assert sum(bool(judge(script, answers, Silent()).unexplained) for script, answers in CASES) >= 2


def test_an_eviction_without_need_is_unexplained() -> None:
    script, answers = next(case for case in CASES if case[0]["name"] == "everything")
    results = play(script, answers)
    number, stored = next((number, event) for number, result in enumerate(results) for event in result["events"])
    leaf = {key: stored[key] for key in ("medium", "group", "locality")} | {"hashes": stored["hashes"][-1:]}
    results[number + 1]["events"].append({"type": "BlockRemoved", **leaf})
    assert any("blocks free" in what for what in compare(script, answers, results).unexplained)


def test_a_wrong_event_of_vllm_is_unexplained_too() -> None:
    script, answers = next(case for case in CASES if case[0]["name"] == "everything")
    changed = json.loads(json.dumps(answers))
    stored = next(event for answer in changed for event in answer["events"])
    stored["lora_name"] = "another"
    assert judge(script, changed).unexplained
