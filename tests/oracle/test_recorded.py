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
    assert verdict.compared
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
