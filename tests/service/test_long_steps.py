"""A step that offers many blocks, over the real socket."""

import asyncio
from unittest.mock import Mock

from service.test_engine_plane import DEADLINE_S, assert_stream_is_true, chain

from kvevents_service.engine.offers import make_offer
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import Step, StepDone
from kvevents_service.wire.framing import decode_sidecar, encode_message


def cut_steps(service, blocks: int) -> None:
    """Take steps in parts of so many blocks, each in a turn of its own."""
    tier = service.sidecar.tier.scheduler.tier
    tier.limits = tier.limits._replace(step_blocks=blocks)
    service.sidecar.rota._turn_s = 0.0


def offered(mini, prompt) -> None:
    offer = make_offer("r", prompt.hashes, prompt.token_ids, list(range(len(prompt.hashes))))
    assert mini.client.step([offer]) is not None


async def assert_it_is_true(service, inspected) -> None:
    if inspected.next_seq:  # else no copy has ended in time, and nothing was said
        await assert_stream_is_true(service, inspected)


async def test_it_is_taken_in_parts_and_answered_once(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        cut_steps(service, 3)
        prompt, pool, seen = chain(1, 20), service.sidecar.tier.scheduler.pool, set()
        for block in range(20):
            mini.fill(block, 10 + block)
        stored = asyncio.create_task(asyncio.to_thread(mini.store, prompt, list(range(20))))
        while not stored.done():
            seen.add(len(pool))
            await asyncio.sleep(0)
        assert [(end.stored, end.known, end.declined) for end in stored.result().steps] == [(20, 0, 0)]
        assert len(seen) > 3  # others have had their turn in between
        assert (await asyncio.to_thread(mini.client.poll)).steps == []
        assert await asyncio.to_thread(mini.load, prompt, list(range(40, 60))) == 20
        assert all(mini.holds(40 + block, 10 + block) for block in range(20))
        await assert_stream_is_true(service, await asyncio.to_thread(mini.client.inspect, residents=True))


async def test_what_comes_behind_it_waits(run, engine) -> None:
    """The answer to a reset ends all of the step: nothing of it is there afterwards."""
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        cut_steps(service, 1)
        await asyncio.to_thread(offered, mini, chain(1, 20))
        await asyncio.to_thread(mini.client.reset, DEADLINE_S)
        (end,) = (await asyncio.to_thread(mini.wait)).steps
        assert end.stored + end.declined == 20
        inspected = await asyncio.to_thread(mini.client.inspect, residents=True)
        assert inspected.stats["blocks_resident"] == inspected.stats["blocks_pending"] == 0
        await assert_it_is_true(service, inspected)


async def test_an_engine_that_dies_in_the_middle_leaves_nothing_pending(run, engine) -> None:
    async with run() as service:
        mini, other = await asyncio.to_thread(engine), await asyncio.to_thread(engine)
        cut_steps(service, 1)
        pool = service.sidecar.tier.scheduler.pool
        await asyncio.to_thread(offered, mini, chain(1, 20))
        async with asyncio.timeout(DEADLINE_S):
            while not len(pool):
                await asyncio.sleep(0)
        assert len(pool) < 20
        next(iter(service.sidecar.roster.engines.values())).session.abort()
        async with asyncio.timeout(DEADLINE_S):
            while len(service.sidecar.roster.engines) > 1 or service.sidecar.copies.running:
                await asyncio.sleep(0.01)
        inspected = await asyncio.to_thread(other.client.inspect, residents=True)
        assert inspected.stats["blocks_pending"] == 0
        assert inspected.stats["blocks_resident"] < 20
        await assert_it_is_true(service, inspected)


async def test_parts_that_cannot_be_taken_any_more_are_declined(run, engine, monkeypatch) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        cut_steps(service, 8)
        closed = ControlError("draining", "message", "a sidecar that does not end")
        monkeypatch.setattr(service.sidecar, "check_open", Mock(side_effect=[None, None, closed, None]))
        ended = await asyncio.to_thread(mini.store, chain(1, 20), list(range(20)))
        assert [(end.stored, end.known, end.declined) for end in ended.steps] == [(8, 0, 12)]


async def test_parts_are_declined_once_a_rank_has_gone(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        cut_steps(service, 1)
        scheduler = service.sidecar.tier.scheduler
        await asyncio.to_thread(offered, mini, chain(1, 20))
        async with asyncio.timeout(DEADLINE_S):
            while not len(scheduler.pool):
                await asyncio.sleep(0)
        (session_id,) = scheduler.tier.engine_blocks
        taken = len(scheduler.pool)
        scheduler.rank_gone(session_id)
        scheduler.hello(session_id, 64)  # it is back, with other bytes
        (end,) = (await asyncio.to_thread(mini.wait)).steps
        assert 0 < taken < 20
        assert end.declined >= 20 - taken
        assert scheduler.stats()["declined_ranks_absent"] == 20 - taken


async def test_two_steps_of_one_id_are_both_answered(run, engine) -> None:
    """No sum is of both: neither end comes before its own copies."""
    async with run() as service:
        await asyncio.to_thread(engine)
        cut_steps(service, 4)
        session = next(iter(service.sidecar.roster.engines.values())).session
        said, write = [], session._transport.write
        mocked = Mock(wraps=session._transport)
        mocked.write.side_effect = lambda frame: (said.append(frame), write(frame))
        session._transport = mocked
        prompt = chain(1, 12)
        offer = make_offer("r", prompt.hashes, prompt.token_ids, range(12))
        for step in (Step(77, [offer]), Step(77, [])):  # the second one ends at once, the first one's copies do not
            session._arrived.append(encode_message(step)[4:])
        session._await_turn()
        async with asyncio.timeout(DEADLINE_S):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        ended = [decode_sidecar(frame[4:]) for frame in said]
        assert sorted(ended, key=lambda end: end.stored) == [StepDone(77, 0, 0, 0), StepDone(77, 12, 0, 0)]


async def test_a_bug_in_a_part_ends_the_session_and_no_other(run, engine, monkeypatch) -> None:
    """In good order: the engine hears of no end before all copies have ended."""
    async with run() as service:
        mini, other = await asyncio.to_thread(engine), await asyncio.to_thread(engine)
        cut_steps(service, 4)
        scheduler, calls = service.sidecar.tier.scheduler, []
        step = scheduler.step

        def faulty(*of, **more):
            calls.append(of)
            if len(calls) == 2:
                raise KeyError("a bug")
            return step(*of, **more)

        monkeypatch.setattr(scheduler, "step", faulty)
        await asyncio.to_thread(offered, mini, chain(1, 20))
        async with asyncio.timeout(DEADLINE_S):
            while len(service.sidecar.roster.engines) > 1:
                await asyncio.sleep(0.01)
        assert len(calls) == 2
        assert service.sidecar.errors["internal"] == 1
        ended = await asyncio.to_thread(other.store, chain(2, 3), [0, 1, 2])
        assert ended.steps[0].stored == 3
        inspected = await asyncio.to_thread(other.client.inspect, residents=True)
        assert inspected.stats["blocks_pending"] == 0
        await assert_it_is_true(service, inspected)
