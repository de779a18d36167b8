"""Who is connected, which rank is whose, and when a place is free."""

import asyncio

import pytest

from kvevents_service.errors import ControlError
from kvevents_service.service.roster import Engine, Head, Roster
from kvevents_service.wire.control import Hello

HEAD = Head("n", 32, (), 4, 2)


class Connection:
    """Stands for a session: an id, and the end of its connection."""

    def __init__(self, session_id: int, memory: object = None) -> None:
        self.session_id = session_id
        self.memory = memory
        self.copies = 0
        self.closed = asyncio.get_running_loop().create_future()

    async def end(self) -> None:
        self.closed.set_result(None)
        await asyncio.sleep(0)


def worker(rank: int, ranks: int = 2, engine_id: str = "e") -> Hello:
    return Hello(1, "worker", engine_id, ranks=ranks, rank=rank)


async def test_ranks_are_found_by_the_name_of_their_engine() -> None:
    roster = Roster()
    one, two, other = Connection(1), Connection(2), Connection(3)
    roster.add_worker(two, worker(1))
    roster.add_worker(other, worker(1, engine_id="f"))
    engine = Engine(Connection(9), "e", HEAD)
    roster.add_engine(engine)
    roster.add_worker(one, worker(0))
    assert roster.holders(engine) == {0: one, 1: two}
    assert roster.workers == 3


async def test_an_engine_that_brings_its_memory_is_its_own_rank_and_shares_its_name() -> None:
    roster = Roster()
    for number in (1, 2):
        engine = Engine(Connection(number, memory=object()), "same", HEAD._replace(ranks=1))
        roster.add_engine(engine)
        assert roster.holders(engine) == {0: engine.session}
    assert roster.engine_named("same") is None


async def test_a_place_is_free_when_its_connection_has_ended_and_not_before() -> None:
    roster, first = Roster(), Connection(1)
    roster.add_worker(first, worker(1))
    roster.remove(first)
    with pytest.raises(ControlError, match="rank_taken"):
        roster.add_worker(Connection(2), worker(1))
    await first.end()
    roster.add_worker(Connection(3), worker(1))


async def test_a_name_is_free_when_its_connection_has_ended_and_not_before() -> None:
    roster, first = Roster(), Connection(1)
    engine = Engine(first, "e", HEAD)
    roster.add_engine(engine)
    assert roster.remove(first) == engine
    with pytest.raises(ControlError, match="engine_taken"):
        roster.add_engine(Engine(Connection(2), "e", HEAD))
    await first.end()
    roster.add_engine(Engine(Connection(3), "e", HEAD))


async def test_whoever_leaves_says_whom_it_touches() -> None:
    roster, rank, stranger = Roster(), Connection(1), Connection(2)
    roster.add_worker(rank, worker(1))
    assert roster.remove(rank) is None
    await rank.end()
    engine = Engine(Connection(9), "e", HEAD)
    roster.add_engine(engine)
    again = Connection(3)
    roster.add_worker(again, worker(1))
    assert roster.remove(again) == engine
    assert roster.holders(engine) == {}
    assert roster.remove(stranger) is None


@pytest.mark.parametrize("engine_first", [True, False])
async def test_an_engine_and_its_workers_say_the_same_number_of_ranks(engine_first: bool) -> None:
    roster = Roster()
    steps = [
        lambda: roster.add_engine(Engine(Connection(1), "e", HEAD)),
        lambda: roster.add_worker(Connection(2), worker(0, ranks=3)),
    ]
    first, second = steps if engine_first else steps[::-1]
    first()
    with pytest.raises(ControlError, match=r"bad_rank: ranks"):
        second()
    with pytest.raises(ControlError, match=r"bad_rank: ranks"):
        roster.add_worker(Connection(3), worker(1, ranks=4))
