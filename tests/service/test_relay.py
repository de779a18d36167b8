"""The relay on real sockets: an engine's own stream in, one that a router can trust out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import pytest
import zmq
from core.engine_model import EngineModel, key, stored
from peers import Peer, following, peer

from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.relay_app import RelayService, started_relay
from kvevents_service.service.relayed import SourceView
from kvevents_service.sockets import bind
from kvevents_service.source_config import SourceConfig
from kvevents_service.subscriber import Source, Subscriber
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved

DEADLINE_S = 30.0
A, AB, ABC, AC = (0,), (0, 1), (0, 1, 1), (0, 2)
ANY = "tcp://127.0.0.1:0"


class Running(NamedTuple):
    """A relay in the test's own loop, and what one reader of it knows."""

    service: RelayService
    subscriber: Subscriber

    @property
    def shown(self) -> set[int]:
        folds = list(self.subscriber.state().values())
        return folds[0].hashes("GPU", 0) if folds else set()

    @property
    def view(self) -> SourceView:
        return self.service.ranks[0].relay.views()[0]

    async def until(self, true: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not true():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{self.shown} {self.view}") from None

    async def shows(self, *paths: tuple[int, ...]) -> None:
        """The reader comes to know exactly these, in a stream without a fault."""
        await self.until(lambda: self.shown == {*map(key, paths)})
        for fold in self.subscriber.state().values():
            fold.check()


@asynccontextmanager
async def relayed(source: SourceConfig, **more: object) -> AsyncIterator[Running]:
    config = ServeConfig(pub=ANY, replay=ANY, sources=(source,), heartbeat_s=0.2, **more)  # type: ignore[arg-type]
    async with started_relay(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        async with reader(service) as subscriber:
            yield Running(service, subscriber)
        for task in tasks:
            task.cancel()


def reader(service: RelayService, rank: int = 0) -> AbstractAsyncContextManager[Subscriber]:
    bound = service.ranks[rank].events.bound[0]
    return following(Source(bound.pub, bound.replay))


def source_of(peer: Peer, **more: object) -> SourceConfig:
    return SourceConfig(peer.endpoint, peer.replay, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def engine(**shape: object) -> AsyncIterator[Peer]:
    """As vLLM: it replays what it retains, and nothing else."""
    async with peer(snapshots=False, **shape) as made:
        yield made


async def test_what_was_sent_before_and_what_comes() -> None:
    async with engine() as peer:
        peer.send(1, stored(AB, 2))
        async with relayed(source_of(peer)) as relay:
            await relay.shows(A, AB)
            await peer.subscribed()
            peer.send(1, stored(ABC))
            await relay.shows(A, AB, ABC)
            peer.send(1, AllBlocksCleared(), stored(AC, 2))
            await relay.shows(A, AC)
            assert relay.view.resident == {"GPU": 2}


async def test_batches_that_were_lost_are_asked_for() -> None:
    async with engine() as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        peer.send(1, stored(A))
        await relay.shows(A)
        peer.model.publish(stored(AB))
        peer.send(1, stored(ABC))
        await relay.shows(A, AB, ABC)


async def test_a_history_that_is_gone_is_said_by_removals() -> None:
    async with engine(retained=1) as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        peer.send(1, stored(A))
        await relay.shows(A)
        peer.model.publish(BlockRemoved([key(A)], "GPU"))
        peer.send(1, stored((1,)))
        await relay.shows((1,))
        assert relay.view.counts["lost"] == 1


async def test_a_late_join_waits_for_parents() -> None:
    async with engine(retained=1) as peer:
        peer.send(1, stored(A))
        peer.send(1, stored(AB))
        async with relayed(source_of(peer)) as relay:
            await relay.until(lambda: relay.view.counts["orphans"] == 1)
            await relay.shows()
            peer.send(1, stored(A))
            await relay.shows(A, AB)


async def test_an_engine_that_is_killed_and_started_again() -> None:
    async with engine() as first:
        ports = first.ports
        async with relayed(source_of(first)) as relay:
            await first.subscribed()
            first.send(1, stored(ABC, 3))
            await relay.shows(A, AB, ABC)
            first.xpub.close()
            first.router.close()
            await relay.shows()  # its blocks are withdrawn
            assert relay.view.away
            async with engine(ports=ports) as second:
                await second.subscribed()
                second.send(1, stored(AC, 2))
                await relay.shows(A, AC)
                assert not relay.view.away


async def test_a_connection_that_drops_and_comes_back_to_the_same_engine() -> None:
    """It says nothing by itself: it is asked, and its blocks are said again."""
    async with engine() as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        peer.send(1, stored(AB, 2))
        await relay.shows(A, AB)
        peer.xpub.close()
        await relay.shows()
        peer.xpub = peer.context.socket(zmq.XPUB)
        bind(peer.xpub, peer.endpoint, "pub")
        await relay.shows(A, AB)
        assert not relay.view.away


async def test_a_restart_that_is_seen_by_its_numbers_alone() -> None:
    async with engine() as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        peer.send(3, stored(ABC, 3))
        await relay.shows(A, AB, ABC)
        peer.model = type(peer.model)(snapshots=False)
        peer.send(1, stored(AC, 2))
        await relay.shows(A, AC)
        assert sum(fold.faults.total() for fold in relay.subscriber.state().values()) == 0


async def test_a_silent_engine_is_gone_until_it_is_heard() -> None:
    async with engine() as peer, relayed(source_of(peer, stale_after_s=0.3)) as relay:
        await peer.subscribed()
        peer.send(1, stored(AB, 2))
        await relay.until(lambda: relay.view.away)
        await relay.shows()
        peer.send(1, stored(AC))
        await relay.shows(A, AB, AC)


async def test_a_router_that_joins_late_gets_the_whole_state() -> None:
    async with engine() as peer, relayed(source_of(peer), retained_batches=2) as relay:
        await peer.subscribed()
        peer.send(1, stored(ABC, 3))
        for _ in range(20):
            peer.send(1, stored(AC))
            peer.send(1, BlockRemoved([key(AC)], "GPU"))
        await relay.until(lambda: relay.view.counts["batches"] == 41)
        async with reader(relay.service) as late:
            await relay._replace(subscriber=late).shows(A, AB, ABC)


async def test_events_of_another_rank_are_left_out_and_counted() -> None:
    async with engine(dp_rank=3) as peer, relayed(source_of(peer)) as relay:
        peer.send(1, stored(A))
        await relay.until(lambda: relay.view.counts["other_origin"] > 0)
        await relay.shows()


async def test_a_publisher_that_says_no_rank_is_of_the_rank_it_was_given() -> None:
    async with engine(dp_rank=None) as peer, relayed(source_of(peer, dp_rank=5)) as relay:
        peer.send(1, stored(A))
        await relay.shows(A)
        assert relay.service.ranks[0].events.bound[0].dp_rank == 5


async def test_a_message_that_is_no_batch_costs_what_was_known() -> None:
    async with engine() as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        peer.send(1, stored(AB, 2))
        await relay.shows(A, AB)
        peer.xpub.send_multipart([b"kv", (1).to_bytes(8, "big"), b"\xc1"])
        await relay.shows()
        peer.xpub.send_multipart([b"kv", b"?", b"\xc1"])
        peer.model.next_seq = 2
        peer.send(1, stored(A))
        await relay.shows(A)
        assert relay.view.counts["lost"] == 1


async def test_a_long_life_of_a_model_engine() -> None:
    """With copies, clears and lost messages: at the end the reader knows what the engine holds."""
    model = EngineModel(11)
    async with engine(retained=1000) as peer, relayed(source_of(peer)) as relay:
        await peer.subscribed()
        for number in range(300):
            if number % 7 == 3:
                peer.model.publish(*model.batch())
            else:
                peer.send(1, *model.batch())
        peer.send(1, AllBlocksCleared())
        model.held.clear()
        peer.send(1, stored(ABC, 3))
        await relay.shows(A, AB, ABC)


async def test_a_stop_in_good_order_withdraws_all() -> None:
    async with engine() as peer, relayed(source_of(peer)) as relay:
        peer.send(1, stored(AB, 2))
        await relay.shows(A, AB)
        await relay.service.drain()
        await relay.shows()


async def test_numbers_go_on_after_a_restart_of_the_relay(tmp_path: object) -> None:
    async with engine() as peer:
        peer.send(1, stored(AB, 2))
        async with relayed(source_of(peer), state_dir=str(tmp_path)) as relay:
            await relay.shows(A, AB)
            before = relay.service.ranks[0].events.publisher.journal.next_seq
        async with relayed(source_of(peer), state_dir=str(tmp_path)) as relay:
            await relay.shows(A, AB)
            assert relay.service.ranks[0].events.publisher.journal.next_seq > before


async def test_two_ranks_each_have_a_journal() -> None:
    async with engine(dp_rank=0) as first, engine(dp_rank=1) as second:
        sources = (source_of(first), source_of(second, dp_rank=1))
        config = ServeConfig(pub=ANY, replay=ANY, sources=sources)
        async with started_relay(config) as service, asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in service.parts()]
            async with reader(service) as zero, reader(service, 1) as one:
                first.send(1, stored(A))
                second.send(1, stored(AB, 2))
                await Running(service, zero).shows(A)
                await Running(service, one).shows(A, AB)
            for task in tasks:
                task.cancel()


async def test_two_sources_of_one_rank_are_told_as_one() -> None:
    """As an engine and a connector with a stream of its own: a block goes with the last that has it."""
    async with engine() as first, engine() as second:
        config = ServeConfig(pub=ANY, replay=ANY, sources=(source_of(first), source_of(second)), retained_batches=2)
        async with started_relay(config) as service, asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in service.parts()]
            async with reader(service) as subscriber:
                known = Running(service, subscriber)
                first.send(1, stored(AB, 2))
                await known.shows(A, AB)
                second.send(1, stored(AB, 2), stored(AC))
                await known.shows(A, AB, AC)
                first.send(1, AllBlocksCleared(), stored(A))
                await known.until(lambda: known.view.counts["cleared"] == 1)
                await known.shows(A, AB, AC)
                async with reader(service) as late:
                    await known._replace(subscriber=late).shows(A, AB, AC)
                second.xpub.close()
                second.router.close()
                await known.shows(A)
            for task in tasks:
                task.cancel()


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({}, "sources"),
        ({"sources": (SourceConfig("tcp://127.0.0.1:1", dp_rank="0-1"),)}, "pub"),
        ({"sources": (SourceConfig("tcp://127.0.0.1:1", dp_rank="0-1"),), "pub": "ipc:///tmp/x"}, "pub"),
    ],
)
async def test_what_a_relay_cannot_be(settings: dict[str, object], setting: str) -> None:
    config = ServeConfig(**{"pub": "tcp://127.0.0.1:5657", "replay": "tcp://127.0.0.1:5658"} | settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        async with started_relay(config):
            pass
    assert raised.value.setting == setting
