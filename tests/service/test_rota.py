"""Pieces of work that share the turns of a loop."""

import asyncio
from collections.abc import Callable

import pytest

from kvevents_service.service.rota import Piece, Rota
from kvevents_service.testing import ManualClock


class Work:
    """Pieces that take 0.6 ms each, noted with their name and the turn of the loop they were done in."""

    def __init__(self, turn_s: float = 0.001) -> None:
        self.clock = ManualClock()
        self.rota = Rota(self.clock, turn_s)
        self.done: list[tuple[str, int]] = []
        self.turn = 0

    def piece(self, name: str, times: int = 1) -> Piece:
        left = [times]

        def do() -> bool:
            self.clock.advance(0.0006)
            self.done.append((name, self.turn))
            left[0] -= 1
            return left[0] > 0

        return do

    async def turns(self, number: int) -> None:
        for _ in range(number):
            self.turn += 1
            await asyncio.sleep(0)


async def test_what_comes_while_nobody_waits_is_done_at_once() -> None:
    work = Work()
    work.rota.take(work.piece("a"))
    assert work.done == [("a", 0)]
    assert repr(work.rota) == "<Rota waiting=0>"


async def test_pieces_take_turns_and_a_turn_of_the_loop_ends_with_its_time() -> None:
    work = Work()
    work.rota.take(work.piece("a", 4))
    work.rota.take(work.piece("b", 2))
    work.rota.take(work.piece("c"))
    assert work.done == [("a", 0), ("a", 0)]
    await work.turns(4)
    assert work.done[2:] == [("a", 1), ("b", 1), ("c", 2), ("a", 2), ("b", 3)]


async def test_the_time_of_a_turn_is_that_of_all_together() -> None:
    work = Work()
    for name in "abc":
        work.rota.take(work.piece(name))
    assert work.done == [("a", 0), ("b", 0)]
    await work.turns(1)
    work.rota.take(work.piece("d"))
    assert work.done == [("a", 0), ("b", 0), ("c", 1), ("d", 1)]
    work.rota.take(work.piece("e"))
    assert len(work.done) == 4


async def test_a_piece_that_is_longer_than_a_turn_is_the_only_one_in_it() -> None:
    work = Work(turn_s=0.0001)
    for name in "abc":
        work.rota.take(work.piece(name))
    await work.turns(3)
    assert work.done == [("a", 0), ("b", 1), ("c", 2)]


async def test_what_a_piece_brings_comes_behind_what_waits() -> None:
    work, order = Work(turn_s=1.0), []

    def first() -> None:
        work.rota.take(lambda: order.append("third"))
        order.append("first")

    await work.turns(1)
    work.rota._waiting.append(first)
    work.rota.take(lambda: order.append("second"))
    assert order == ["first", "second", "third"]


async def test_a_coroutine_waits_for_the_end_of_its_pieces() -> None:
    work = Work()
    running = asyncio.create_task(work.rota.run(work.piece("a", 3)))
    await work.turns(1)
    assert not running.done()
    await work.turns(3)
    assert running.done()
    assert [name for name, _ in work.done] == ["a"] * 3


async def test_a_coroutine_gets_what_its_piece_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        await Rota().run(lambda: bool(1 / 0))


async def test_nothing_is_done_for_a_coroutine_that_is_cancelled() -> None:
    work = Work()
    running = asyncio.create_task(work.rota.run(work.piece("a", 100)))
    await work.turns(1)
    running.cancel()
    await asyncio.wait([running])
    done = len(work.done)
    await work.turns(3)
    assert len(work.done) == done < 100
    assert repr(work.rota) == "<Rota waiting=0>"


async def test_a_piece_that_fails_is_told_to_the_loop_and_the_others_go_on() -> None:
    work = Work(turn_s=1.0)
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    broken: Callable[[], bool] = lambda: bool(1 / 0)  # noqa: E731
    work.rota.take(broken)
    work.rota.take(work.piece("a"))
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
    assert work.done == [("a", 0)]


async def test_at_an_end_all_that_waits_is_done() -> None:
    work = Work()
    work.rota.take(work.piece("a", 5))
    work.rota.finish()
    assert work.done == [("a", 0)] * 5


async def test_a_turn_that_is_over_at_once_still_does_a_piece() -> None:
    rota, done = Rota(turn_s=0.0), []
    for number in range(3):
        rota.take(lambda number=number: done.append(number))
    assert done == [0]
    for _ in range(2):
        await asyncio.sleep(0)
    assert done == [0, 1, 2]
