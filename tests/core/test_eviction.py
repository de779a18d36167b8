"""The eviction queue: least recently used first, bounded, lazy."""

from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.eviction import EvictionQueue

CAPACITY = 8


def queue_of(*slots: int) -> EvictionQueue:
    queue = EvictionQueue(CAPACITY)
    for slot in slots:
        queue.touch(slot)
        queue.offer(slot)
    return queue


def drain(queue: EvictionQueue) -> list[int]:
    return list(iter(queue.pop, None))


def test_an_empty_queue_has_no_candidate() -> None:
    assert EvictionQueue(CAPACITY).pop() is None


def test_the_one_used_longest_ago_comes_first() -> None:
    assert drain(queue_of(3, 1, 2)) == [3, 1, 2]


def test_a_touch_after_the_offer_counts() -> None:
    queue = queue_of(3, 1, 2)
    queue.touch(3)
    assert drain(queue) == [1, 2, 3]


def test_a_slot_is_queued_once() -> None:
    queue = queue_of(3, 3, 3)
    assert len(queue) == 1
    assert drain(queue) == [3]


def test_a_popped_slot_can_be_offered_again() -> None:
    queue = queue_of(3)
    assert queue.pop() == 3
    queue.offer(3)
    assert queue.pop() == 3


def test_a_parent_is_as_young_as_its_child() -> None:
    queue = queue_of(1, 2, 3)
    queue.inherit(1, 3)
    assert drain(queue) == [2, 1, 3]


def test_a_parent_does_not_grow_older() -> None:
    queue = queue_of(1, 2, 3)
    queue.inherit(3, 1)
    assert drain(queue) == [1, 2, 3]


def test_a_run_is_used_at_one_time() -> None:
    queue = queue_of(7)
    queue.touch_run([5, 4])
    for slot in (5, 4):
        queue.offer(slot)
    assert drain(queue) == [7, 4, 5]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, CAPACITY - 1)), max_size=60))
def test_any_history_drains_in_order_of_use(history: list[tuple[bool, int]]) -> None:
    queue, used, offered = EvictionQueue(CAPACITY), dict.fromkeys(range(CAPACITY), -1), set()
    for time, (offer, slot) in enumerate(history):
        if offer:
            queue.offer(slot)
            offered.add(slot)
        else:
            queue.touch(slot)
            used[slot] = time
        assert len(queue) == len(offered)
    assert drain(queue) == sorted(offered, key=lambda slot: (used[slot], slot))
