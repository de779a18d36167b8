"""Which events are shown: by group, adapter, number, and as the beginning of one prompt."""

from pathlib import Path

import pytest

from kvevents_service.cli.tail_filter import Filter, PrefixWatch, prompt_tokens
from kvevents_service.errors import ConfigError
from kvevents_service.testing import make_chain
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

PROMPT = list(range(100, 116))
CHAIN = make_chain(PROMPT, 4)
OTHER = make_chain([*PROMPT[:8], *range(8)], 4)


def stored(chain=CHAIN, start: int = 0, stop: int | None = None, group: int | None = None, lora: str | None = None):
    part = chain.part(start, stop)
    return BlockStored(list(part.hashes), part.parent, list(part.token_ids), 4, None, "CPU", lora, None, group)


def removed(*names: bytes, group: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(names), "CPU", group)


@pytest.mark.parametrize(
    ("wanted", "event", "shown"),
    [
        (Filter(groups=frozenset({1})), stored(group=1), True),
        (Filter(groups=frozenset({1})), stored(), False),
        (Filter(groups=frozenset({0})), stored(), True),
        (Filter(groups=frozenset({1})), removed(b"x", group=1), True),
        (Filter(groups=frozenset({1})), AllBlocksCleared(), True),
        (Filter(loras=frozenset({"a"})), stored(lora="a"), True),
        (Filter(loras=frozenset({"a"})), stored(lora="b"), False),
        (Filter(loras=frozenset({"a"})), stored(), False),
        (Filter(loras=frozenset({""})), stored(), True),
        (Filter(loras=frozenset({"a"})), removed(b"x"), False),
        (Filter(since=5), stored(), False),
        (Filter(since=4), stored(), True),
    ],
)
def test_each_filter_lets_through_what_it_names(wanted: Filter, event, shown: bool) -> None:
    assert wanted.wants(event, "", 4) is shown


class TestPrefix:
    def test_the_blocks_of_a_prompt_are_followed_from_its_start(self) -> None:
        watch = PrefixWatch(PROMPT)
        assert not watch.concerns("a", stored(start=1)), "the block before it was not seen"
        assert watch.concerns("a", stored(stop=1))
        assert watch.concerns("a", stored(start=1, stop=3))
        assert watch.concerns("a", stored(start=3))
        assert watch.concerns("a", removed(b"y" * 32, CHAIN.hashes[3]))
        assert not watch.concerns("a", removed(b"y" * 32))

    def test_a_run_that_begins_alike_concerns_it_until_they_part(self) -> None:
        watch = PrefixWatch(PROMPT)
        assert watch.concerns("a", stored(OTHER))
        assert watch.concerns("a", removed(OTHER.hashes[1]))
        assert not watch.concerns("a", removed(OTHER.hashes[2]))
        assert not watch.concerns("a", stored(OTHER, 3))

    def test_the_end_of_a_prompt_is_the_end(self) -> None:
        watch = PrefixWatch(PROMPT[:6])
        assert watch.concerns("a", stored())
        assert watch.concerns("a", removed(CHAIN.hashes[0]))
        assert not watch.concerns("a", removed(CHAIN.hashes[1])), "the prompt ends inside this block"

    def test_sources_and_groups_are_apart(self) -> None:
        watch = PrefixWatch(PROMPT)
        watch.concerns("a", stored(group=1))
        assert not watch.concerns("b", removed(CHAIN.hashes[0], group=1))
        assert not watch.concerns("a", removed(CHAIN.hashes[0], group=0))
        assert watch.concerns("a", removed(CHAIN.hashes[0], group=1))

    def test_hashes_may_be_in_any_form(self) -> None:
        watch = PrefixWatch(PROMPT)
        watch.concerns("a", stored(stop=1))
        low = int.from_bytes(CHAIN.hashes[0][-8:], "big")
        assert watch.concerns("a", removed(low, group=0))  # type: ignore[arg-type]

    def test_a_store_that_is_not_shown_is_still_learnt_from(self) -> None:
        wanted = Filter(types=(BlockRemoved,), prefix=PrefixWatch(PROMPT))
        assert not wanted.wants(stored())
        assert wanted.wants(removed(CHAIN.hashes[2]))

    @pytest.mark.parametrize("event", [stored(), BlockStored([1], None, [], 0, None, None, None)])
    def test_another_prompt_is_not_shown(self, event: BlockStored) -> None:
        assert not PrefixWatch([1, 2, 3, 4, 5]).concerns("a", event)

    def test_tokens_come_from_the_line_or_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "prompt"
        path.write_text("1 2\n3,4")
        assert prompt_tokens("1,2, 3,4") == prompt_tokens(f"@{path}") == [1, 2, 3, 4]

    @pytest.mark.parametrize("text", ["", "a", "1,x", "@/nowhere", "1.5"])
    def test_what_is_no_prompt_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^--prefix-of: expected"):
            prompt_tokens(text)
