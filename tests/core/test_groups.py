"""Groups of a hello, and which blocks of each a prefix hit needs: against the definition, token by token."""

from math import lcm

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models import MODELS, cacheable, needed, step_tokens
from kvevents_service.core.groups import (
    CHUNK_KIND,
    KINDS,
    MAX_BLOCK_SIZE,
    MAX_GROUPS,
    PREFIX_KINDS,
    STATE_KIND,
    WINDOWED,
    alignment,
    check_groups,
    first_needed,
    needed_blocks,
)
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec

GOOD = GroupSpec(0, "full_attention", 16)
SCRATCH = GroupSpec(1, "mamba", 16, None, False)
WINDOW = GroupSpec(1, "sliding_window", 16, 100)
CHUNKS = GroupSpec(1, "chunked_local_attention", 16, 64)


def but(group: GroupSpec, **fields: object) -> GroupSpec:
    return msgspec.structs.replace(group, **fields)


# a hello


@pytest.mark.parametrize("kind", sorted(PREFIX_KINDS))
def test_prefix_kinds_are_served_alone(kind: str) -> None:
    group = but(GOOD, kind=kind)
    assert check_groups([group]) == (but(group, main=True),)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_known_kind_is_served_beside_a_prefix_kind(kind: str) -> None:
    groups = (but(GOOD, main=True), but(WINDOW, kind=kind, sliding_window=64))
    assert check_groups(groups) == groups
    assert check_groups([but(groups[1], index=0), but(GOOD, index=1)])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_known_kind_may_be_scratch(kind: str) -> None:
    assert check_groups([GOOD, but(SCRATCH, kind=kind)])


@pytest.mark.parametrize("kind", sorted(KINDS - PREFIX_KINDS))
def test_a_model_without_a_cacheable_prefix_kind_is_refused(kind: str) -> None:
    """Nothing would hold the chain together, and no group could say how long it is."""
    other = but(WINDOW, index=0, kind=kind, sliding_window=64)
    for groups in ([other], [other, but(GOOD, index=1, cacheable=False)]):
        with pytest.raises(ControlError) as caught:
            check_groups(groups)
        assert (caught.value.code, caught.value.field) == ("unsupported_group", "groups")


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([], "groups"),
        ([but(GOOD, index=i) for i in range(MAX_GROUPS + 1)], "groups"),
        ([but(SCRATCH, index=0)], "groups"),
        ([but(GOOD, index=1)], "groups[0].index"),
        ([GOOD, GOOD], "groups[1].index"),
        ([but(GOOD, block_size=0)], "groups[0].block_size"),
        ([but(GOOD, block_size=-16)], "groups[0].block_size"),
        ([but(GOOD, block_size=MAX_BLOCK_SIZE + 1)], "groups[0].block_size"),
        ([but(GOOD, kind="quantum")], "groups[0].kind"),
        ([GOOD, but(WINDOW, sliding_window=None)], "groups[1].sliding_window"),
        ([GOOD, but(WINDOW, sliding_window=0)], "groups[1].sliding_window"),
        ([GOOD, but(WINDOW, sliding_window=-1)], "groups[1].sliding_window"),
        ([GOOD, but(CHUNKS, sliding_window=None)], "groups[1].sliding_window"),
        ([GOOD, but(CHUNKS, sliding_window=-64)], "groups[1].sliding_window"),
        ([GOOD, but(CHUNKS, sliding_window=72)], "groups[1].sliding_window"),
        ([GOOD, but(WINDOW, block_size=24)], "groups[1].block_size"),
        ([GOOD, but(WINDOW, block_size=8)], "groups[1].block_size"),
        ([GOOD, but(WINDOW, main=True)], "groups[1].main"),
        ([GOOD, but(SCRATCH, main=True)], "groups[1].main"),
        ([but(GOOD, main=True), but(GOOD, index=1, main=True)], "groups[1].main"),
    ],
)
def test_the_first_bad_group_is_named(groups: list[GroupSpec], field: str) -> None:
    with pytest.raises(ControlError) as caught:
        check_groups(groups)
    assert (caught.value.code, caught.value.field) == ("bad_groups", field)


@pytest.mark.parametrize(("hash_tokens", "field"), [(32, 0), (12, 0), (16, 1), (-8, 0)])
def test_blocks_are_whole_hash_units(hash_tokens: int, field: int) -> None:
    with pytest.raises(ControlError) as caught:
        check_groups([GOOD, but(WINDOW, block_size=24)], hash_tokens)
    assert (caught.value.code, caught.value.field) == ("bad_groups", f"groups[{field}].block_size")


@pytest.mark.parametrize("hash_tokens", [1, 2, 8])
def test_blocks_of_several_hash_units_are_served(hash_tokens: int) -> None:
    assert check_groups([GOOD, but(WINDOW, block_size=24)], hash_tokens)


def test_a_scratch_group_may_have_anything() -> None:
    assert len(check_groups([GOOD, but(SCRATCH, block_size=1)])) == 2
    assert len(check_groups([GOOD, but(CHUNKS, block_size=5, sliding_window=3, cacheable=False)])) == 2


@pytest.mark.parametrize(
    ("groups", "main"),
    [
        ([GOOD, but(GOOD, index=1)], 0),
        ([GOOD, but(GOOD, index=1, main=True)], 1),
        ([but(WINDOW, index=0), but(GOOD, index=1), but(GOOD, index=2)], 1),
        ([but(GOOD, cacheable=False), but(GOOD, index=1)], 1),
    ],
)
def test_one_group_is_the_main_one(groups: list[GroupSpec], main: int) -> None:
    assert [group.index for group in check_groups(groups) if group.main] == [main]


def test_as_many_groups_as_the_pool_can_name() -> None:
    assert len(check_groups([but(GOOD, index=i) for i in range(MAX_GROUPS)])) == MAX_GROUPS


# what a hit needs


@st.composite
def any_group(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from(sorted(KINDS)))
    block_size = draw(st.integers(1, 6))
    window = draw(st.integers(1, 40)) if kind in WINDOWED else draw(st.sampled_from([None, 8]))
    if kind == CHUNK_KIND:
        window = block_size * draw(st.integers(1, 8))
    return GroupSpec(0, kind, block_size, window)


@given(any_group(), st.integers(0, 12), st.integers(0, 12))
def test_what_is_needed_is_what_later_tokens_read(group: GroupSpec, blocks: int, local_blocks: int) -> None:
    tokens, start = blocks * group.block_size, min(blocks, local_blocks) * group.block_size
    assert tuple(needed_blocks(group, tokens, start)) == needed(group, tokens, start)


@given(any_group(), st.integers(0, 60))
def test_the_first_token_that_is_needed(group: GroupSpec, blocks: int) -> None:
    tokens = blocks * group.block_size
    first = first_needed(group, tokens)
    assert 0 <= first <= tokens
    if group.kind == STATE_KIND:
        assert first == max(0, tokens - group.block_size)
    assert {first // group.block_size} >= set(needed(group, tokens)[:1])


@given(any_group(), st.integers(1, 12), st.integers(1, 12))
def test_a_block_that_a_prefix_needs_is_needed_by_all_shorter_ones_that_have_it(
    group: GroupSpec, longer: int, shorter: int
) -> None:
    """Why a missing block rules out every candidate down to its own beginning."""
    shorter, longer = sorted((shorter, longer))
    of_longer = set(needed_blocks(group, longer * group.block_size))
    of_shorter = set(needed_blocks(group, shorter * group.block_size))
    if group.kind != STATE_KIND:
        assert {block for block in of_longer if block < shorter} <= of_shorter


@pytest.mark.parametrize(
    ("group", "tokens", "start", "blocks"),
    [
        (GroupSpec(0, "full_attention", 4), 12, 0, [0, 1, 2]),
        (GroupSpec(0, "full_attention", 4), 12, 8, [2]),
        (GroupSpec(0, "sliding_window", 4, 4), 12, 0, [2]),  # token 12 reads 9, 10, 11
        (GroupSpec(0, "sliding_window", 4, 5), 12, 0, [2]),
        (GroupSpec(0, "sliding_window", 4, 6), 12, 0, [1, 2]),  # and 7
        (GroupSpec(0, "sliding_window", 4, 1), 12, 0, []),  # nothing but itself
        (GroupSpec(0, "sliding_window_mla", 4, 100), 12, 0, [0, 1, 2]),
        (GroupSpec(0, "sliding_window_mla", 4, 100), 12, 4, [1, 2]),
        (GroupSpec(0, "chunked_local_attention", 4, 8), 12, 0, [2]),
        (GroupSpec(0, "chunked_local_attention", 4, 8), 16, 0, []),  # a new chunk begins
        (GroupSpec(0, "mamba", 4), 12, 0, [2]),
        (GroupSpec(0, "mamba", 4), 12, 12, []),
        (GroupSpec(0, "mamba", 4), 0, 0, []),
    ],
)
def test_examples_of_what_is_needed(group: GroupSpec, tokens: int, start: int, blocks: list[int]) -> None:
    assert list(needed_blocks(group, tokens, start)) == blocks


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_hit_is_whole_blocks_of_every_cacheable_group(model: str) -> None:
    assert alignment(MODELS[model]) == alignment(cacheable(MODELS[model])) == step_tokens(MODELS[model])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_alignment_is_the_least_common_multiple(sizes: list[int]) -> None:
    groups = [GroupSpec(index, "full_attention", size) for index, size in enumerate(sizes)]
    groups.append(GroupSpec(len(sizes), "mamba", 31, None, False))
    step = alignment(groups)
    assert all(step % size == 0 for size in sizes)
    assert step == lcm(*sizes)
