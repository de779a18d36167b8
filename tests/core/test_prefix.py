"""The longest prefix that every group can serve, against a search of all lengths over random residency."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.models import MODELS, PREFIX, UNIT, Groups, cacheable, needed, step_tokens
from core.prompts import Path, block_at, blocks_of, hashes, offer, unit_hash
from kvevents_service.core import prefix
from kvevents_service.core.groups import KINDS
from kvevents_service.core.metadata import snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.prefix import PrefixQuery, loadable, longest_prefix, slots_of
from kvevents_service.core.slots import READY
from kvevents_service.wire.control import GroupSpec

MAX_UNITS = 24
PROMPT: Path = (0,) * MAX_UNITS
HASH_BYTES = 32


def put(pool: BlockPool, group: GroupSpec, first: int, blocks: int, ready: int) -> None:
    """Store blocks of the prompt; the first `ready` of them have arrived."""
    if not blocks:
        return
    meta = snapshot(offer(PROMPT, [0] * blocks, first, group), group, "CPU", HASH_BYTES)
    names = [meta.hash_at(place) for place in range(blocks)]
    slots, _ = pool.allocate(meta, names, None)
    pool.commit(slots[:ready])


@st.composite
def any_groups(draw: st.DrawFn) -> Groups:
    found = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        block_size = draw(st.sampled_from([2, 4, 6]))
        window = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 13, 30, 100]))
        if kind == "chunked_local_attention":
            window = block_size * draw(st.integers(1, 6))
        found.append(GroupSpec(index, kind, block_size, window, draw(st.sampled_from([True] * 5 + [False]))))
    return tuple(found) if cacheable(tuple(found)) else draw(any_groups())


def fill(draw: Any, pool: BlockPool, group: GroupSpec) -> None:
    """Random residency: a chain in a prefix kind, anything elsewhere, some of it still on its way."""
    blocks = blocks_of(PROMPT, group)
    if group.kind in PREFIX:
        stored = draw(st.sampled_from(range(blocks, -1, -1)))
        put(pool, group, 0, stored, draw(st.sampled_from([stored] * 3 + [stored // 2])))
        return
    numbers = st.sampled_from(range(blocks))
    gone = draw(st.sets(numbers, min_size=1, max_size=draw(st.sampled_from([2, 4, blocks]))) | st.just(set()))
    late = draw(st.sets(numbers, max_size=1))
    for number in sorted(set(range(blocks)) - gone):
        put(pool, group, number, 1, int(number not in late))


@settings(max_examples=400)
@given(st.data(), any_groups() | st.sampled_from(list(MODELS.values())))
def test_the_longest_prefix_is_the_longest_of_all(data: Any, groups: Groups) -> None:
    pool = BlockPool(4 * MAX_UNITS, len(groups))
    for group in cacheable(groups):
        fill(data.draw, pool, group)
    step = step_tokens(groups)
    units = data.draw(st.sampled_from([MAX_UNITS] * 3) | st.integers(0, MAX_UNITS))
    start = data.draw(st.sampled_from([0, 0, step, 2 * step]) | st.integers(0, units).map(lambda n: n * UNIT))
    start = min(start, units * UNIT)
    query = PrefixQuery(hashes(PROMPT[:units], start // UNIT), start, UNIT, HASH_BYTES)

    def is_ready(group: GroupSpec, number: int) -> bool:
        slot = pool.index[group.index].get(block_at(PROMPT, group, number).block_hash)
        return slot is not None and pool.state_of(slot) == READY

    def can_serve(tokens: int) -> bool:
        return all(is_ready(group, n) for group in cacheable(groups) for n in needed(group, tokens, start))

    lengths = [n for n in range(start + 1, units * UNIT + 1) if n % step == 0 and start % step == 0]
    wanted = max(filter(can_serve, lengths), default=start)
    assert longest_prefix(pool, groups, query) == wanted
    for length in [*lengths, start]:
        for group in cacheable(groups):
            check_slots(pool, group, query, length)


def check_slots(pool: BlockPool, group: GroupSpec, query: PrefixQuery, tokens: int) -> None:
    """A prefix has the slots of the blocks it needs, in order, or none at all."""
    if tokens % group.block_size or query.start_tokens % group.block_size:
        return
    numbers = needed(group, tokens, query.start_tokens)
    slots = [loadable(pool, group, query, number, tokens) for number in numbers]
    assert slots_of(pool, group, query, tokens) == (None if None in slots else slots)
    names = [block_at(PROMPT, group, number).block_hash for number in numbers]
    for slot, name in zip(slots, names, strict=True):
        assert slot is None or pool.hash_of(slot) == name


def test_a_lookup_asks_for_no_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states that are never at the same place, and a window that would be searched anew at each of them."""
    groups = (
        GroupSpec(0, "full_attention", 2),
        GroupSpec(1, "sliding_window", 2, 30),
        GroupSpec(2, "mamba", 2),
        GroupSpec(3, "mamba", 2),
    )
    pool = BlockPool(4 * MAX_UNITS, len(groups))
    put(pool, groups[0], 0, MAX_UNITS, MAX_UNITS)
    put(pool, groups[1], 0, MAX_UNITS, MAX_UNITS)
    for number in range(MAX_UNITS):
        put(pool, groups[2 + number % 2], number, 1, 1)
    asked = []

    def counted(pool: BlockPool, group: GroupSpec, query: PrefixQuery, block: int, tokens: int) -> int | None:
        asked.append((group.index, block))
        return loadable(pool, group, query, block, tokens)

    monkeypatch.setattr(prefix, "loadable", counted)
    assert longest_prefix(pool, groups, PrefixQuery(hashes(PROMPT), 0, UNIT, HASH_BYTES)) == 0
    assert len(asked) == len(set(asked)) > MAX_UNITS


def test_a_query_names_blocks_by_their_last_unit() -> None:
    query = PrefixQuery(hashes(PROMPT, 3), 6, UNIT, HASH_BYTES)
    assert query.end_tokens == MAX_UNITS * UNIT
    small, large = GroupSpec(0, "mamba", 2), GroupSpec(0, "mamba", 6)
    assert query.block_hashes(small, range(3, 5)) == [unit_hash(PROMPT[:4]), unit_hash(PROMPT[:5])]
    assert query.block_hashes(large, range(1, 3)) == [unit_hash(PROMPT[:6]), unit_hash(PROMPT[:9])]
    assert query.block_hashes(large, range(7, 8)) == [unit_hash(PROMPT)]
    assert query.block_hashes(large, range(7, 7)) == []
    assert query.first_units(10) == hashes(PROMPT[:5], 3)
    assert query.first_units(6) == b""


@given(st.sampled_from(list(MODELS.values())), st.lists(st.integers(1, MAX_UNITS), max_size=MAX_UNITS))
def test_a_list_that_is_no_chain_finds_nothing_that_it_does_not_name(groups: Groups, order: list[int]) -> None:
    pool = BlockPool(4 * MAX_UNITS, len(groups))
    for group in cacheable(groups):
        blocks = blocks_of(PROMPT, group)
        put(pool, group, 0, blocks, blocks)
    query = PrefixQuery(b"".join(unit_hash(PROMPT[:depth]) for depth in order), 0, UNIT, HASH_BYTES)
    tokens = longest_prefix(pool, groups, query)
    assert 0 <= tokens <= query.end_tokens
    assert tokens % step_tokens(groups) == 0
    for group in cacheable(groups):
        slots = slots_of(pool, group, query, tokens)
        names = [query.hash_at((number + 1) * group.block_size) for number in needed(group, tokens)]
        assert slots is None or [pool.hash_of(slot) for slot in slots] == names
