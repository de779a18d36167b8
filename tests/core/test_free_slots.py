"""Free slots: each is given to one, those that came back first, and reserved ones to nobody."""

from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.core.free_slots import FreeSlots

CAPACITY = 12
SLOTS = st.lists(st.integers(-2, CAPACITY + 2), max_size=8)


def test_those_never_taken_come_in_order_and_those_that_came_back_before_them_the_last_one_first() -> None:
    free = FreeSlots(5)
    assert free.take(3) == [0, 1, 2]
    free.give([1, 0])
    assert list(free) == [0, 1, 3, 4]
    assert free.take(3) == [0, 1, 3]
    assert (free.take(9), free.take(1), len(free)) == ([4], [], 0)


def test_reserved_ones_are_left_out_until_they_are_given() -> None:
    free = FreeSlots(6)
    free.reserve([1, 2, 5, 9, -1])
    assert (len(free), free.reserved, list(free)) == (3, 3, [0, 3, 4])
    assert free.take(2) == [0, 3]
    assert free.claim([2, 2, 0, 9]) == [2]
    assert (free.is_reserved(2), free.is_reserved(5), free.is_reserved(9)) == (False, True, False)
    free.give([2])
    assert (free.take(9), repr(free)) == ([2, 4], "<FreeSlots 0 of 6>")


def test_flags_say_the_same_at_once() -> None:
    free, other = FreeSlots(4), FreeSlots(4)
    free.reserve_at_once(bytes((0, 1, 0, 1)))
    other.reserve([1, 3])
    assert (len(free), free.reserved, list(free), free.claim([1])) == (2, 2, [0, 2], [1])
    assert (free.take(9), list(other)) == ([0, 2], [0, 2])


@given(SLOTS, st.lists(st.tuples(st.sampled_from(["take", "give", "claim"]), st.integers(0, 5)), max_size=30))
def test_no_slot_has_two_owners(reserved: list[int], history: list[tuple[str, int]]) -> None:
    free, taken = FreeSlots(CAPACITY), list[int]()
    free.reserve(reserved)
    kept = {slot for slot in reserved if 0 <= slot < CAPACITY}
    for verb, count in history:
        if verb == "take":
            room = len(free)
            got = free.take(count)
            assert len(got) == min(count, room)
            taken += got
        elif verb == "give":
            free.give([taken.pop() for _ in range(min(count, len(taken)))])
        else:
            own = free.claim(reserved[:count])
            assert kept >= set(own)
            kept -= set(own)
            taken += own
        assert sorted([*taken, *kept, *free]) == list(range(CAPACITY))
        assert (len(free), free.reserved) == (len([*free]), len(kept))
