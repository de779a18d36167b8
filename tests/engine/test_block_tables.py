"""Block tables: what a group keeps, offers and lets go of."""

import pytest

from kvevents_service.engine.block_tables import GroupTable, content_names
from kvevents_service.engine.model import MODELS, Identity
from kvevents_service.engine.trace import TraceLine, chain_hashes, derived_tokens
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
    window = table(WINDOW, [])
    assert window.hashes(UNITS, 1, 3) == [UNITS[3], UNITS[5]]
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
    assert list(table(WINDOW, blocks).runs(0, len(blocks))) == runs


def test_full_attention_lets_go_of_nothing() -> None:
    full = table(FULL, [1, 2, 3])
    full.offered = 3
    assert full.trim(48) == []


def test_a_window_lets_go_of_what_left_it_once_it_is_offered() -> None:
    window = table(WINDOW, [1, 2, 3, 4])
    assert window.trim(128) == []
    window.offered = 4
    assert window.trim(128) == [1, 2]
    assert window.blocks == [None, None, 3, 4]
    assert window.trim(128) == []


def test_a_state_is_needed_only_at_its_end() -> None:
    state = table(STATE, [1, 2, 3])
    state.offered = 2
    assert state.trim(128) == [1]
    assert state.held() == [2, 3]


def test_missing_blocks_are_counted_from_the_tables_end() -> None:
    assert [table(WINDOW, [None, 2]).missing(tokens) for tokens in (0, 64, 65, 129)] == [0, 0, 1, 3]


def test_groups_do_not_share_bytes() -> None:
    assert len({name for group in (FULL, WINDOW, STATE) for name in content_names(group, UNITS)}) == 3 * len(UNITS)


def test_adapters_and_salts_make_other_chains_of_the_same_tokens() -> None:
    tokens = derived_tokens(5, 64)
    identities = [Identity(), Identity(1, "a"), Identity(2, "b"), Identity(salt="s"), Identity(1, "a", "s")]
    chains = [chain_hashes(tokens, 16, [], identity.root) for identity in identities]
    assert len({block_hash for chain in chains for block_hash in chain}) == 4 * len(identities)


def test_the_salt_is_a_key_of_the_first_block_only() -> None:
    assert Identity(1, "a", "s").extra_keys(0, 3) == [("a", "s"), ("a",), ("a",)]
    assert Identity(salt="s").extra_keys(0, 2) == [("s",), None]
    assert Identity(salt="s").extra_keys(1, 2) == [None]
    assert Identity().extra_keys(0, 2) is None


def test_one_conversation_has_one_identity() -> None:
    hybrid = MODELS["hybrid"]
    turns = [TraceLine(0, 10, 1, [0, 8]), TraceLine(9, 999, 1, [0, 8, 9])]
    assert len({hybrid.identity_of(turn) for turn in turns}) == 1
    assert {hybrid.identity_of(TraceLine(0, 1, 1, [0, n])) for n in range(4)} > {Identity()}
    assert MODELS["full"].identity_of(turns[0]) == Identity()
