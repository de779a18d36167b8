"""What one source's odd stream becomes in our journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as File

import msgspec
import pytest
from wire.wire_vectors import load

from core.engine_model import BLOCK_SIZE, digest, in_form, key, stored
from kvevents_service.core.announce import to_event
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.core.residency import Residency, Shelf, keys64
from kvevents_service.core.source import SourceLimits, StreamSource
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

CLEAR = AllBlocksCleared()
A, AB, ABC, AC = (0,), (0, 1), (0, 1, 1), (0, 2)
VECTORS = [vector for vector in load("layouts.jsonl") + load("vllm-0.33-*.jsonl") if vector.payload]


def said(announcements: Sequence[Announcement]) -> list[tuple[str, list[int]]]:
    return [
        (type(event).__name__, keys64(getattr(event, "block_hashes", []))) for event in map(to_event, announcements)
    ]


def removed(*paths: tuple[int, ...], medium: str | None = "GPU", form: int = 1) -> BlockRemoved:
    return BlockRemoved([in_form(path, form) for path in paths], medium)


def plus(*paths: tuple[int, ...]) -> tuple[str, list[int]]:
    return "BlockStored", [*map(key, paths)]


def minus(*paths: tuple[int, ...]) -> tuple[str, list[int]]:
    return "BlockRemoved", [*map(key, paths)]


def test_a_chain_is_announced_as_it_came() -> None:
    source = StreamSource()
    (run,) = source.apply([stored(ABC, 3)])
    assert isinstance(run, BlockStoreMeta)
    event = to_event(run)
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.block_size, event.parent_block_hash) == ([1, 0, 2, 1, 3, 1], BLOCK_SIZE, None)
    assert (event.group_idx, event.kv_cache_spec_kind, event.medium) == (0, "full_attention", "GPU")


def test_two_clears_in_one_batch_with_stores_between() -> None:
    source = StreamSource()
    source.apply([stored(AB, 2)])
    assert said(source.apply([CLEAR, stored(A), CLEAR, stored(AC, 2)])) == [
        minus(AB, A),
        plus(A),
        minus(A),
        plus(A, AC),
    ]


def test_a_clear_of_a_source_is_never_one_of_ours() -> None:
    source = StreamSource()
    source.apply([stored(AB, 2)])
    assert all(isinstance(item, RemovedRun) for item in source.apply([CLEAR]))
    assert source.apply([CLEAR]) == ()


def test_a_child_before_its_parent_in_one_batch() -> None:
    source = StreamSource()
    assert said(source.apply([stored(ABC), stored(AB), stored(A)])) == [plus(A), plus(AB), plus(ABC)]
    assert source.stats()["orphans_linked"] == 2


def test_a_parent_that_goes_takes_what_is_behind_it_until_it_comes_again() -> None:
    source = StreamSource()
    source.apply([stored(ABC, 3), stored(AC)])
    (first,) = said(source.apply([removed(A)]))
    assert first[1][-1] == key(A)
    assert {*first[1]} == {key(A), key(AB), key(ABC), key(AC)}
    assert first[1].index(key(ABC)) < first[1].index(key(AB))
    assert source.stats()["orphans"] == 3
    again = said(source.apply([stored(A)]))
    assert again[0] == plus(A)
    assert {name for _, names in again[1:] for name in names} == {key(AB), key(ABC), key(AC)}


def test_a_block_that_was_stored_twice_is_gone_when_it_was_removed_twice() -> None:
    source = StreamSource()
    source.apply([stored(A)])
    assert source.apply([stored(A)]) == ()
    assert source.apply([removed(A)]) == ()
    assert said(source.apply([removed(A)])) == [minus(A)]
    assert source.apply([removed(A)]) == ()
    assert source.stats() | {"duplicates": 1, "removed_unknown": 1, "removed": 1} == source.stats()


def test_a_store_that_is_half_known_is_announced_in_half() -> None:
    source = StreamSource()
    source.apply([stored(AB, 2)])
    assert said(source.apply([stored(ABC, 3)])) == [plus(ABC)]
    assert source.apply([removed(AB)]) == ()


def test_one_block_twice_in_one_store() -> None:
    source = StreamSource()
    event = stored(A)
    twice = msgspec.structs.replace(event, block_hashes=event.block_hashes * 2, token_ids=[*event.token_ids] * 2)
    assert said(source.apply([twice])) == [plus(A)]
    source.check()


def test_media_meet_however_they_are_spelled() -> None:
    source = StreamSource()
    source.apply([stored(A, medium="cpu_pinned"), stored(A, medium=None)])
    assert source.resident() == {"CPU": 1, "GPU": 1}
    (gone,) = source.apply([removed(A, medium="CPU")])
    assert isinstance(gone, RemovedRun)
    assert gone.medium == "CPU"
    assert source.resident() == {"CPU": 0, "GPU": 1}


@pytest.mark.parametrize("store_form", range(3))
@pytest.mark.parametrize("remove_form", range(3))
def test_hashes_meet_in_any_form(store_form: int, remove_form: int) -> None:
    source = StreamSource()
    source.apply([stored(A, form=store_form), stored(AB, form=remove_form)])
    assert len(source.apply([removed(AB, A, form=remove_form)])) in (1, 2)
    assert source.stats()["removed"] == 2


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [
        ("vllm", -2, (1 << 64) - 2),
        ("vllm", (1 << 64) - 2, (1 << 64) - 2),
        ("sglang", -2, -2),
        ("vllm", digest(A), key(A)),
        ("aibrix", digest(A), int.from_bytes(digest(A)[:8], "big", signed=True)),
        ("llm-d", (1 << 63) + (1 << 40), 1 << 40),
    ],
)
def test_a_router_sees_the_value_that_the_source_itself_would_give(
    dialect: str, name: BlockHash, value: BlockHash
) -> None:
    source = StreamSource()
    event = BlockStored([name], None, [1, 2], 2, None, None, None)
    for announcements in (source.apply([event]), source.apply([BlockRemoved([name], None)])):
        (told,) = decode_batch(Encoding(dialect).encode(announcements, 1.0)).batch.events
        assert isinstance(told, BlockStored | BlockRemoved)
        assert told.block_hashes == [value]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1]},
        {"token_ids": [1 << 40, 1]},
        {"block_size": 0},
        {"block_size": -2},
        {"block_hashes": []},
        {"block_hashes": [b""]},
        {"block_hashes": [bytes(65)]},
        {"extra_keys": [None, None]},
        {"group_idx": 255},
        {"group_idx": -1},
        {"parent_block_hash": b""},
    ],
)
def test_what_cannot_be_described_is_counted(change: dict[str, object]) -> None:
    source = StreamSource()
    assert source.apply([msgspec.structs.replace(stored(A), **change)]) == ()
    assert source.stats()["malformed"] == 1
    assert said(source.apply([stored(A)])) == [plus(A)]


def test_a_circle_of_parents_is_broken() -> None:
    source = StreamSource()
    own = BlockStored([1], 1, [0, 0], 2, None, None, None)
    ring = [BlockStored([name], before, [0, 0], 2, None, None, None) for name, before in ((2, 4), (3, 2), (4, 3))]
    assert source.apply([own, *ring]) == ()
    source.check()
    assert source.stats()["malformed"] == 2


def test_orphans_are_bounded_and_the_oldest_goes() -> None:
    source = StreamSource(limits=SourceLimits(orphans=2))
    source.apply([stored(AC), stored(AB), stored(ABC)])
    assert source.stats() | {"orphans": 2, "orphans_dropped": 1} == source.stats()
    assert said(source.apply([stored(A)])) == [plus(A), plus(AB), plus(ABC)]
    source.check()


def test_blocks_are_bounded() -> None:
    source = StreamSource(limits=SourceLimits(blocks=2))
    assert said(source.apply([stored(AB, 2), stored(AC)])) == [plus(A, AB)]
    assert source.stats()["refused"] == 1
    source.apply([stored(AC), removed(AB), stored(AC)])
    assert source.resident() == {"GPU": 2}


def test_media_of_our_own_tiers_are_not_told_twice() -> None:
    source = StreamSource(others=frozenset({"CPU"}))
    assert source.apply([stored(A, medium="cpu"), removed(A, medium="CPU_PINNED")]) == ()
    assert said(source.apply([stored(A, medium="GPU")])) == [plus(A)]
    assert source.stats()["not_its_own"] == 2


def test_what_is_remote_to_the_source_is_not_its_own() -> None:
    remote = msgspec.structs.replace(stored(A), locality="REMOTE")
    assert StreamSource().apply([remote]) == ()


def test_blocks_of_a_window_need_no_parent() -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    source = StreamSource()
    (run,) = source.apply([msgspec.structs.replace(stored(ABC), **window)])
    event = to_event(run)
    assert isinstance(event, BlockStored)
    assert (event.group_idx, event.kv_cache_spec_sliding_window) == (1, 8)
    assert source.apply([removed(ABC)]) == ()  # group 0 has none
    (gone,) = source.apply([BlockRemoved([key(ABC)], "GPU", 1)])
    assert isinstance(gone, RemovedRun)
    assert gone.group.index == 1


def test_the_first_group_of_a_prefix_kind_is_the_main_one() -> None:
    source = StreamSource()
    (window,) = source.apply([msgspec.structs.replace(stored(A), kv_cache_spec_kind="mamba")])
    (full,) = source.apply([msgspec.structs.replace(stored(A), group_idx=1, kv_cache_spec_kind="mla_attention")])
    (other,) = source.apply([msgspec.structs.replace(stored(A), group_idx=2, kv_cache_spec_kind="full_attention")])
    mains = [run.group.main for run in (window, full, other) if isinstance(run, BlockStoreMeta)]
    assert mains == [False, True, False]


def test_hashes_inside_blocks_stand_alone_where_the_block_size_is_known() -> None:
    source = StreamSource(block_size=4)
    (run,) = source.apply([stored(AB)])
    assert isinstance(run, BlockStoreMeta)
    assert run.inner
    (gone,) = source.apply([removed(AB)])
    assert isinstance(gone, RemovedRun)
    assert gone.inner


# losses, restarts, silence


def test_what_was_known_before_a_loss_is_gone_and_what_comes_after_waits_for_its_parent() -> None:
    source = StreamSource()
    source.apply([stored(AB, 2)])
    assert said(source.lose()) == [minus(AB, A)]
    assert source.apply([stored(ABC)]) == ()
    assert said(source.apply([stored(AB, 2)])) == [plus(A, AB), plus(ABC)]


def test_of_a_state_told_again_only_the_difference_is_announced() -> None:
    source = StreamSource()
    source.apply([stored(ABC, 3), stored(AB)])
    assert source.doubt() == ()
    assert said(source.apply([CLEAR, stored(AB, 2), stored(AC)])) == [plus(AC)]
    assert said(source.settle()) == [minus(ABC)]
    assert said(source.apply([removed(AB)])) == [minus(AB)], "it was told once since"
    assert source.settle() == ()


def test_what_was_not_told_again_goes_a_slice_at_a_time() -> None:
    source, fold = StreamSource(), Residency()
    blocks = [BlockStored([name], None, [1, 2], 2, None, None, None) for name in range(1000)]
    fold.apply(map(to_event, source.apply(blocks)))
    source.doubt()
    source.apply(blocks[:1])
    sizes = []
    while not sizes or source.settling:
        fold.apply(map(to_event, source.settle()))
        fold.apply(map(to_event, source.apply(blocks[998:999])))  # told after all, while it goes on
        sizes.append(len(fold))
        fold.check()
    assert len(sizes) >= 4
    assert sizes[-1] in (1, 2)
    assert source.resident() == {"GPU": len(fold)}


@pytest.mark.parametrize("event", [CLEAR, None])
def test_a_clear_or_another_telling_while_it_settles(event: AllBlocksCleared | None) -> None:
    source, fold = StreamSource(), Residency()
    blocks = [BlockStored([name], None, [1, 2], 2, None, None, None) for name in range(1000)]
    fold.apply(map(to_event, source.apply(blocks)))
    source.doubt()
    source.apply(blocks[:1])
    fold.apply(map(to_event, source.settle()))
    assert source.settling
    said_now = source.apply([event]) if event else source.doubt()
    fold.apply(map(to_event, said_now))
    assert not source.settling
    if event is None:
        fold.apply(map(to_event, source.apply(blocks)))
        fold.apply(map(to_event, source.settle()))
    fold.check()
    assert len(fold) == (0 if event else 1000)


def test_many_clears_within_one_telling() -> None:
    source = StreamSource()
    source.apply([stored(AB, 2)])
    source.doubt()
    source.apply([CLEAR] * 255)
    assert said(source.apply([stored(A)])) == []
    assert said(source.settle()) == [minus(AB)]


def test_a_silent_source_is_gone_and_comes_back() -> None:
    source = StreamSource()
    source.apply([stored(ABC, 3)])
    assert said(source.hide()) == [minus(ABC, AB, A)]
    assert source.hide() == ()
    assert source.resident() == {"GPU": 0}
    assert [*source.cut().runs()] == []
    assert source.apply([removed(ABC), stored(AC)]) == ()
    assert said(source.show()) == [plus(A, AB), plus(AC)]


def test_a_source_that_starts_anew_while_it_is_hidden() -> None:
    source = StreamSource()
    source.apply([stored(ABC, 3)])
    source.hide()
    source.doubt()
    source.apply([stored(A)])
    assert said(source.show()) == [plus(A)]
    assert source.settle() == ()


# every layout there is


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)
def test_every_layout_is_read(vector: object) -> None:
    """Its stores are held, or wait for a parent that the vector does not have."""
    decoded = decode_batch(vector.payload)  # type: ignore[attr-defined]
    source = StreamSource()
    fold = Residency()
    fold.apply(map(to_event, source.apply(decoded.batch.events)))
    source.check()
    assert not +fold.faults
    stats = source.stats()
    events: list[Event] = decoded.batch.events
    told = Counter(type(event).__name__ for event in events)
    blocks = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
    assert stats["malformed"] == 0 or "token_count" in malformed(events)
    assert sum(stats[name] for name in ("stored", "duplicates", "malformed", "not_its_own")) == blocks
    assert stats["cleared"] == told["AllBlocksCleared"]


def malformed(events: Sequence[Event]) -> Counter[str]:
    fold = Residency()
    fold.apply(events)
    return fold.faults


@pytest.mark.parametrize(
    "name", sorted({vector.id.split(":")[0] for vector in VECTORS if "layouts" not in vector.id})
)
def test_a_recording_of_a_real_engine_folds_to_the_same(name: str) -> None:
    """Without the orphans: what the recording's own fold has a whole chain of."""
    source, ours, theirs = StreamSource(), Residency(), Residency()
    path = File(__file__).parents[2] / "proto" / "vectors" / f"{name}.jsonl"
    for line in path.read_text().splitlines():
        frames = json.loads(line).get("frames")
        if frames and (len(frames) == 3 or frames[3]):
            events = decode_batch(bytes.fromhex(frames[-1])).batch.events
            theirs.apply(events)
            ours.apply(map(to_event, source.apply(events)))
            source.check()
    ours.check()
    assert {shelf: set(blocks) for shelf, blocks in ours.shelves.items() if blocks} == whole_chains(theirs)


def whole_chains(fold: Residency) -> dict[Shelf, set[int]]:
    found = {}
    for shelf, blocks in fold.shelves.items():
        whole: set[int] = set()
        for name in blocks:
            chain, step = [name], blocks[name]
            while step is not None and step in blocks:
                chain.append(step)
                step = blocks[step]
            whole |= set(chain) if step is None else set()
        if whole:
            found[Shelf(canonical_medium(shelf.medium), shelf.group)] = whole
    return found
