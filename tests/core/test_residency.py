"""The fold: what a stream says is resident, and what it did wrong."""

from collections import Counter

import msgspec
import pytest

from kvevents_service.core.residency import Residency, Shelf, key64
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

DIGEST = bytes(24) + b"\xff" * 7 + b"\xfe"


def stored(*names: BlockHash, parent: BlockHash | None = None, medium: str | None = "CPU", **more) -> BlockStored:
    fields = {"block_size": 1, "lora_id": None, "lora_name": None, **more}
    return BlockStored(list(names), parent, [0] * len(names), medium=medium, **fields)


def removed(*names: BlockHash, medium: str | None = "CPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(names), medium, group_idx=group)


def fold(*events: Event) -> Residency:
    residency = Residency()
    residency.apply(events)
    return residency


def test_what_was_stored_and_not_removed_is_resident() -> None:
    residency = fold(stored(1, 2, 3), removed(3), stored(4, parent=2))
    residency.check()
    assert residency.hashes("CPU", 0) == {1, 2, 4}
    assert (residency.stored, residency.removed, len(residency)) == (4, 1, 3)


def test_a_clear_empties_every_shelf() -> None:
    residency = fold(stored(1), stored(1, medium="GPU"), AllBlocksCleared())
    assert (len(residency), residency.cleared) == (0, 1)


def test_a_new_publisher_starts_empty() -> None:
    residency = fold(stored(1))
    residency.forget()
    assert len(residency) == 0


def test_tiers_and_groups_are_shelves_of_their_own() -> None:
    residency = fold(stored(1), stored(1, group_idx=1), stored(1, medium="GPU"), removed(1, group=1))
    residency.check()
    assert [residency.hashes("CPU", 0), residency.hashes("CPU", 1)] == [{1}, set()]
    assert residency.hashes("GPU", 0) == {1}


@pytest.mark.parametrize(("one", "other"), [("CPU", "cpu_pinned"), (None, "gpu"), ("DISK", "NVME"), ("x", "X")])
def test_a_removal_meets_its_store_however_the_tier_is_spelled(one: str | None, other: str) -> None:
    residency = fold(stored(1, medium=one), removed(1, medium=other))
    residency.check()
    assert len(residency) == 0


def test_an_absent_group_is_group_0() -> None:
    residency = fold(stored(1, group_idx=None), removed(1, group=0))
    residency.check()
    assert len(residency) == 0


@pytest.mark.parametrize("form", [DIGEST, 2**64 - 2, -2, DIGEST[-8:]])
def test_all_forms_of_a_hash_are_one(form: BlockHash) -> None:
    assert key64(form) == 2**64 - 2
    residency = fold(stored(DIGEST), removed(form))
    residency.check()
    assert len(residency) == 0


@pytest.mark.parametrize(
    ("fault", "events"),
    [
        ("stored_twice", [stored(1), stored(1)]),
        ("stored_twice", [stored(1, 1)]),
        ("removed_unknown", [removed(1)]),
        ("removed_unknown", [stored(1), removed(1, 1)]),
        ("removed_unknown", [stored(1), removed(1, medium="GPU")]),
        ("parent_absent", [stored(2, parent=1)]),
        ("parent_absent", [stored(1, medium="GPU"), stored(2, parent=1)]),
        ("token_count", [stored(1, 2, block_size=2)]),
    ],
)
def test_what_a_true_stream_never_does_is_counted(fault: str, events: list[Event]) -> None:
    residency = fold(*events)
    assert +residency.faults == {fault: 1}
    with pytest.raises(AssertionError, match=fault):
        residency.check()


def test_a_store_of_an_output_that_hides_tokens_is_no_fault() -> None:
    residency = fold(msgspec.structs.replace(stored(1, 2), token_ids=[]))
    assert (residency.hashes("CPU", 0), +residency.faults, residency.redacted) == ({1, 2}, Counter(), 1)
    residency.check(redacted=True)
    with pytest.raises(AssertionError, match="1 stores without token ids"):
        residency.check()


def test_a_child_left_behind_is_found() -> None:
    residency = fold(stored(1, 2), removed(1))
    with pytest.raises(AssertionError, match="without their parent"):
        residency.check()


def test_a_sliding_window_may_leave_its_parents_behind() -> None:
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    fold(stored(2, 3, parent=1, **window), removed(2)).check()


def test_a_chain_may_leave_in_one_event_in_any_order() -> None:
    fold(stored(1, 2, 3), removed(1, 2, 3)).check()


def test_repr_tells_the_live_state() -> None:
    assert repr(fold(stored(1))) == "<Residency 1 blocks on 1 shelves, faults={}>"
    assert Shelf("CPU", 0) in fold(stored(1)).shelves


def test_what_was_removed_is_counted_once_and_the_rest_is_unknown() -> None:
    residency = fold(stored(1, DIGEST), removed(1, 1, DIGEST, 9))
    assert (residency.removed, residency.faults["removed_unknown"], len(residency)) == (2, 2, 0)
