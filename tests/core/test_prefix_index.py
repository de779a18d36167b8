"""What a prompt finds: against an index that stores whole prefixes in plain dicts, and the cases people hit."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.holders import Held
from kvevents_service.core.prefix_index import BlockIndex
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

SIZE = 2
A, B = "pod-a", "pod-b"


def store(
    hashes: list[BlockHash],
    tokens: Iterable[int],
    parent: BlockHash | None = None,
    medium: str | None = "GPU",
    **rest: object,
) -> BlockStored:
    lora_name = rest.pop("lora_name", None)
    block_size = rest.pop("block_size", SIZE)
    return BlockStored(hashes, parent, list(tokens), block_size, None, medium, lora_name, **rest)


def remove(*hashes: BlockHash, medium: str | None = "GPU", group_idx: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group_idx)


def index(*events: Event, **options: int) -> BlockIndex:
    made = BlockIndex(**options)
    made.apply(A, events)
    return made


def empty(made: BlockIndex) -> bool:
    """Nothing is left behind, in any of its books."""
    holders = made._holders.values()
    kept = [shelf.keys or shelf.again for holder in holders for shelf in holder.shelves.values()]
    waiting = [holder.orphans or holder.waiting for holder in holders]
    return not len(made) and not any(kept) and not any(waiting)


class TestPrefix:
    def test_by_source_and_tier_and_over_all_tiers(self) -> None:
        made = index(store([1, 2], [1, 1, 2, 2]), store([3], [3, 3], 2, "CPU"), store([1], [1, 1], None, "CPU"))
        made.apply(B, [store([8], [1, 1], medium="STORAGE")])
        assert made.match([1, 1, 2, 2, 3, 3, 4, 4]) == {
            A: Held(6, {"GPU": 4, "CPU": 2}),
            B: Held(2, {"STORAGE": 2}),
        }

    def test_it_is_contiguous_from_the_first_block(self) -> None:
        made = index(store([1, 2, 3], [1, 1, 2, 2, 3, 3]), remove(2))
        assert made.match([1, 1, 2, 2, 3, 3]) == {A: Held(2, {"GPU": 2})}
        made.apply(A, [store([2], [2, 2], 1)])
        assert made.match([1, 1, 2, 2, 3, 3]) == {A: Held(6, {"GPU": 6})}

    @pytest.mark.parametrize("tokens", [[], [1], [2, 2], [2, 2, 1, 1]])
    def test_prompts_that_find_nothing(self, tokens: list[int]) -> None:
        assert index(store([1, 2], [1, 1, 2, 2])).match(tokens) == {}

    def test_equal_text_at_another_place_is_another_block(self) -> None:
        made = index(store([1, 2, 3, 4], [1] * 8))
        assert len(made) == 4
        assert made.match([1] * 6) == {A: Held(6, {"GPU": 6})}

    def test_every_block_size_has_prefixes_of_its_own(self) -> None:
        made = index(store([1, 2], [1, 1, 2, 2]))
        made.apply(B, [store([1], [1, 1, 2, 2], block_size=4)])
        assert made.match([1, 1, 2, 2, 3]) == {A: Held(4, {"GPU": 4}), B: Held(4, {"GPU": 4})}
        assert made.match([1, 1, 2]) == {A: Held(2, {"GPU": 2})}

    def test_the_engines_own_hashes(self) -> None:
        made = index(store([1, 2], [1, 1, 2, 2]), store([3], [3, 3], 2, "CPU"), store([1], [1, 1], None, "CPU"))
        assert made.match_hashes([1, 2, 3, 4]) == {A: Held(6, {"GPU": 4, "CPU": 2})}
        assert made.match_hashes([2]) == {A: Held(2, {"GPU": 2})}
        assert made.match_hashes([9]) == {}

    @pytest.mark.parametrize("other", [2**64 - 5, -5, (2**64 - 5).to_bytes(32, "big")])
    def test_the_forms_of_a_hash_are_one(self, other: BlockHash) -> None:
        made = index(store([-5], [1, 1]), store([2], [2, 2], other))
        assert made.match([1, 1, 2, 2]) == {A: Held(4, {"GPU": 4})}
        made.apply(A, [remove(other), remove(2)])
        assert empty(made)

    def test_tokens_that_are_none(self) -> None:
        with pytest.raises(ValueError, match="token_ids"):
            index().match([2**40])


class TestIdentity:
    def test_adapter_salt_and_image_are_all_distinct(self) -> None:
        made, tokens = BlockIndex(), [1, 1, 2, 2]
        asked = []
        for number, (lora, salt, image) in enumerate(
            (lora, salt, image) for lora in (None, "a", "b") for salt in (None, "x") for image in (None, "i", "j")
        ):
            own = [part for part in (lora, image and [image, 0]) if part]
            extra = [[*own, salt] if salt else own or None, own or None]
            made.apply(number, [store([1, 2], tokens, lora_name=lora, extra_keys=extra)])
            images = [[[image, 0]], [[image, 0]]] if image else None
            asked.append({"lora_name": lora, "salt": salt, "extra_keys": images})
        for number, identity in enumerate(asked):
            assert made.match(tokens, **identity) == {number: Held(4, {"GPU": 4})}, identity

    def test_a_bare_string_equal_to_the_adapter_is_the_adapter(self) -> None:
        made = index(store([1], [1, 1], lora_name="x", extra_keys=["x"]))
        assert made.match([1, 1], lora_name="x")
        assert not made.match([1, 1], salt="x")

    def test_an_adapter_that_is_only_in_the_name(self) -> None:
        made = index(store([1], [1, 1], lora_name="x"))
        assert made.match([1, 1], lora_name="x")
        assert not made.match([1, 1])


class TestRemoval:
    def test_one_tier_of_two(self) -> None:
        made = index(store([1], [1, 1]), store([1], [1, 1], medium="CPU"), remove(1))
        assert made.match([1, 1]) == {A: Held(2, {"CPU": 2})}
        made.apply(A, [remove(1, medium="cpu_pinned")])
        assert empty(made)

    def test_what_was_never_stored(self) -> None:
        made = index(remove(7), store([1], [1, 1]), remove(7), remove(7, medium="X"))
        assert made.counts["removed_unknown"] == 3
        assert made.match([1, 1]) == {A: Held(2, {"GPU": 2})}
        assert "X" not in made._holders[A].shelves

    def test_two_hashes_of_equal_content(self) -> None:
        made = index(store([1], [1, 1]), store([2], [1, 1]), store([2], [1, 1]), remove(1))
        assert made.match([1, 1]) == {A: Held(2, {"GPU": 2})}
        made.apply(A, [remove(2)])
        assert empty(made)

    def test_a_hash_that_is_stored_again_with_other_content(self) -> None:
        made = index(store([1], [1, 1]), store([1], [5, 5]))
        assert (made.match([1, 1]), made.match([5, 5])) == ({}, {A: Held(2, {"GPU": 2})})

    def test_a_clear_is_of_one_source(self) -> None:
        made = index(store([1, 2], [1, 1, 2, 2]), store([1], [1, 1], medium="CPU"))
        made.apply(B, [store([1], [1, 1])])
        made.apply(A, [AllBlocksCleared()])
        assert made.match([1, 1, 2, 2]) == {B: Held(2, {"GPU": 2})}
        made.apply("pod-c", [store([1], [9, 9])])  # takes over the bits that are free now
        assert made.match([1, 1]) == {B: Held(2, {"GPU": 2})}
        made.forget(B)
        made.forget("pod-c")
        assert empty(made)

    def test_a_million_prefixes_come_and_go(self) -> None:
        made = BlockIndex()

        def churn(rounds: range) -> None:
            for one in rounds:
                blocks = list(range(one * 100, one * 100 + 100))
                made.apply(A, [store(blocks, (block for block in blocks for _ in range(SIZE)))])
                made.apply(A, [remove(*blocks, -1)])

        churn(range(500))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        churn(range(500, 10_000))
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert empty(made)
        assert grown_kib < 8 * 1024


class TestOrphans:
    def test_they_wait_for_their_parent(self) -> None:
        made = index(store([3], [3, 3], 1), store([4, 5], [4, 4, 5, 5], 3, "CPU"))
        assert made.match([3, 3]) == {}
        assert made.stats()["orphans"] == 3
        made.apply(A, [store([1], [1, 1])])
        assert made.match([1, 1, 3, 3, 4, 4, 5, 5]) == {A: Held(8, {"GPU": 4})}
        assert (made.stats()["orphans"], made.counts["orphans_linked"]) == (0, 3)
        made.apply(A, [remove(1, 3), remove(4, 5, medium="CPU")])
        assert empty(made)

    def test_removed_while_they_wait(self) -> None:
        made = index(store([3, 4], [3, 3, 4, 4], 1), remove(4, 3))
        assert empty(made)
        assert made.counts["removed_unknown"] == 0

    def test_stored_again_with_a_parent_that_is_known(self) -> None:
        made = index(store([3], [3, 3], 1), store([3], [3, 3]))
        assert made.match([3, 3])
        assert made.stats()["orphans"] == 0

    def test_they_are_bounded(self) -> None:
        made = index(*(store([block], [1, 1], block + 1000) for block in range(10)), max_orphans=4)
        assert (made.stats()["orphans"], made.counts["orphans_dropped"]) == (4, 6)
        made.apply(A, [AllBlocksCleared()])
        assert empty(made)

    def test_a_parent_on_another_tier_is_known(self) -> None:
        made = index(store([1], [1, 1], medium="CPU"), store([2], [2, 2], 1))
        assert made.match([1, 1, 2, 2]) == {A: Held(4, {"CPU": 2})}


class TestStoresLeftOut:
    def test_only_the_main_group_counts(self) -> None:
        made = index(
            store([1], [1, 1], group_idx=1, kv_cache_spec_kind="sliding_window"),
            store([1], [1, 1], group_idx=2, kv_cache_spec_kind="full_attention"),
            store([2], [2, 2], 1, group_idx=2, kv_cache_spec_kind="full_attention"),
            store([2], [2, 2], 1, group_idx=1, kv_cache_spec_kind="sliding_window"),
            remove(2, group_idx=1),
        )
        assert made.match([1, 1, 2, 2]) == {A: Held(4, {"GPU": 4})}
        made.apply(A, [remove(2, group_idx=2)])
        assert made.match([1, 1, 2, 2]) == {A: Held(2, {"GPU": 2})}

    def test_another_group_without_a_kind(self) -> None:
        made = index(store([1], [1, 1], group_idx=1))
        assert (made.match([1, 1]), made.counts["other_groups"]) == ({}, 1)

    def test_another_block_size_than_expected(self) -> None:
        made = index(store([1], [1] * 16, block_size=16), block_size=SIZE)
        assert (made.match([1] * 16), made.counts["other_block_size"]) == ({}, 1)

    @pytest.mark.parametrize(
        "event",
        [
            store([1, 2], [1, 1, 2]),
            store([1], []),
            store([1], [1, 1], block_size=0),
            store([1], [1, 1], extra_keys=[None, None]),
            store([1], [1, 1], extra_keys=[reduce(lambda inner, _: [inner], range(40), None)]),
            store([1], [1, 2**40]),
        ],
    )
    def test_what_does_not_line_up(self, event: BlockStored) -> None:
        made = index(store([7], [7, 7]), event)
        assert made.counts["malformed"] == 1
        assert made.match([7, 7])
        assert made.match([1, 1]) == {}


# any order of events

Prompt = tuple[int, ...]
PROMPTS = [(0,), (0, 0), (0, 1), (0, 0, 0), (1,), (1, 0), (1, 0, 1)]


class Naive:
    """Whole prefixes, one set for each source and medium."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], set[Prompt]] = {}

    def at(self, source: str, medium: str) -> set[Prompt]:
        return self.held.setdefault((source, medium), set())

    def match(self, prompt: Prompt, source: str) -> Held:
        media = {medium for name, medium in self.held if name == source}
        ends = {medium: self._leading(prompt, self.at(source, medium)) for medium in media}
        anywhere = set().union(*(self.at(source, medium) for medium in media))
        return Held(self._leading(prompt, anywhere), {medium: there for medium, there in ends.items() if there})

    @staticmethod
    def _leading(prompt: Prompt, held: set[Prompt]) -> int:
        ends = range(1, len(prompt) + 1)
        return next((end - 1 for end in ends if prompt[:end] not in held), len(prompt)) * SIZE


def hash_of(prompt: Prompt) -> int:
    return 1000 + PROMPTS.index(prompt)


CHANGE = st.tuples(
    st.sampled_from([A, B]), st.sampled_from(["GPU", "CPU"]), st.sampled_from(PROMPTS), st.sampled_from("ssssrrc")
)


@given(st.lists(CHANGE, max_size=40))
def test_any_order_of_events_finds_what_plain_sets_find(changes: list[tuple[str, str, Prompt, str]]) -> None:
    made, naive = BlockIndex(), Naive()
    for source, medium, prompt, what in changes:
        if what == "c":
            made.apply(source, [AllBlocksCleared()])
            naive.held = {key: held for key, held in naive.held.items() if key[0] != source}
        elif what == "r":
            made.apply(source, [remove(hash_of(prompt), medium=medium)])
            naive.at(source, medium).discard(prompt)
        elif len(prompt) == 1 or any(prompt[:-1] in naive.at(source, tier) for tier in ("GPU", "CPU")):
            parent = hash_of(prompt[:-1]) if len(prompt) > 1 else None
            made.apply(source, [store([hash_of(prompt)], [prompt[-1]] * SIZE, parent, medium)])
            naive.at(source, medium).add(prompt)
    for prompt in PROMPTS:
        found = made.match([token for token in prompt for _ in range(SIZE)])
        for source in (A, B):
            assert found.get(source, Held(0, {})) == naive.match(prompt, source)
            by_hash = made.match_hashes([hash_of(prompt[:end]) for end in range(1, len(prompt) + 1)])
            assert by_hash.get(source, Held(0, {})) == naive.match(prompt, source)
