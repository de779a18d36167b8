"""Extra keys: those that vLLM publishes, whatever the block size, wherever a walk begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.engine.identity import PLAIN, Identity, KeyWalk, MediaItem

RECORDED = [json.loads(line) for line in Path(__file__).with_name("extra_keys.jsonl").read_text().splitlines()]
"""What vLLM 0.33 said; record_extra_keys.py made it."""


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return tuple(map(from_json, value)) if isinstance(value, list) else value


def recorded_identity(case: dict[str, Any]) -> Identity:
    digests = {tuple(map(int, span.split("-"))): bytes.fromhex(name) for span, name in case["digests"].items()}
    media = tuple(MediaItem(*item) for item in case["media"])
    return Identity(
        *(case["lora"] or (None, None)),
        case["salt"],
        media,
        (lambda start, stop: digests[start, stop]) if digests else None,
    )


def test_the_recorded_cases_hold_every_kind_of_key() -> None:
    assert len(RECORDED) == 80
    assert {bool(case["digests"]) for case in RECORDED} == {True, False}
    entries = [entry for case in RECORDED for walk in case["walks"] for entry in walk["keys"] if entry]
    offsets = [key[1] for entry in entries for key in entry if isinstance(key, list)]
    assert min(offsets) < 0 < max(offsets)
    assert max(map(len, entries)) >= 4


@pytest.mark.parametrize("fresh", [True, False], ids=["each walk from new", "one cursor for all walks"])
@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_keys_are_those_of_vllm(number: int, fresh: bool) -> None:
    case = RECORDED[number]
    identity = recorded_identity(case)
    one = KeyWalk(identity, case["block_size"])
    for recorded in case["walks"]:
        walk = KeyWalk(identity, case["block_size"]) if fresh else one
        first, stop = recorded["blocks"]
        expected = [entry if entry is None else from_json(entry) for entry in recorded["keys"]]
        assert walk.keys(first, stop) == (expected if any(expected) else None)


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    gaps = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), max_size=6))
    media, at = [], 0
    for number, (gap, length) in enumerate(gaps):
        media.append(MediaItem(f"image-{number}", at + gap, length))
        at += gap + length
    embeds = draw(st.none() | st.just(lambda start, stop: b"%d-%d" % (start, stop)))
    name, salt = draw(st.none() | st.just("adapter")), draw(st.none() | st.just("salt"))
    return Identity(1 if name else None, name, salt, tuple(media), embeds)


def naive(identity: Identity, start: int, stop: int) -> tuple[Any, ...] | None:
    """The rule in words: every item with a token in [start, stop), and where it begins seen from `start`."""
    keys: list[Any] = [identity.lora_name] if identity.lora_name else []
    inside = set(range(start, stop))
    keys += [
        (item.identifier, item.offset - start)
        for item in identity.media
        if inside & set(range(item.offset, item.offset + item.length))
    ]
    keys += [identity.salt] if identity.salt and start == 0 else []
    keys += [identity.embeds(start, stop)] if identity.embeds else []
    return tuple(keys) or None


@given(identities(), st.sampled_from([4, 16, 24, 64]), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9))))
def test_any_walk_says_what_the_rule_says(identity: Identity, size: int, spans: list[tuple[int, int]]) -> None:
    walk = KeyWalk(identity, size)
    for first, length in spans:
        expected = [naive(identity, block * size, (block + 1) * size) for block in range(first, first + length)]
        assert walk.keys(first, first + length) == (expected if any(expected) else None)


def test_groups_of_different_block_sizes_have_cursors_of_their_own() -> None:
    identity = Identity(media=(MediaItem("cat", 10, 30), MediaItem("dog", 44, 4)))
    small, large = KeyWalk(identity, 16), KeyWalk(identity, 32)
    assert small.keys(0, 3) == [(("cat", 10),), (("cat", -6),), (("cat", -22), ("dog", 12))]
    assert large.keys(0, 2) == [(("cat", 10),), (("cat", -22), ("dog", 12))]
    assert small.keys(3, 9) is None


def test_a_plain_request_costs_no_entries() -> None:
    assert KeyWalk(PLAIN, 16).keys(0, 1_000_000) is None


class CountedItem(MediaItem):
    """An item that counts how often it is looked at."""

    looks = 0

    @property
    def end(self) -> int:
        CountedItem.looks += 1
        return self.offset + self.length


def test_a_walk_looks_at_each_block_and_item_a_few_times() -> None:
    items = tuple(CountedItem(f"i{n}", 20 * n, 10) for n in range(1000))
    walk = KeyWalk(Identity(media=items), 16)
    CountedItem.looks = 0
    for block in range(1250):
        walk.keys(block, block + 1)
    assert CountedItem.looks < 5 * (1250 + 1000)


def test_an_item_that_outlasts_a_later_one_is_forgotten_behind_it_as_in_vllm() -> None:
    """vLLM takes the last item to end last; what it hashes is what is to be said."""
    walk = KeyWalk(Identity(media=(MediaItem("long", 0, 100), MediaItem("short", 10, 10))), 16)
    assert walk.keys(0, 4) == [(("long", 0),), (("long", -16),), None, None]
