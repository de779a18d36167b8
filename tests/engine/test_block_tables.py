"""Block tables: what a group keeps, offers and lets go of."""

from array import array

import pytest

from kvevents_service.engine.block_tables import GroupTable, content_names
from kvevents_service.engine.identity import PLAIN, Identity, MediaItem
from kvevents_service.engine.model import MODELS
from kvevents_service.engine.spans import RequestView, Spans, dense_runs
from kvevents_service.engine.trace import TraceLine, chain_hashes, derived_tokens, show_images
from kvevents_service.wire.control import GroupSpec

FULL, WINDOW, STATE = (
    GroupSpec(0, "full_attention", 16),
    GroupSpec(1, "sliding_window", 32, 64),
    GroupSpec(2, "mamba", 64),
)
UNITS = [bytes((n,)) * 32 for n in range(16)]


def table(group: GroupSpec, blocks: list[int | None]) -> GroupTable:
    made = GroupTable(group, 16)
    made.blocks = blocks
    return made


def test_a_block_is_named_by_its_last_unit_and_follows_the_unit_before_it() -> None:
    window = Spans(WINDOW, 16)
    assert window.hashes(UNITS, 1, 3) == [UNITS[3], UNITS[5]]
    assert window.name(UNITS, 2) == UNITS[5]
    assert (window.full(95), window.named(UNITS[:5])) == (2, 2)
    assert (window.parent(UNITS, 0), window.parent(UNITS, 2)) == (None, UNITS[3])


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([1, 2, 3], [(0, [1, 2, 3])]),
        ([None, 2, 3, None, 5], [(1, [2, 3]), (4, [5])]),
        ([None, None], []),
        ([], []),
    ],
)
def test_runs_are_dense_and_know_their_place(blocks: list[int | None], runs: list[tuple[int, list[int]]]) -> None:
    assert list(dense_runs(blocks, 7)) == [(7 + first, run) for first, run in runs]


def test_full_attention_lets_go_of_nothing() -> None:
    full = table(FULL, [1, 2, 3])
    assert full.trim(48) == []


def test_a_window_lets_go_of_what_left_it() -> None:
    window = table(WINDOW, [1, 2, 3, 4])
    assert window.trim(128) == [1, 2]
    assert window.blocks == [None, None, 3, 4]
    assert window.trim(128) == []


def test_a_state_is_needed_only_at_its_end() -> None:
    state = table(STATE, [1, 2, 3])
    assert state.trim(128) == [1]
    assert state.held() == [2, 3]


def test_missing_blocks_are_counted_from_the_tables_end() -> None:
    assert [table(WINDOW, [None, 2]).missing(tokens) for tokens in (0, 64, 65, 129)] == [0, 0, 1, 3]


def test_groups_do_not_share_bytes() -> None:
    assert len({name for group in (FULL, WINDOW, STATE) for name in content_names(group, UNITS)}) == 3 * len(UNITS)


def test_adapters_and_salts_make_other_chains_of_the_same_tokens() -> None:
    tokens = derived_tokens(5, 64)
    identities = [PLAIN, Identity(1, "a"), Identity(2, "b"), Identity(salt="s"), Identity(1, "a", "s")]
    chains = [chain_hashes(tokens, 16, [], identity) for identity in identities]
    assert len({block_hash for chain in chains for block_hash in chain}) == 4 * len(identities)


def test_another_image_makes_other_blocks_of_the_same_tokens_from_where_it_begins() -> None:
    cat, dog = (MediaItem("cat", 20, 30),), (MediaItem("dog", 20, 30),)
    one, other = derived_tokens(5, 64), derived_tokens(5, 64)
    show_images(one, cat)
    show_images(other, dog)
    assert one == other
    assert one[20:50] == array("i", [one[20]]) * 30
    chains = [chain_hashes(one, 16, [], Identity(media=media)) for media in (cat, dog)]
    assert chains[0][0] == chains[1][0]
    assert not set(chains[0][1:]) & set(chains[1][1:])


def test_hashes_grow_as_if_they_had_been_made_at_once() -> None:
    tokens, identity = (
        derived_tokens(5, 160),
        Identity(1, "a", "s", (MediaItem("cat", 20, 30), MediaItem("dog", 50, 70))),
    )
    whole = chain_hashes(tokens, 16, [], identity)
    grown: list[bytes] = []
    for end in (15, 40, 41, 100, 160):
        grown += chain_hashes(tokens[:end], 16, grown, identity)
    assert grown == whole


def test_a_table_says_what_is_in_its_blocks() -> None:
    view = RequestView("r", UNITS, derived_tokens(5, 256))
    blocks, names, records = table(WINDOW, [None, 7, None, 9]).contents(view, range(4))
    assert blocks == [7, 9]
    assert names == content_names(WINDOW, [UNITS[3], UNITS[7]])
    assert [(record.view, record.group, record.number) for record in records] == [(view, 1, 1), (view, 1, 3)]


def test_one_conversation_has_one_identity() -> None:
    hybrid = MODELS["hybrid"]
    turns = [TraceLine(0, 10, 1, [0, 8]), TraceLine(9, 999, 1, [0, 8, 9])]
    assert len({hybrid.identity_of(turn) for turn in turns}) == 1
    assert {hybrid.identity_of(TraceLine(0, 1, 1, [0, n])) for n in range(4)} > {PLAIN}
    assert MODELS["full"].identity_of(turns[0]) == PLAIN


def test_images_lie_within_long_prompts_and_differ_from_conversation_to_conversation() -> None:
    lines = [TraceLine(0, 4000, 1, [0, n, 9]) for n in range(12)]
    media = [MODELS["hybrid"].identity_of(line).media for line in lines]
    assert sum(map(bool, media)) == len({items for items in media if items}) == 4
    assert all(items == tuple(sorted(items, key=lambda item: item.offset)) for items in media)
    assert MODELS["hybrid"].identity_of(TraceLine(0, 1000, 1, [0, 0])).media == ()
