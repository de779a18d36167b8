"""Blocks of an index become whole chains again, each name once, parents first."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_blocks import FULL, LAYOUT, MEDIUM, WINDOW, chain, facts, hash_of, inner, parents_come_first

from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.transfer.disk_chains import MAX_RUN_BLOCKS, recover
from kvevents_service.transfer.disk_record import Entry, Name, Record, name_of


def entries(*runs: StoreRun, stamp: int = 0) -> list[tuple[int, Entry]]:
    """What an index has of these runs."""
    found = []
    for run in runs:
        names: dict[int, list[Name]] = {}
        for place, meta in run.inner_places():
            names.setdefault(place, []).append(name_of(meta))
        for place, slot in enumerate(run.slots):
            name = name_of(run.meta.part(place, place + 1))
            record = Record(run.meta.group.index, name, (slot,), names.get(place, []))
            found.append((slot, Entry(stamp + len(found), record)))
    return found


def run(meta: BlockStoreMeta, first: int, inner: tuple[BlockStoreMeta, ...] = ()) -> StoreRun:
    return StoreRun(meta, list(range(first, first + meta.blocks)), inner)


def test_a_chain_comes_back_as_one_run() -> None:
    stored = run(chain("a", 6), 10)
    assert recover(LAYOUT, MEDIUM, reversed(entries(stored))) == [stored]


def test_two_prompts_with_one_beginning_come_back() -> None:
    trunk = chain("a", 4)
    branches = [run(chain(name, 3, parent=trunk.hash_at(1)), first) for name, first in (("b", 20), ("c", 30))]
    stored = [run(trunk, 0), *branches]
    runs = recover(LAYOUT, MEDIUM, entries(*stored))
    assert facts(runs) == facts(stored)
    assert parents_come_first(runs)
    assert sum(len(run.slots) for run in runs) == 10


def test_what_tells_blocks_apart_is_kept() -> None:
    keys = [("image", 3), None, ("salt", ("flat", None, 1.5))]
    stored = [run(chain("a", 3, extra_keys=keys), 0), run(chain("b", 2, parent=hash_of("a", 2), lora="tuned"), 5)]
    runs = recover(LAYOUT, MEDIUM, entries(*stored))
    assert facts(runs) == facts(stored)
    assert len(runs) == 2  # another adapter: another event


def test_a_block_without_its_parent_is_left_out_and_all_behind_it() -> None:
    stored = run(chain("a", 6), 0)
    kept = [entry for entry in entries(stored) if entry[0] != 2]
    assert facts(recover(LAYOUT, MEDIUM, kept)) == facts([StoreRun(stored.meta.part(0, 2), [0, 1])])
    orphan = run(chain("b", 2, parent=hash_of("gone")), 9)
    assert recover(LAYOUT, MEDIUM, entries(orphan)) == []


def test_a_window_needs_no_parent() -> None:
    stored = [run(chain("w", 3, WINDOW, parent=hash_of("gone")), 0), run(chain("a", 2), 7)]
    runs = recover(LAYOUT, MEDIUM, entries(*stored))
    assert facts(runs) == facts(stored)
    assert [run.meta.group for run in runs] == [FULL, WINDOW, WINDOW, WINDOW]


def test_of_two_blocks_with_one_name_the_later_one_counts() -> None:
    old, new = run(chain("a", 2), 8), run(chain("a", 2), 0)
    assert recover(LAYOUT, MEDIUM, [*entries(new, stamp=50), *entries(old)]) == [new]


def test_names_inside_blocks_come_with_them() -> None:
    meta = chain("a", 3)
    first = inner("i", None), inner("j", hash_of("i", 0))
    second = inner("k", hash_of("a", 1)), inner("l", hash_of("k", 0))
    stored = run(meta, 4, (*first, *second))
    assert [place for place, _ in stored.inner_places()] == [0, 0, 2, 2]
    (back,) = recover(LAYOUT, MEDIUM, entries(stored))
    assert facts([back]) == facts([stored])
    kept = [entry for entry in entries(stored) if entry[0] != 6]
    (back,) = recover(LAYOUT, MEDIUM, kept)
    assert back.inner == first


def test_a_name_that_two_blocks_have_is_given_once() -> None:
    stored = [
        run(chain("a", 1), 0, (inner("i", None),)),
        run(chain("b", 1), 1, (inner("i", None), inner("b", None))),
    ]
    runs = recover(LAYOUT, MEDIUM, entries(*stored))
    assert [len(run.inner) for run in runs] == [1, 0]


def test_what_does_not_belong_to_the_layout_is_left_out() -> None:
    good = run(chain("a", 1), 0)
    other_hash = Entry(5, Record(0, msgspec.structs.replace(name_of(chain("b", 1)), block_hash=b"short"), (1,)))
    other_tokens = Entry(6, Record(0, msgspec.structs.replace(name_of(chain("c", 1)), token_ids=b"1234"), (1,)))
    other_group = Entry(7, Record(9, name_of(chain("d", 1)), (1,)))
    other_ranks = Entry(8, Record(0, name_of(chain("e", 1)), (1, 2)))
    odd = list(enumerate([other_hash, other_tokens, other_group, other_ranks], 10))
    assert recover(LAYOUT, MEDIUM, [*entries(good), *odd]) == [good]


def test_a_long_chain_is_cut_into_events() -> None:
    stored = run(chain("a", 2 * MAX_RUN_BLOCKS + 1), 0)
    runs = recover(LAYOUT, MEDIUM, entries(stored))
    assert [len(run.slots) for run in runs] == [MAX_RUN_BLOCKS, MAX_RUN_BLOCKS, 1]
    assert facts(runs) == facts([stored])
    assert parents_come_first(runs)


@settings(max_examples=60)
@given(st.lists(st.integers(-1, 40), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_any_forest_comes_back_as_far_as_it_is_whole(parents: list[int], rng: random.Random) -> None:
    """Block i is behind block parents[i] if there is one before it; some entries are gone."""
    metas = [
        chain(i, 1, parent=hash_of(parents[i], 0) if 0 <= parents[i] < i else None) for i in range(len(parents))
    ]
    kept = {i for i in range(len(parents)) if rng.random() < 0.8}
    whole: set[int] = set()
    for i in range(len(parents)):
        if i in kept and (not 0 <= parents[i] < i or parents[i] in whole):
            whole.add(i)
    found = [entry for i in kept for entry in entries(run(metas[i], i), stamp=i)]
    rng.shuffle(found)
    runs = recover(LAYOUT, MEDIUM, found)
    assert facts(runs) == facts([run(metas[i], i) for i in whole])
    assert parents_come_first(runs)
    assert sum(len(run.slots) for run in runs) == len(whole)
