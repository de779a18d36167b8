"""Readers that come late, lose messages or read slowly, over real sockets: all end with the resident set (I4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from kvevents_service.config import OutputConfig
from kvevents_service.core.metadata import snapshot
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.residency import Residency
from kvevents_service.core.snapshot import MessageLimits, PartLimits
from kvevents_service.service.app import Service
from kvevents_service.service.numbering import FILE_NAME
from kvevents_service.service.snapshot_endpoint import MAX_AT_ONCE
from kvevents_service.sockets import Receiver
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.frames import (
    SNAPSHOT_EMPTY,
    SNAPSHOT_REQUEST,
    SNAPSHOT_UNAVAILABLE,
    parse_live,
    parse_replay_reply,
    parse_snapshot_reply,
    replay_request,
)

DEADLINE_S = 20.0
GROUP = GroupSpec(0, "full_attention", 4, main=True)
BLOCKS_PER_CHAIN = 50
LATE = 1_234_567
LOCAL = "tcp://127.0.0.1:0"


class Tier:
    """A pool whose stores and clears are published as the scheduler would, without an engine."""

    def __init__(self, service: Service, capacity: int) -> None:
        self.pool = BlockPool(capacity, 1)
        self.publisher = service.publisher
        self.fresh = count(1000)
        """Families that were never stored."""
        service.events.renderer.recovery.sources = lambda: [self.pool]

    def store(self, family: int, blocks: int = BLOCKS_PER_CHAIN) -> None:
        chain = make_chain(range(10_000 * family, 10_000 * family + 4 * blocks), 4)
        meta = snapshot(chain.offer(range(blocks)), GROUP, "CPU", 32)
        slots = self.pool.allocate(meta, list(chain.hashes), None).slots
        self.pool.commit(slots)
        self.publisher.publish((meta,))

    def names(self) -> set[int]:
        return {int.from_bytes(name[-8:], "big") for name in self.pool.ready_hashes(0)}


class Told(NamedTuple):
    """A whole answer."""

    seqs: list[int]
    fold: Residency
    payloads: list[bytes]


async def ask(endpoint: str, start: int) -> Told:
    """A late joiner's whole replay."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, Receiver(dealer) as receiver:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart(replay_request(start))
        return await answer(receiver)


async def answer(receiver: Receiver) -> Told:
    told = Told([], Residency(), [])
    async with asyncio.timeout(DEADLINE_S):
        while (reply := parse_replay_reply(await receiver.recv())) is not None:
            told.seqs.append(reply.seq)
            told.payloads.append(reply.payload)
            told.fold.apply(decode_batch(reply.payload).batch.events)
    return told


def late(tmp_path: Path, number: int = LATE) -> dict[str, object]:
    """Settings of a sidecar whose numbers go on at `number`."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / FILE_NAME).write_text(str(number))
    return {"state_dir": str(tmp_path / "state"), "retained_batches": 20, "heartbeat_s": 0.0}


def whole(told: Told, tier: Tier) -> None:
    told.fold.check()
    assert told.fold.hashes("CPU", 0) == tier.names()
    assert told.seqs == list(range(told.seqs[0], told.seqs[-1] + 1))


@asynccontextmanager
async def busy(tier: Tier) -> AsyncIterator[None]:
    """Stores go on all the time."""

    async def store() -> None:
        for family in tier.fresh:
            tier.store(family, 2)
            await asyncio.sleep(0.001)

    storing = asyncio.create_task(store())
    try:
        yield
    finally:
        storing.cancel()


async def test_a_joiner_at_a_number_above_a_million_gets_the_whole_state(tmp_path: Path, run) -> None:
    async with run(**late(tmp_path)) as service:
        tier = Tier(service, 10_000)
        for family in range(100):
            tier.store(family)
        told = await ask(service.ready.replay, 0)
        whole(told, tier)
        assert told.seqs[-1] == LATE + 100
        assert len(told.seqs) == 10_000
        first = decode_batch(told.payloads[0]).batch.events
        assert first[0] == AllBlocksCleared()


async def test_fifty_joiners_at_once_share_one_snapshot(tmp_path: Path, run) -> None:
    async with run(**late(tmp_path)) as service:
        tier = Tier(service, 10_000)
        for family in range(100):
            tier.store(family)
        starts = [LATE - 300 + number for number in range(50)]
        answers = await asyncio.gather(*(ask(service.ready.replay, start) for start in starts))
        for start, told in zip(starts, answers, strict=True):
            whole(told, tier)
            assert told.seqs[0] == start
        stats = service.sidecar.stats()
        assert stats["snapshots_made"] == 1
        assert stats["replay_dropped_clients"] == 0


async def test_a_reader_that_stops_delays_nobody_and_holds_bounded_memory(tmp_path: Path, run) -> None:
    async with run(**late(tmp_path)) as service:
        tier = Tier(service, 40_000)
        for family in range(50):
            tier.store(family, 800)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stuck:
            stuck.setsockopt(zmq.LINGER, 0)
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.connect(service.ready.replay)
            stuck.send_multipart(replay_request(0))
            for start in (0, 5):
                whole(await ask(service.ready.replay, start), tier)
            tier.store(99, 3)
            assert service.sidecar.stats()["snapshots_held"] <= 3
            with Receiver(stuck) as receiver:  # and once it reads, it gets a true answer, as of when it asked
                told = await answer(receiver)
            told.fold.check()
            assert len(told.fold) == 40_000


async def test_a_hole_of_a_dropped_batch_is_repaired(run) -> None:
    async with run(heartbeat_s=0.0) as service:
        tier = Tier(service, 1000)
        journal = service.publisher.journal
        journal.limits = journal.limits._replace(pending_batches=2)
        for family in range(5):  # in one turn of the loop: the last three are dropped
            tier.store(family, 3)
        assert journal.dropped_batches == 3
        await asyncio.sleep(0)
        assert (await ask(service.ready.replay, 5)).seqs == []
        told = await ask(service.ready.replay, 2)
        whole(told, tier)
        assert told.seqs[0] == 2


async def test_live_events_go_on_while_a_snapshot_is_rendered_and_follow_it(tmp_path: Path, run) -> None:
    async with run(**{**late(tmp_path), "retained_batches": 5000}) as service:
        tier = Tier(service, 40_000)
        for family in range(20):
            tier.store(family, 800)
        with zmq.Context() as context, context.socket(zmq.SUB) as sub, Receiver(sub) as receiver:
            sub.setsockopt(zmq.RCVHWM, 0)
            sub.subscribe(b"")
            sub.connect(service.ready.pub)
            async with busy(tier):
                await asyncio.wait_for(receiver.recv(), DEADLINE_S)
                told = await ask(service.ready.replay, LATE - 3)
            last = service.publisher.publish(())
            tier.store(9999, 1)
            last = service.publisher.journal.next_seq - 1
            seq = told.seqs[-1]
            async with asyncio.timeout(DEADLINE_S):
                while seq < last:
                    frame = parse_live(await receiver.recv())
                    if frame.seq > seq:
                        assert frame.seq == seq + 1
                        seq = frame.seq
                        told.fold.apply(decode_batch(frame.payload).batch.events)
        told.fold.check()
        assert told.fold.hashes("CPU", 0) == tier.names()


# told live: a strict double of vllm-router


class ExactReader:
    """vllm-router 0.1.17 as measured (docs/interop.md).

    A reply counts only if it starts at the number asked for and has every number up to the live message that made
    it ask; what is beyond is thrown away. Any other clears, and it goes on behind that message.
    """

    def __init__(self, service: Service, output: int) -> None:
        bound = service.ready.outputs[output]
        self.replay = bound.replay
        self.pub = bound.pub
        self.last = -1
        self.fold = Residency()
        self.refused = 0

    async def live(self, frames: list[bytes]) -> None:
        frame = parse_live(frames)
        assert frame.seq > self.last, "numbers never go back"
        if frame.seq > self.last + 1:
            await self._replay(frame.seq)
        if frame.seq > self.last:
            self.fold.apply(decode_batch(frame.payload).batch.events)
            self.last = frame.seq

    async def _replay(self, live: int) -> None:
        told = await ask(self.replay, self.last + 1)
        wanted = list(range(self.last + 1, live + 1))
        if told.seqs[: len(wanted)] != wanted:
            self.refused += 1
            self.fold.forget()
            return
        for payload in told.payloads[: len(wanted)]:
            self.fold.apply(decode_batch(payload).batch.events)
        self.last = live


@contextmanager
def subscribed(context: zmq.Context, pub: str) -> Iterator[Receiver]:
    with context.socket(zmq.SUB) as sub, Receiver(sub) as receiver:
        sub.subscribe(b"")
        sub.connect(pub)
        yield receiver


async def drained(receiver: Receiver) -> None:
    """What came is lost."""
    while receiver.recv_nowait() is not None:
        pass


async def settled(service: Service, reader: ExactReader, receiver: Receiver) -> None:
    """Until it has had the newest batch live."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await reader.live(await receiver.recv())
            newest = service.publisher.journal.next_seq - 1
            if reader.last == newest and not service.events.renderer.teller.due:
                return


def two_outputs() -> tuple[OutputConfig, ...]:
    return (OutputConfig(LOCAL, LOCAL), OutputConfig(LOCAL, LOCAL, dialect="vllm-router"))


async def test_readers_of_exact_starts_that_no_reply_helps_are_told_live(tmp_path: Path, run) -> None:
    """The first is out of reach; then the state is too large for a reply, and for one message."""
    async with run(**late(tmp_path), outputs=two_outputs()) as service:
        tier, recovery = Tier(service, 10_000), service.events.renderer.recovery
        for family in range(20):
            tier.store(family)
        first, second = ExactReader(service, 1), ExactReader(service, 1)
        with zmq.Context() as context, subscribed(context, first.pub) as one, subscribed(context, first.pub) as two:
            async with busy(tier):
                await first.live(await one.recv())
            tier.store(500)
            await settled(service, first, one)
            assert first.fold.hashes("CPU", 0) == tier.names()
            assert (first.refused, service.sidecar.stats()["states_told_live"]) == (1, 1)

            recovery.limits = recovery.limits._replace(
                exact=MessageLimits(20_000), parts=PartLimits(1_000)
            )  # fmt: skip
            before = service.publisher.journal.next_seq
            async with busy(tier):
                await drained(two)
                await second.live(await two.recv())
            tier.store(501)
            for reader, receiver in ((second, two), (first, one)):
                await settled(service, reader, receiver)
                assert reader.fold.hashes("CPU", 0) == tier.names()
            kept = recovery.journal.retained_from(before, 1000)
            largest = max(len(payload) for batch in kept for payload in batch.payloads)
            assert (first.refused, second.refused) == (1, 1)
            assert service.sidecar.stats()["states_told_live"] == 2
        whole(await ask(service.ready.outputs[0].replay, 0), tier)  # the other output's readers notice nothing
        assert 10_000 < largest < 21_000


async def test_a_reader_of_exact_starts_gets_what_it_misses_from_there(tmp_path: Path, run) -> None:
    async with run(**late(tmp_path, 500), outputs=two_outputs()) as service:
        tier = Tier(service, 10_000)
        for family in range(20):
            tier.store(family)
        reader = ExactReader(service, 1)
        with zmq.Context() as context, subscribed(context, reader.pub) as receiver:
            async with busy(tier):
                await reader.live(await receiver.recv())
            for family in range(600, 640):  # what it misses is no longer kept, and of few numbers
                tier.store(family, 20)
            await asyncio.sleep(0.05)
            await drained(receiver)
            tier.store(641)
            await settled(service, reader, receiver)
        assert reader.fold.hashes("CPU", 0) == tier.names()
        assert reader.refused == service.sidecar.stats()["states_told_live"] == 0


# outputs


async def test_outputs_differ_in_topic_and_rank_and_agree_in_what_they_say(run) -> None:
    outputs = (
        OutputConfig(LOCAL, LOCAL, topic="kv@{pod}@{model}", dp_rank=3),
        OutputConfig(LOCAL, None, topic="plain"),
        OutputConfig(LOCAL, LOCAL, topic="kv@other"),
    )
    labels = {"pod": "10.0.0.7", "model": "m/one"}
    async with run(outputs=outputs, labels=labels, heartbeat_s=0.0) as service:
        tier = Tier(service, 1000)
        with zmq.Context() as context:
            subs = [context.socket(zmq.SUB) for _ in outputs]
            for sub, bound in zip(subs, service.ready.outputs, strict=True):
                sub.setsockopt(zmq.LINGER, 0)
                sub.subscribe(b"")
                sub.connect(bound.pub)
            frames = await asyncio.gather(*(first_of(sub, tier) for sub in subs))
            for sub in subs:
                sub.close()
        assert [frame.topic for frame in frames] == [b"kv@10.0.0.7@m/one", b"plain", b"kv@other"]
        ranks = [decode_batch(frame.payload).batch.data_parallel_rank for frame in frames]
        assert ranks == [3, 0, 0]
        folds = [(await ask(bound.replay, 0)).fold for bound in service.ready.outputs if bound.replay]
        assert [fold.hashes("CPU", 0) for fold in folds] == [tier.names()] * 2


async def first_of(sub: zmq.Socket, tier: Tier) -> object:
    """The first message, with stores until it comes."""
    with Receiver(sub) as receiver:
        async with asyncio.timeout(DEADLINE_S), busy(tier):
            return parse_live(await receiver.recv())


# the snapshot endpoint


async def request(endpoint: str, frames: Iterable[bytes] = (SNAPSHOT_REQUEST,)) -> object:
    with zmq.Context() as context, context.socket(zmq.REQ) as req, Receiver(req) as receiver:
        req.setsockopt(zmq.LINGER, 0)
        req.connect(endpoint)
        req.send_multipart(list(frames))
        return parse_snapshot_reply(await asyncio.wait_for(receiver.recv(), DEADLINE_S))


async def test_a_snapshot_request_is_answered_with_the_state_and_its_number(run) -> None:
    async with run(snapshot=LOCAL, heartbeat_s=0.0) as service:
        tier = Tier(service, 10_000)
        endpoint = service.ready.outputs[0].snapshot
        assert (await request(endpoint)).seq == SNAPSHOT_EMPTY
        for family in range(100):
            tier.store(family)
        first = await request(endpoint)
        tier.store(200)
        second = await request(endpoint)
        for reply, newest in ((first, 99), (second, 100)):
            fold = Residency()
            for payload in reply.payloads:
                batch = decode_batch(payload).batch
                assert batch.publisher_id == reply.publisher_id
                fold.apply(batch.events)
            fold.check()
            assert reply.seq == newest
            assert len(fold) == (newest + 1) * BLOCKS_PER_CHAIN
        assert service.sidecar.stats()["snapshots_made"] == 1
        live = (await ask(service.ready.replay, 99)).payloads[0]
        assert decode_batch(live).batch.publisher_id == first.publisher_id


async def test_answers_that_are_ready_together_share_the_turns_of_the_loop(run) -> None:
    async with run(snapshot=LOCAL, heartbeat_s=0.0) as service:
        Tier(service, 10_000).store(0)
        service.sidecar.rota._turn_s = 0.0  # a piece a turn
        (desk,) = service.events.snapshot_endpoints
        asking = [asyncio.create_task(request(service.ready.outputs[0].snapshot)) for _ in range(30)]
        in_one_turn = [0]
        while (before := desk.answered) < len(asking):
            await asyncio.sleep(0)
            in_one_turn.append(desk.answered - before)
        assert max(in_one_turn) == 1
        assert {reply.seq for reply in await asyncio.gather(*asking)} == {0}


async def test_requests_behind_an_answer_that_is_being_sent_wait_in_the_socket(run) -> None:
    async with run(snapshot=LOCAL, heartbeat_s=0.0) as service:
        (desk,) = service.events.snapshot_endpoints
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking, Receiver(asking) as receiver:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(service.ready.outputs[0].snapshot)
            async with asyncio.timeout(DEADLINE_S):
                async with desk._turn:
                    for _ in range(3 * MAX_AT_ONCE):
                        asking.send_multipart([b"", b"no such word"])
                    while desk.requests < MAX_AT_ONCE:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.1)
                    assert desk.requests == MAX_AT_ONCE
                for _ in range(3 * MAX_AT_ONCE):
                    assert parse_snapshot_reply((await receiver.recv())[1:]).seq < SNAPSHOT_EMPTY


@pytest.mark.parametrize("frames", [[b"snap"], [b""], [b"snapshot", b"more", b""]])
async def test_another_request_is_unavailable(run, frames: list[bytes]) -> None:
    async with run(snapshot=LOCAL) as service:
        reply = await request(service.ready.outputs[0].snapshot, frames)
        assert (reply.seq, reply.payloads) == (SNAPSHOT_UNAVAILABLE, [])
        assert service.sidecar.stats()["snapshots_unavailable"] == 1


async def test_a_snapshot_output_beats_even_if_heartbeats_are_off(run) -> None:
    async with run(snapshot=LOCAL, heartbeat_s=0.0) as service:
        assert service.publisher._heartbeat_s == 5.0
    async with run(snapshot=LOCAL, heartbeat_s=60.0) as service:
        assert service.publisher._heartbeat_s == 5.0
    async with run(heartbeat_s=0.0) as service:
        assert service.publisher._heartbeat_s is None


# with a real engine


async def test_the_state_of_the_real_tier_is_replayed(tmp_path: Path, run, engine) -> None:
    async with run(**late(tmp_path)) as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain(range(16), 4)
        await asyncio.to_thread(mini.store, chain, [0, 1, 2, 3])
        told = await ask(service.ready.replay, 0)
        names = {int.from_bytes(name[-8:], "big") for name in chain.hashes}
        assert told.fold.hashes("CPU", 0) == names
        assert await asyncio.to_thread(mini.client.reset) == 4
        told = await ask(service.ready.replay, 0)
        assert len(told.fold) == 0


async def test_a_reset_leaves_at_once(run, engine) -> None:
    """Not with the engine's next step, and not with the next heartbeat."""
    async with run(heartbeat_s=0.0) as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain(range(16), 4)
        await asyncio.to_thread(mini.store, chain, [0, 1, 2, 3])
        await asyncio.to_thread(mini.client.reset)
        async with asyncio.timeout(DEADLINE_S):
            while service.publisher.outputs[0].sent < 2:
                await asyncio.sleep(0.01)
