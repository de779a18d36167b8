"""One journal with an engine's own GPU tier, relayed, and ours: each is told once, and each can go by itself."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from core.engine_model import key, stored
from peers import Peer, following, peer
from test_engine_plane import chain

from kvevents_service.core.residency import Residency, key64
from kvevents_service.errors import ConfigError
from kvevents_service.service.app import Service
from kvevents_service.source_config import SourceConfig
from kvevents_service.subscriber import Source, Subscriber
from kvevents_service.wire.events import AllBlocksCleared, BlockStored

DEADLINE_S = 30.0
A, AB = (0,), (0, 1)


def reader(service: Service) -> AbstractAsyncContextManager[Subscriber]:
    out = service.ready.outputs[0]
    return following(Source(out.pub, out.replay))


async def knows(subscriber: Subscriber, gpu: set[int], cpu: set[int]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while _held(subscriber) != (gpu, cpu):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError((_held(subscriber), gpu, cpu)) from None
    for fold in subscriber.state().values():
        fold.check()


def _held(subscriber: Subscriber) -> tuple[set[int], set[int]]:
    folds = list(subscriber.state().values()) or [Residency()]
    return folds[0].hashes("GPU", 0), folds[0].hashes("CPU", 0)


def source(peer: Peer) -> tuple[SourceConfig, ...]:
    return (SourceConfig(peer.endpoint, peer.replay),)


async def test_both_tiers_are_told_once_and_a_clear_is_of_the_engine_alone(run, engine) -> None:
    prompt = chain(1, 4)
    cpu = {*map(key64, prompt.hashes)}
    async with peer(snapshots=False) as gpu, run(sources=source(gpu), retained_batches=2) as service:
        async with reader(service) as subscriber:
            mini = await asyncio.to_thread(engine)
            await asyncio.to_thread(mini.store, prompt, [0, 1, 2, 3])
            gpu.send(1, stored(AB, 2), back(prompt))
            await knows(subscriber, {key(A), key(AB)}, cpu)
            gpu.send(1, AllBlocksCleared(), stored(A))
            await knows(subscriber, {key(A)}, cpu)
            for _ in range(5):
                gpu.send(1, stored(AB))
                gpu.send(1, AllBlocksCleared(), stored(A))
            await knows(subscriber, {key(A)}, cpu)
        async with reader(service) as late:
            await knows(late, {key(A)}, cpu)
        stats = service.sidecar.stats()
        assert stats["relay_not_its_own"] == 4
        assert (stats["relay_sources"], stats["relay_connected"]) == (1, 1)


def back(prompt) -> BlockStored:
    """Our own tier's event, as the engine's connector gives it to the engine's stream."""
    return BlockStored([*prompt.hashes], None, [*prompt.token_ids], prompt.block_size, None, "CPU", None)


async def test_when_the_engine_dies_what_we_keep_of_it_stays(run, engine) -> None:
    prompt = chain(2, 4)
    cpu = {*map(key64, prompt.hashes)}
    async with peer(snapshots=False) as gpu, run(sources=source(gpu)) as service, reader(service) as subscriber:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, prompt, [0, 1, 2, 3])
        gpu.send(1, stored(AB, 2))
        await knows(subscriber, {key(A), key(AB)}, cpu)
        gpu.xpub.close()
        gpu.router.close()
        await knows(subscriber, set(), cpu)


async def test_a_source_of_another_rank_than_the_outputs_is_refused(run) -> None:
    with pytest.raises(ConfigError, match="as the outputs"):
        async with run(sources=(SourceConfig("tcp://127.0.0.1:1", dp_rank=1),)):
            pass
