"""Blocks of a pending step are held, once each, and given back exactly when it ends (I9)."""

from kvevents_service.engine.offers import OfferBook, make_offer
from kvevents_service.wire.control import StepDone


class Blocks:
    """Reference counts, as an engine keeps them."""

    def __init__(self) -> None:
        self.references = [0] * 16

    def touch(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            self.references[block] += 1

    def free(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            self.references[block] -= 1

    def book(self, max_blocks: int = 8) -> OfferBook:
        return OfferBook(self.touch, self.free, max_blocks)


def test_blocks_are_held_until_their_step_has_ended() -> None:
    blocks = Blocks()
    book = blocks.book()
    book.hold(1, [3, 4])
    book.hold(2, [4, 5])
    assert blocks.references[3:6] == [1, 2, 1]
    assert (book.held_blocks, book.room) == (4, 4)
    book.settle([StepDone(1, 2, 0, 0)])
    assert blocks.references[3:6] == [0, 1, 1]
    book.settle([StepDone(2, 2, 0, 0), StepDone(2, 2, 0, 0)])
    assert (sum(blocks.references), book.held_blocks) == (0, 0)


def test_blocks_are_given_back_last_ones_first() -> None:
    freed: list[int] = []
    book = OfferBook(list, freed.extend, 8)
    book.keep([5, 6])
    book.hold(1, [1, 2, 3])
    book.settle([StepDone(1, 5, 0, 0)])
    assert freed == [3, 2, 1, 6, 5]


def test_what_was_kept_for_a_step_ends_with_it() -> None:
    blocks = Blocks()
    book = blocks.book()
    book.keep([3, 4])
    assert (blocks.references[3:5], book.room) == ([1, 1], 6)
    book.hold(1, [])
    book.keep([5])
    book.hold(None, [6])
    assert (blocks.references[3:7], book.room) == ([1, 1, 0, 0], 6)
    book.settle([StepDone(1, 2, 0, 0)])
    assert (sum(blocks.references), book.room) == (0, 8)


def test_what_is_held_already_is_kept_without_another_reference() -> None:
    blocks = Blocks()
    book = blocks.book()
    blocks.touch([3, 4])
    book.keep([3, 4], held=True)
    book.hold(1, [])
    assert (blocks.references[3:5], book.room) == ([1, 1], 6)
    book.settle([StepDone(1, 2, 0, 0)])
    assert (sum(blocks.references), book.room) == (0, 8)


def test_a_dropped_step_holds_nothing() -> None:
    blocks = Blocks()
    book = blocks.book()
    book.hold(None, [1, 2])
    book.hold(7, [])
    book.settle([StepDone(7, 0, 0, 0), StepDone(99, 0, 0, 0)])
    assert sum(blocks.references) == 0


def test_an_offer_packs_what_it_is_given() -> None:
    offer = make_offer("r", [b"a" * 32, b"b" * 32], [1, 2, 3, 4], [7, 9], parent=b"p" * 32, lora_name="x")
    assert offer.block_hashes == b"a" * 32 + b"b" * 32
    assert offer.token_ids == b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"
    assert offer.block_ids == b"\7\0\0\0\x09\0\0\0"
    assert (offer.parent, offer.lora_name, offer.extra_keys) == (b"p" * 32, "x", None)
