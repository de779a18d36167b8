"""Many sources, losses, restarts and silence on real sockets: what each one does to the others, and to the fold."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest
import zmq
from core.publishers import blocks_of, removed, stored
from peers import DEADLINE_S, EMPTY, QUICK, Peer, briefly, peer, plain, received, take

from kvevents_service.errors import ConfigError
from kvevents_service.sockets import bind
from kvevents_service.subscriber import (
    Back,
    Batch,
    Gap,
    HoldLimits,
    Item,
    Origin,
    Restart,
    Resync,
    Source,
    Stale,
    Subscriber,
    Timing,
    Undecodable,
)
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.frames import REPLAY_END, live_frames, replay_reply

IMPATIENT = Timing(stall_s=0.1, settle_s=0.02, refresh_s=0.05)


@pytest.fixture
async def two() -> AsyncIterator[tuple[Peer, Peer]]:
    async with peer() as one, peer() as other:
        yield one, other


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An endpoint that is taken, so that nobody else binds it, and never answers."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    yield bind(socket, "tcp://127.0.0.1:0", "test")
    socket.close()
    context.term()


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket, str]]:
    """A replay endpoint whose answers a test gives by hand."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    yield socket, bind(socket, "tcp://127.0.0.1:0", "test")
    context.destroy(linger=0)


async def until(subscriber: Subscriber, seq: int, label: str = "") -> list[Item]:
    """Items up to the batch of this number."""
    items: list[Item] = []
    async with asyncio.timeout(DEADLINE_S):
        async for item in subscriber:
            items.append(item)
            if isinstance(item, Batch) and item.seq == seq and label in ("", item.source.label):
                return items
    raise AssertionError("closed")


def fold_of(subscriber: Subscriber, label: str = "") -> object:
    (fold,) = (fold for origin, fold in subscriber.state().items() if label in ("", origin.label))
    return blocks_of(fold)


class TestMany:
    async def test_items_say_which_source(self, two: tuple[Peer, Peer]) -> None:
        one, other = two
        sources = [one.source(label="one"), other.source()]
        one.send(2)
        other.send(1)
        async with Subscriber(sources) as subscriber:
            items = await take(subscriber, 3)
            assert {(item.source, item.seq) for item in items} == {
                (Origin("one", b"kv", 0), 0),
                (Origin("one", b"kv", 0), 1),
                (Origin(other.endpoint, b"kv", 0), 0),
            }
            assert subscriber.connections.keys() == {"one", other.endpoint}

    async def test_a_flood_of_one_does_not_hold_up_the_other(self, two: tuple[Peer, Peer]) -> None:
        one, other = two
        async with Subscriber([Source(one.endpoint, label="one"), Source(other.endpoint)]) as subscriber:
            await one.subscribed()
            await other.subscribed()
            one.send(5000)
            await take(subscriber, 10)
            other.send(1)
            async with asyncio.timeout(10.0):
                while not subscriber._feeds[1].readable:  # it has come
                    await asyncio.sleep(0.01)
            items = await until(subscriber, 0, other.endpoint)
            assert len(items) < 500

    async def test_one_that_is_not_there_does_not_hold_up_the_other(self, two: tuple[Peer, Peer], nowhere) -> None:
        one, other = two
        sources = [
            Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9"),
            Source("tcp://no-such-host.invalid:9", "tcp://no-such-host.invalid:9"),
            Source(other.endpoint, replay=nowhere),
            one.source(),
        ]
        async with Subscriber(sources) as subscriber:
            await one.subscribed()
            await other.subscribed()
            other.send(1)  # waits for its replay, which takes two times 2 s to give up
            one.send(100)
            assert [item.source.label for item in await until(subscriber, 99, one.endpoint)] == [one.endpoint] * 100
            assert subscriber.connections[one.endpoint]
            assert not subscriber.connected

    async def test_ranks_on_one_endpoint_have_numbers_of_their_own(self) -> None:
        async with peer() as publisher, Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            sent = [(0, 0), (1, 500), (0, 1), (1, 501), (0, 2), (1, 503)]
            for publisher.model.dp_rank, seq in sent:
                publisher.xpub.send_multipart(live_frames(*publisher.model.frame(seq)))
            items = await take(subscriber, 7)
            assert [plain(item) for item in items] == [0, 500, 1, 501, 2, Gap(502, 503), 503]
            assert [item.source.dp_rank for item in items] == [0, 1, 0, 1, 0, 1, 1]

    async def test_topics_have_numbers_of_their_own(self) -> None:
        async with peer() as publisher, Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            for topic, seq in ((b"a", 5), (b"b", 1), (b"a", 7)):
                publisher.xpub.send_multipart(live_frames(topic, seq, EMPTY))
            items = await take(subscriber, 4)
            assert [(item.source.topic, plain(item)) for item in items] == [
                *((b"a", 5), (b"b", 1), (b"a", Gap(6, 7)), (b"a", 7)),
            ]

    async def test_a_second_rank_has_its_own_replay(self) -> None:
        async with peer() as publisher, Subscriber(publisher.source()) as subscriber:
            await publisher.subscribed()
            publisher.send(2)
            await until(subscriber, 1)
            publisher.model.dp_rank = 1  # of the retained ones as well
            history = [publisher.model.frame(seq) for seq in (0, 1)]
            publisher.model.journal = dict(enumerate(history))
            publisher.xpub.send_multipart(live_frames(*history[1]))
            items = await take(subscriber, 2)
            assert [(plain(item), item.source.dp_rank) for item in items] == [("r0", 1), ("r1", 1)]

    async def test_the_rank_that_is_not_said(self) -> None:
        async with (
            peer(dp_rank=None) as publisher,
            Subscriber(Source(publisher.endpoint, dp_rank=3)) as subscriber,
        ):
            await publisher.subscribed()
            publisher.send(1)
            (item,) = await take(subscriber, 1)
            assert item.source.dp_rank == 3

    async def test_counters_are_bounded(self) -> None:
        async with peer() as publisher, Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            for topic in range(100):
                publisher.xpub.send_multipart(live_frames(b"%d" % topic, 0, EMPTY))
            publisher.xpub.send_multipart(live_frames(b"0", 1, EMPTY))
            assert len(await until(subscriber, 1)) == 65
            assert subscriber.stats()["lanes_refused"] == 36

    @pytest.mark.parametrize(
        ("sources", "options", "setting"),
        [
            ([], {}, "sources"),
            (["tcp://h:1", "tcp://h:1"], {}, "sources"),
            ([Source("tcp://h:1", label="x"), Source("tcp://h:2", label="x")], {}, "sources"),
            ("tcp://h:1", {"overflow": "lose"}, "overflow"),
        ],
    )
    def test_settings_that_cannot_be(self, sources: object, options: dict[str, object], setting: str) -> None:
        with pytest.raises(ConfigError) as raised:
            Subscriber(sources, **options)
        assert raised.value.setting == setting

    async def test_one_bad_endpoint_closes_the_others(self, two: tuple[Peer, Peer]) -> None:
        subscriber = Subscriber([two[0].endpoint, "nowhere"])
        with pytest.raises(ConfigError):
            await subscriber.__aenter__()
        assert "closed" in repr(subscriber)


class TestLateJoin:
    async def test_behind_what_is_retained_the_whole_state_comes(self) -> None:
        async with peer(retained=5, window=10, first_seq=1_000_000) as publisher:
            publisher.send(1, stored(1), stored(2, "GPU"))
            publisher.send(20)
            async with Subscriber(publisher.source(), track=True) as subscriber:
                await publisher.subscribed()
                publisher.send(3)
                last = publisher.model.next_seq - 1
                items = await until(subscriber, last)
                resync, head = items[:2]
                assert plain(resync)._replace(got=0) == Resync(0, 0)
                assert head.seq == resync.got > 1_000_000
                assert not any(isinstance(item, Gap) for item in items)
                assert fold_of(subscriber) == blocks_of(publisher.model.fold)
                assert subscriber.stats()["gaps"] == 0

    async def test_a_publisher_without_snapshots_leaves_a_gap(self) -> None:
        async with peer(retained=5, snapshots=False) as publisher:
            publisher.send(20)
            async with Subscriber(publisher.source(), track=True) as subscriber:
                assert plain((await until(subscriber, 19))[0]) == Gap(0, 15)
                assert len(subscriber.state()) == 1

    async def test_the_snapshot_endpoint(self) -> None:
        async with peer(retained=5, publisher_id=b"p" * 16) as publisher:
            publisher.send(20)
            source = publisher.source(snapshot=publisher.replay, topic="kv")
            async with Subscriber(source, track=True) as subscriber:
                await publisher.subscribed()
                items = await until(subscriber, 19)
                assert plain(items[0]) == Resync(0, 20)
                publisher.send(2)
                publisher.send(1, removed(3))
                await until(subscriber, 22)
                assert fold_of(subscriber) == blocks_of(publisher.model.fold)
                assert list(subscriber.state()) == [Origin(publisher.endpoint, b"kv", None)]

    async def test_a_snapshot_of_nothing_and_none_at_all(self, router) -> None:
        socket, endpoint = router
        async with peer() as publisher:
            source = Source(publisher.endpoint, snapshot=endpoint)
            async with Subscriber(source, timing=IMPATIENT) as subscriber:
                await publisher.subscribed()
                publisher.send(1)
                waiting = asyncio.create_task(take(subscriber, 2))
                for seq in (-2, -1):  # cannot be had; then: nothing was sent so far
                    identity, *request = await received(socket)
                    assert request == [b"", b"snapshot"]
                    answer = [b"", seq.to_bytes(8, "big", signed=True), b"p" * 16]
                    socket.send_multipart([identity, *answer])
                assert [plain(item) for item in await waiting] == [Resync(0, 0), 0]


class TestLoss:
    async def test_a_removal_is_never_overtaken_by_its_store(self, router) -> None:
        """The store is lost, the replay times out once, then comes."""
        socket, endpoint = router
        async with peer() as publisher:
            source = Source(publisher.endpoint, replay=endpoint)
            async with Subscriber(source, timing=IMPATIENT, track=True) as subscriber:
                await publisher.subscribed()
                publisher.model.publish(stored(1))
                publisher.send(1, removed(1))
                waiting = asyncio.create_task(briefly(subscriber, 2))
                await received(socket)  # and no answer
                identity, *_ = await received(socket)
                for frame in publisher.model.reply(0):
                    socket.send_multipart([identity, *replay_reply(*frame)])
                socket.send_multipart([identity, *REPLAY_END])
                assert await waiting == ["r0", "r1"]
                assert fold_of(subscriber) == {}

    async def test_after_two_timeouts_a_gap_and_later_the_whole_state(self, router) -> None:
        socket, endpoint = router
        async with peer(retained=2) as publisher:
            source = Source(publisher.endpoint, replay=endpoint)
            async with Subscriber(source, timing=IMPATIENT, track=True) as subscriber:
                await publisher.subscribed()
                publisher.lose(5)
                publisher.send(1)
                waiting = asyncio.create_task(briefly(subscriber, 2))
                assert await waiting == [Gap(0, 5), 5]
                waiting = asyncio.create_task(until(subscriber, 6))
                asked: list[bytes] = []
                while len(asked) < 5:  # of all that were asked the last is answered
                    identity, *request = await received(socket)
                    asked.append(request[-1])
                publisher.model.publish()
                for frame in publisher.model.reply(0):
                    socket.send_multipart([identity, *replay_reply(*frame)])
                socket.send_multipart([identity, *REPLAY_END])
                assert plain((await waiting)[0]) == Resync(6, 0)
                assert fold_of(subscriber) == blocks_of(publisher.model.fold)
                assert subscriber.stats()["gaps"] == 1

    async def test_a_snapshot_that_breaks_off_is_no_state(self, router) -> None:
        socket, endpoint = router
        async with peer(retained=2) as publisher:
            publisher.send(9)
            source = Source(publisher.endpoint, replay=endpoint)
            async with Subscriber(source, timing=IMPATIENT, track=True) as subscriber:
                waiting = asyncio.create_task(take(subscriber, 2 + 9))
                identity, *_ = await received(socket)
                for frame in publisher.model.reply(0)[:2]:
                    socket.send_multipart([identity, *replay_reply(*frame)])
                identity, *_ = await received(socket)  # it asks again, for all of it
                for frame in publisher.model.reply(0):
                    socket.send_multipart([identity, *replay_reply(*frame)])
                socket.send_multipart([identity, *REPLAY_END])
                items = [plain(item) for item in await waiting]
                assert items[:4] == ["r0", "r1", Resync(2, 0), "r0"]
                await until(subscriber, 8) if items[-1] != "r8" else None
                assert fold_of(subscriber) == blocks_of(publisher.model.fold)

    async def test_an_undecodable_batch_brings_the_whole_state(self) -> None:
        async with (
            peer() as publisher,
            Subscriber(publisher.source(), timing=IMPATIENT, track=True) as subscriber,
        ):
            await publisher.subscribed()
            publisher.send(3)
            await until(subscriber, 2)
            frame = publisher.model.publish(stored(77))
            publisher.xpub.send_multipart(live_frames(b"kv", frame.seq, b"\xc1"))
            await until(subscriber, 3)
            assert subscriber.stats()["undecodable"] == 1
            assert fold_of(subscriber) == blocks_of(publisher.model.fold)

    @pytest.mark.parametrize("replay", [True, False])
    async def test_a_slow_consumer_that_drops_sees_it(self, replay: bool) -> None:
        async with peer(retained=10) as publisher:
            source = publisher.source() if replay else Source(publisher.endpoint)
            options = {"hold": HoldLimits(batches=50), "overflow": "drop", "track": True}
            async with Subscriber(source, **options) as subscriber:
                await publisher.subscribed()
                publisher.send(1)
                await until(subscriber, 0)
                publisher.send(3000)
                async with asyncio.timeout(DEADLINE_S):
                    while subscriber.stats()["dropped"] < 2950:
                        await asyncio.sleep(0)
                publisher.send(1)
                items = await until(subscriber, 3001)
                assert subscriber.stats()["dropped"] >= 2950
                assert any(isinstance(item, Gap) for item in items) == (not replay)
                if replay:
                    assert fold_of(subscriber) == blocks_of(publisher.model.fold)


class TestRestart:
    async def test_above_after_a_clear_is_no_gap(self) -> None:
        async with AsyncExitStack() as life:
            old = await life.enter_async_context(peer())
            old.send(3)
            async with Subscriber(old.source(), timing=QUICK, track=True) as subscriber:
                await until(subscriber, 2)
                await life.aclose()
                async with peer(ports=old.ports, first_seq=5000) as new:
                    waiting = asyncio.create_task(until(subscriber, 5000))  # it subscribes again while it waits
                    await new.subscribed()
                    new.send(1, AllBlocksCleared(), stored(5))
                    assert [plain(item) for item in await waiting] == [Resync(3, 5000), 5000]
                    assert fold_of(subscriber) == blocks_of(new.model.fold)

    async def test_forward_by_its_id(self) -> None:
        async with AsyncExitStack() as life:
            old = await life.enter_async_context(peer(publisher_id=b"a" * 16))
            old.send(10)
            async with Subscriber(old.source(), timing=QUICK, track=True) as subscriber:
                await until(subscriber, 9)
                await life.aclose()
                async with peer(ports=old.ports, publisher_id=b"b" * 16) as new:
                    new.lose(20)
                    waiting = asyncio.create_task(until(subscriber, 20))
                    await new.subscribed()
                    new.send(1)
                    items = [plain(item) for item in await waiting]
                    assert items == [Restart(9, 20), *(f"r{seq}" for seq in range(21))]
                    assert fold_of(subscriber) == blocks_of(new.model.fold)


class TestSilence:
    async def test_stale_and_back(self, two: tuple[Peer, Peer]) -> None:
        one, other = two
        sources = [one.source(label="one"), other.source(label="other")]
        async with Subscriber(sources, stale_after_s=0.3, track=True) as subscriber:
            await one.subscribed()
            await other.subscribed()
            one.send(1)
            other.send(1)
            beating = asyncio.create_task(heartbeats(one))
            items = []
            async with asyncio.timeout(DEADLINE_S):
                while not subscriber.stale:
                    items.append(await anext(subscriber))
            stale = items[-1]
            assert isinstance(stale, Stale)
            assert (stale.label, stale.silent_s > 0.3) == ("other", True)
            assert fold_of(subscriber, "other") == blocks_of(other.model.fold)  # not wiped
            other.send(1)
            found = await until(subscriber, 1, "other")
            assert [item for item in found if isinstance(item, Back)] == [Back("other")]
            assert not subscriber.stale
            beating.cancel()

    async def test_a_slow_consumer_takes_nobody_for_stale(self) -> None:
        async with peer() as publisher, Subscriber(publisher.endpoint, stale_after_s=0.1) as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            await asyncio.sleep(0.3)  # the consumer is away, messages wait
            (item,) = await take(subscriber, 1)
            assert isinstance(item, Batch)


class TestCatchingUp:
    @pytest.mark.parametrize("endpoint", ["replay", "snapshot"])
    async def test_until_the_whole_state_was_taken(self, endpoint: str) -> None:
        async with peer(retained=5, publisher_id=b"p" * 16) as publisher:
            publisher.send(150)
            source = Source(publisher.endpoint, **{endpoint: publisher.replay}, label="pod")
            async with Subscriber(source, track=True) as subscriber:
                whole = blocks_of(publisher.model.fold)
                while not subscriber.state() or fold_of(subscriber) != whole:
                    assert subscriber.catching_up == {"pod"}
                    await take(subscriber, 1)
                await publisher.subscribed()
                await reading_until(subscriber, lambda: not subscriber.catching_up)
                publisher.send(1)
                await until(subscriber, 150)
                assert not subscriber.catching_up

    async def test_a_publisher_that_has_nothing_is_whole_and_one_that_is_not_there_is_not(
        self, nowhere: str
    ) -> None:
        async with peer() as publisher:
            sources = [publisher.source(label="empty"), Source(nowhere, nowhere, label="nowhere")]
            async with Subscriber(sources, timing=IMPATIENT) as subscriber:
                await reading_until(subscriber, lambda: subscriber.stats()["replays_given_up"] >= 2)
                await reading_until(subscriber, lambda: subscriber.catching_up == {"nowhere"})

    async def test_while_a_hole_may_still_be_filled(self, router) -> None:
        socket, endpoint = router
        async with (
            peer() as publisher,
            Subscriber(Source(publisher.endpoint, endpoint), timing=IMPATIENT) as reader,
        ):
            await publisher.subscribed()
            publisher.send(1)
            identity, *_ = await received(socket)
            socket.send_multipart([identity, *REPLAY_END])
            assert await briefly(reader, 1) == [0]
            assert not reader.catching_up
            publisher.lose(1)
            publisher.send(1)
            waiting = asyncio.create_task(briefly(reader, 2))
            for _ in range(2):  # asked for the hole, and again
                await received(socket)
                assert reader.catching_up
            assert await waiting == [Gap(1, 2), 2]
            assert reader.catching_up
            asking = asyncio.create_task(received(socket))
            await reading_until(reader, asking.done)
            assert reader.catching_up
            identity, *_ = asking.result()
            socket.send_multipart([identity, *REPLAY_END])  # the whole state: it has none
            await reading_until(reader, lambda: not reader.catching_up)

    async def test_after_a_loss_until_the_whole_state_was_taken(self) -> None:
        timing = Timing(refresh_s=0.3)
        async with peer() as publisher, Subscriber(publisher.source(), timing=timing, track=True) as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            await reading_until(subscriber, lambda: bool(subscriber.state()) and not subscriber.catching_up)
            publisher.xpub.send_multipart(live_frames(b"kv", 1, b"no batch"))
            publisher.lose(1)
            (item,) = await take(subscriber, 1)
            assert isinstance(item, Undecodable)
            assert subscriber.catching_up
            await reading_until(subscriber, lambda: not subscriber.catching_up)
            assert fold_of(subscriber) == blocks_of(publisher.model.fold)

    async def test_never_where_nobody_can_be_asked(self) -> None:
        async with peer() as publisher, Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            publisher.lose(1)
            publisher.send(1)
            assert not subscriber.catching_up
            assert await briefly(subscriber, 3) == [0, Gap(1, 2), 2]
            assert not subscriber.catching_up


async def reading_until(subscriber: Subscriber, met: Callable[[], bool]) -> None:
    async def read() -> None:
        async for _ in subscriber:
            pass

    reading = asyncio.create_task(read())
    async with asyncio.timeout(DEADLINE_S):
        while not met():
            await asyncio.wait([reading], timeout=0.01)
    reading.cancel()


async def heartbeats(publisher: Peer) -> None:
    while True:
        publisher.send(1)
        await asyncio.sleep(0.05)


def test_the_front_door_is_light() -> None:
    code = (
        "import sys, kvevents_service; assert not {'zmq', 'msgspec', 'torch'} & set(sys.modules);"
        "from kvevents_service import PrefixIndex, Source, Subscriber; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
