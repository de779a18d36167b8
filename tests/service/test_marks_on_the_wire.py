"""Steps and loads wait, over the wire, until the engine says that its device has got as far as they name."""

import asyncio
from collections.abc import Callable

from kvevents_service.engine.client import OffloadClient
from kvevents_service.service.roster import MARKS_AHEAD
from kvevents_service.testing import make_chain

CHAIN = make_chain(range(8), 4)


async def test_a_step_ends_when_its_mark_has_been_reached(run: Callable, engine: Callable) -> None:
    async with run():
        mini = await asyncio.to_thread(engine)
        client: OffloadClient = mini.client
        step = client.step([CHAIN.offer([1, 2])], mark=3)
        client.mark(2)
        assert (await asyncio.to_thread(client.poll, 0.1)).steps == []
        for block, value in ((1, 11), (2, 22)):
            mini.fill(block, value)
        client.mark(3)
        (done,) = (await asyncio.to_thread(mini.wait)).steps
        assert (done.step_id, done.stored) == (step, 2)
        assert await asyncio.to_thread(mini.load, CHAIN, [5, 6]) == 2
        assert (mini.holds(5, 11), mini.holds(6, 22)) == (True, True)


async def test_a_mark_is_told_again_to_a_sidecar_that_was_away(run: Callable, engine: Callable) -> None:
    async with run():
        mini = await asyncio.to_thread(engine)
        mini.client.mark(7)
    await asyncio.to_thread(mini.client.poll, 0.1)
    async with run():
        assert await asyncio.to_thread(mini.client.wait_connected, 20.0)
        assert mini.client.step([CHAIN.offer([1, 2])], mark=7) is not None
        (done,) = (await asyncio.to_thread(mini.wait)).steps
        assert done.stored == 2


async def test_a_mark_that_cannot_come_is_refused_and_holds_nothing_up(run: Callable, engine: Callable) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        client: OffloadClient = mini.client
        client.mark(5)
        for number in (5 + MARKS_AHEAD + 1, (1 << 64) - 1):
            client.step([CHAIN.offer([3, 4])], mark=number)
            (given_up,) = (await asyncio.to_thread(mini.wait)).steps
            assert given_up.stored == 0
            assert client.last_error.startswith(f"bad_mark: mark: expected at most {5 + MARKS_AHEAD}:")
        client.step([CHAIN.offer([1, 2])], mark=5)
        (done,) = (await asyncio.to_thread(mini.wait)).steps
        assert done.stored == 2
        assert service.sidecar.errors["bad_mark"] == 2
