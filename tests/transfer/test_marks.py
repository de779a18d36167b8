"""What waits for a mark goes on when the mark is reached, once, in order."""

from kvevents_service.transfer.marks import Marks


def test_what_waits_goes_on_in_order_when_its_mark_is_reached() -> None:
    marks, gone = Marks(), list[int]()
    for number in (3, 1, 2):
        marks.when(number, lambda number=number: gone.append(number))
    marks.note(2)
    assert gone == [1, 2]
    marks.note(1)
    assert (gone, marks.reached) == ([1, 2], 2)
    marks.note(7)
    assert gone == [1, 2, 3]


def test_a_mark_that_was_reached_holds_nothing_up() -> None:
    marks, gone = Marks(), list[int]()
    marks.note(4)
    marks.when(4, lambda: gone.append(4))
    assert gone == [4]


def test_what_was_forgotten_is_not_called() -> None:
    marks, gone = Marks(), list[int]()

    def go() -> None:
        gone.append(1)

    marks.when(1, go)
    marks.forget(go)
    marks.forget(go)
    marks.note(1)
    assert (gone, repr(marks)) == ([], "<Marks 1 waiting=0>")
