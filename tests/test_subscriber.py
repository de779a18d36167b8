"""The subscriber against a real publisher and replayer on real sockets, on both event loops."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack

import pytest
import zmq
from peers import DEADLINE_S, EMPTY, QUICK, Peer, briefly, peer, received, take

from kvevents_service.errors import ConfigError
from kvevents_service.sockets import bind
from kvevents_service.subscriber import (
    Batch,
    Gap,
    HoldLimits,
    Restart,
    Subscriber,
    Timing,
    Undecodable,
)
from kvevents_service.wire.frames import REPLAY_END, live_frames, replay_reply


@pytest.fixture
async def publisher() -> AsyncIterator[Peer]:
    async with peer() as made:
        yield made


@pytest.fixture
def bound() -> Iterable[object]:
    """Sockets to be made by hand: `socket, endpoint = bound(zmq.XPUB)`."""
    context = zmq.Context()
    sockets = []

    def make(kind: int, endpoint: str = "tcp://127.0.0.1:0") -> tuple[zmq.Socket, str]:
        sockets.append(context.socket(kind))
        return sockets[-1], bind(sockets[-1], endpoint, "test")

    yield make
    context.destroy(linger=0)


class TestSince:
    async def test_the_replay_is_asked_for_from_there(self, publisher: Peer) -> None:
        publisher.send(5)
        async with Subscriber(publisher.source(), since=3) as subscriber:
            await publisher.subscribed()
            assert await briefly(subscriber, 2) == ["r3", "r4"]
            publisher.send(1)
            assert await briefly(subscriber, 1) == [5]
            assert (subscriber.joined_at, subscriber.stats()["replayed"]) == (3, 2)


class TestWithoutReplay:
    async def test_joining_late_is_no_gap(self, publisher: Peer) -> None:
        publisher.send(2)
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.send(2)
            assert await briefly(subscriber, 2) == [2, 3]
            assert subscriber.joined_at == 2

    async def test_a_batch_is_decoded(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint, topic="kv") as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            (item,) = await take(subscriber, 1)
        assert isinstance(item, Batch)
        assert (item.topic, item.seq, item.skipped, item.replayed) == (b"kv", 0, (), False)
        assert [type(event).__name__ for event in item.batch.events] == ["BlockStored"]

    async def test_a_gap(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            publisher.lose(2)
            publisher.send(1)
            assert await briefly(subscriber, 3) == [0, Gap(1, 3), 3]
            assert subscriber.stats()["batches_missing"] == 2

    async def test_a_restart(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.send(3)
            assert await briefly(subscriber, 3) == [0, 1, 2]
            publisher.xpub.send_multipart(live_frames(b"kv", 0, EMPTY))
            assert await briefly(subscriber, 2) == [Restart(2, 0), 0]


class TestReplay:
    async def test_the_history_comes_first(self, publisher: Peer) -> None:
        publisher.send(5)
        async with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
            await publisher.subscribed()
            publisher.send(2)
            assert [int(str(seq).strip("r")) for seq in await briefly(subscriber, 7)] == [0, 1, 2, 3, 4, 5, 6]
            assert subscriber.stats()["replays"] >= 1
            assert subscriber.stats()["restarts"] == 0

    async def test_what_is_no_longer_retained_is_missing(self) -> None:
        async with peer(retained=2, snapshots=False) as publisher:
            publisher.send(5)
            async with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
                assert await briefly(subscriber, 3) == [Gap(0, 3), "r3", "r4"]

    async def test_a_gap_is_filled_before_the_live_message(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
            await publisher.subscribed()
            publisher.send(1)
            await take(subscriber, 1)
            publisher.lose(2)
            publisher.send(2)
            filled = await briefly(subscriber, 4)
            assert filled[:2] == ["r1", "r2"]
            assert [int(str(seq).strip("r")) for seq in filled[2:]] == [3, 4]

    async def test_a_restart_brings_the_new_history(self) -> None:
        async with AsyncExitStack() as life:
            old = await life.enter_async_context(peer())
            old.send(9)
            async with Subscriber(old.endpoint, replay=old.replay, timing=QUICK) as subscriber:
                assert (await briefly(subscriber, 9))[-1] == "r8"
                waiting = asyncio.create_task(briefly(subscriber, 4))  # meanwhile it settles
                await asyncio.wait([waiting], timeout=0.1)
                await life.aclose()
                async with peer(ports=old.ports) as new:
                    new.lose(2)
                    await new.subscribed()
                    new.send(1)
                    assert await waiting == [Restart(8, 2), "r0", "r1", "r2"]

    async def test_nobody_answers(self, publisher: Peer, bound) -> None:
        _, silent = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=silent, timing=QUICK) as subscriber:
            await publisher.subscribed()
            publisher.lose(3)
            publisher.send(2)
            assert await briefly(subscriber, 3) == [Gap(0, 3), 3, 4]
            assert subscriber.stats()["replays_given_up"] >= 1

    @pytest.mark.parametrize("times", [1, sys.maxsize], ids=["stalls", "repeats itself"])
    async def test_an_answer_without_end(self, publisher: Peer, bound, times: int) -> None:
        router, endless = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=endless, timing=QUICK) as subscriber:
            await publisher.subscribed()
            publisher.lose(3)
            publisher.send(1)
            identity, *_ = await received(router)
            answering = asyncio.create_task(answer(router, identity, times))
            assert await briefly(subscriber, 3) == ["r0", Gap(1, 3), 3]
            answering.cancel()
            assert subscriber.stats()["replays_given_up"] == 2

    async def test_a_slow_answer_is_not_given_up_while_it_goes_on(self, publisher: Peer, bound) -> None:
        router, slow = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=slow, timing=QUICK) as subscriber:
            identity, *_ = await received(router)
            for seq in range(4):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(QUICK.stall_s * 0.6):
                        await anext(subscriber)
                router.send_multipart([identity, *replay_reply(b"kv", seq, EMPTY)])
                assert await briefly(subscriber, 1) == [f"r{seq}"]
            assert subscriber.stats()["replays_given_up"] == 0

    async def test_an_answer_that_takes_too_long_in_all(self, publisher: Peer, bound) -> None:
        router, endless = bound(zmq.ROUTER)
        timing = Timing(stall_s=DEADLINE_S, total_s=0.1)
        async with Subscriber(publisher.endpoint, replay=endless, timing=timing) as subscriber:
            await publisher.subscribed()
            publisher.lose(3)
            publisher.send(1)
            identity, *_ = await received(router)
            router.send_multipart([identity, *replay_reply(b"kv", 0, EMPTY)])
            assert await briefly(subscriber, 3) == ["r0", Gap(1, 3), 3]

    async def test_the_framing_without_a_topic(self, publisher: Peer, bound) -> None:
        router, old_vllm = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=old_vllm, topic="kv") as subscriber:
            identity, *_ = await received(router)
            router.send_multipart([identity, b"", (0).to_bytes(8, "big"), EMPTY])
            (item,) = await take(subscriber, 1)
        assert item[:2] == (b"kv", 0)

    async def test_a_replay_of_another_topic(self, publisher: Peer, bound) -> None:
        router, other = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=other, topic="kv") as subscriber:
            identity, *_ = await received(router)
            for frames in (replay_reply(b"kv2", 0, EMPTY), replay_reply(b"kv", 1, EMPTY), REPLAY_END):
                router.send_multipart([identity, *frames])
            assert await briefly(subscriber, 2) == [Gap(0, 1), "r1"]
            assert subscriber.topics_seen == {b"kv2": 1, b"kv": 1}

    async def test_the_hold_is_bounded(self, publisher: Peer, bound) -> None:
        router, slow = bound(zmq.ROUTER)
        hold = HoldLimits(batches=2)
        async with Subscriber(publisher.endpoint, replay=slow, hold=hold) as subscriber:
            await publisher.subscribed()
            publisher.send(5)
            waiting = asyncio.create_task(briefly(subscriber, 3))
            identity, *_ = await received(router)
            async with asyncio.timeout(DEADLINE_S):
                while subscriber.stats()["held_dropped"] < 3:
                    await asyncio.wait([waiting], timeout=0.01)
            router.send_multipart([identity, *REPLAY_END])
            identity, *_ = await received(router)  # once more, for what came after it had asked
            router.send_multipart([identity, *REPLAY_END])
            assert await waiting == [Gap(0, 3), 3, 4]


async def answer(router: zmq.Socket, identity: bytes, times: int) -> None:
    for turn in range(times):
        router.send_multipart([identity, *replay_reply(b"kv", 0, EMPTY)])
        if turn % 16 == 0:
            await asyncio.sleep(0)


BAD_FRAMES = {
    "one frame": ([b"kv"], "frames"),
    "two frames": ([b"kv", b"\0" * 8], "frames"),
    "four frames": ([b"kv", b"\0" * 8, EMPTY, b""], "frames"),
    "seq of 7 bytes": ([b"kv", b"\0" * 7, EMPTY], "seq"),
    "the end marker": ([b"kv", b"\xff" * 8, b""], "seq"),
    "no payload": ([b"kv", b"\0" * 8, b""], "payload"),
}


class TestMessages:
    @pytest.mark.parametrize(("frames", "field"), BAD_FRAMES.values(), ids=BAD_FRAMES)
    async def test_bad_frames_are_told_and_it_goes_on(
        self, publisher: Peer, frames: list[bytes], field: str
    ) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.xpub.send_multipart(frames)
            publisher.send(1)
            bad, good = await take(subscriber, 2)
        assert isinstance(bad, Undecodable)
        assert (bad.topic, bad.seq, bad.error.field) == (b"kv", None, field)
        assert good.seq == 0

    async def test_a_bad_payload_is_no_gap(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            for seq, payload in enumerate([EMPTY, b"\xc1", EMPTY]):
                publisher.xpub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
            first, bad, last = await take(subscriber, 3)
            assert (first.seq, bad[:2], last.seq) == (0, (b"kv", 1), 2)
            assert subscriber.stats()["undecodable"] == 1

    async def test_a_bad_reply_is_told_and_the_replay_goes_on(self, publisher: Peer, bound) -> None:
        router, bad = bound(zmq.ROUTER)
        async with Subscriber(publisher.endpoint, replay=bad) as subscriber:
            identity, *_ = await received(router)
            router.send_multipart([identity, b"", b"one frame too", b"few"])
            router.send_multipart([identity, *replay_reply(b"kv", 0, EMPTY)])
            undecodable, batch = await take(subscriber, 2)
        assert (undecodable.error.field, batch.seq) == ("seq", 0)

    @pytest.mark.parametrize("topic", ["kv", "kv@10.0.0.1@llama", "kv@[::1]@größe", ""])
    async def test_a_topic_is_matched_exactly(self, publisher: Peer, topic: str) -> None:
        sent, longer = topic.encode(), topic.encode() + b"-70b"
        async with Subscriber(publisher.endpoint, topic=topic) as subscriber:
            assert await received(publisher.xpub) == [b"\1" + sent]
            for name in (longer, sent):
                publisher.xpub.send_multipart(live_frames(name, 7 + (name == sent), EMPTY))
            (item, *_) = await take(subscriber, 1 if topic else 2)
            assert item.topic == (sent if topic else longer)
            assert subscriber.topics_seen == {longer: 1, sent: 1}
            assert subscriber.stats()["other_topics"] == (1 if topic else 0)

    async def test_observing_topics_delivers_no_more(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint, topic="kv", observe_topics=True) as subscriber:
            assert await received(publisher.xpub) == [b"\1"]
            publisher.xpub.send_multipart(live_frames(b"other", 7, EMPTY))
            publisher.xpub.send_multipart(live_frames(b"kv", 3, EMPTY))
            assert await briefly(subscriber, 1) == [3]
            assert set(subscriber.topics_seen) == {b"other", b"kv"}

    async def test_topics_seen_are_bounded(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint, topic="kv") as subscriber:
            await publisher.subscribed()
            for number in range(200):
                publisher.xpub.send_multipart([b"kv%d" % number + b"x" * 1000, b"\0" * 8, EMPTY])
            publisher.send(1)
            await take(subscriber, 1)
            assert len(subscriber.topics_seen) == 64
            assert max(map(len, subscriber.topics_seen)) == 256


class TestWaiting:
    async def test_cancelling_loses_nothing(self, publisher: Peer) -> None:
        seqs: list[int] = []
        async with (
            Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber,
            asyncio.timeout(DEADLINE_S),
        ):
            await publisher.subscribed()
            while len(seqs) < 2000:
                if publisher.model.next_seq < 2000:
                    publisher.send(5)
                for _ in range(5):
                    try:
                        async with asyncio.timeout(0.0005):
                            seqs.append((await anext(subscriber)).seq)
                    except TimeoutError:
                        break
        assert seqs == list(range(2000))

    async def test_a_flood_leaves_the_loop_to_others(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            await publisher.subscribed()
            publisher.send(1000)
            taking = asyncio.create_task(take(subscriber, 1000))
            turns = 0
            while not taking.done():
                turns += 1
                await asyncio.sleep(0)
            assert turns >= 10
            assert [item.seq for item in await taking] == list(range(1000))

    async def test_closed_it_ends(self, publisher: Peer) -> None:
        subscriber = Subscriber(publisher.endpoint)
        async with subscriber:
            await subscriber.close()
            assert [item async for item in subscriber] == []
        await subscriber.close()
        assert not subscriber.connected


class TestEndpoints:
    @pytest.mark.parametrize("endpoint", ["127.0.0.1:5557", "tcp://127.0.0.1", "x://y:1", ""])
    async def test_one_that_cannot_be(self, endpoint: str) -> None:
        with pytest.raises(ConfigError) as raised:
            async with Subscriber(endpoint):
                pass
        assert raised.value.setting == "endpoint"

    async def test_a_replay_that_cannot_be(self, publisher: Peer) -> None:
        with pytest.raises(ConfigError) as raised:
            async with Subscriber(publisher.endpoint, replay="nowhere"):
                pass
        assert raised.value.setting == "replay"

    @pytest.mark.parametrize(("host", "local"), [("*", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")])
    async def test_a_wildcard_is_this_machine(self, host: str, local: str) -> None:
        async with Subscriber(f"tcp://{host}:9") as subscriber:
            assert subscriber.sources[0].endpoint == f"tcp://{local}:9"

    async def test_ipv6(self, bound) -> None:
        try:
            xpub, endpoint = bound(zmq.XPUB, "tcp://[::1]:0")
        except ConfigError:
            pytest.skip("this machine has no IPv6")
        async with Subscriber(endpoint) as subscriber:
            await received(xpub)
            xpub.send_multipart(live_frames(b"", 0, EMPTY))
            assert await briefly(subscriber, 1) == [0]

    async def test_the_state_is_in_the_repr(self, publisher: Peer) -> None:
        subscriber = Subscriber(publisher.endpoint)
        assert repr(subscriber) == f"<Subscriber {publisher.endpoint} closed <Sequencer live next=0 held=0>>"
        async with subscriber:
            await publisher.subscribed()
            publisher.send(1)
            await take(subscriber, 1)
            assert repr(subscriber) == f"<Subscriber {publisher.endpoint} connected <Sequencer live next=1 held=0>>"

    async def test_the_stats_name_what_was_lost(self, publisher: Peer) -> None:
        async with Subscriber(publisher.endpoint) as subscriber:
            assert set(subscriber.stats().values()) == {0}
            await publisher.subscribed()
            publisher.lose(1)
            publisher.send(2)
            await take(subscriber, 2)
            counts = {name: number for name, number in subscriber.stats().items() if number}
            assert counts.pop("bytes") > 100
            assert counts == {"batches": 2}


def test_torch_is_not_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvevents_service.subscriber"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
