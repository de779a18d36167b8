"""Engines of several ranks over real sockets: processes with layouts of their own, killed and started again."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from rank_engine import PIPELINE, WAIT_S, RankMemory, RankProcess, Shape
from test_engine_plane import RawPeer, assert_stream_is_true, chain, engine_hello

from kvevents_service.engine.client import Completions, OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.service.app import Service
from kvevents_service.testing import Chain
from kvevents_service.wire.control import Error, GroupSpec, Hello, Inspect, Lookup, Memory, Region, Welcome
from kvevents_service.wire.packing import pack_int32

PATIENT = Timeouts(lookup_s=5.0, send_s=1.0, redial_s=0.02)
BLOCK_BYTES = sum(shape.block_bytes for shape in PIPELINE)
RANKS = len(PIPELINE)
GROUPS = [GroupSpec(0, "full_attention", 4)]


class Pipeline:
    """An engine of three ranks, each one a process. Its calls are blocking."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.memories = [RankMemory(rank, shape) for rank, shape in enumerate(PIPELINE)]
        self.processes: dict[int, RankProcess] = {}
        self.client = OffloadClient(path, EngineLayout("pipe-1", "tiny", GROUPS, ranks=RANKS), PATIENT)
        assert self.client.wait_connected(WAIT_S), self.client

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank] = RankProcess(self.path, "pipe-1", RANKS, self.memories[rank])
        for rank in ranks:
            assert self.processes[rank].said() == "registered"

    def kill(self, rank: int) -> None:
        self.processes.pop(rank).kill()

    def offer(self, prompt: Chain, blocks: list[int], value: int) -> int:
        """The forward pass of all ranks, and the offer of what it made."""
        for memory in self.memories:
            for place, block in enumerate(blocks):
                memory.fill(block, value + place)
        step_id = self.client.step([prompt.offer(blocks)])
        assert step_id is not None
        return step_id

    def store(self, prompt: Chain, blocks: list[int], value: int) -> tuple[int, int]:
        self.offer(prompt, blocks, value)
        done = self.ended().steps[0]
        return done.stored, done.declined

    def ended(self) -> Completions:
        return self.client.poll(WAIT_S)

    def start_load(self, prompt: Chain, blocks: list[int]) -> None:
        hit = self.client.lookup("r", prompt.packed)
        assert hit.blocks == len(blocks)
        assert self.client.load("r", hit, pack_int32(blocks)) is not None

    def load(self, prompt: Chain, blocks: list[int]) -> int:
        self.start_load(prompt, blocks)
        return self.ended().loads[0].blocks

    def hold(self, blocks: list[int], value: int) -> bool:
        return all(memory.holds(block, value + n) for memory in self.memories for n, block in enumerate(blocks))

    def close(self) -> None:
        said = [process.leave() for process in self.processes.values()]
        assert self.client.close(WAIT_S)
        for memory in self.memories:
            memory.close()
        assert set(said) <= {"gone"}


SHM_NAME = f"kvevents-test-ranks-{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_stays_in_shm(request: pytest.FixtureRequest) -> Iterator[None]:
    """But the name of a hello that is refused before its memory is looked at."""
    yield
    ours = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    for name in ours:
        os.unlink(f"/dev/shm/{name}")
    assert not ours or "refused" in request.node.name


@pytest.fixture
def pipeline(run: Callable[..., object]) -> Callable[..., object]:
    """`async with pipeline() as (service, engine):` with a tier of 20 blocks, no rank started."""

    @asynccontextmanager
    async def made() -> AsyncIterator[tuple[Service, Pipeline]]:
        async with run(host_bytes=20 * BLOCK_BYTES + 1) as service:  # type: ignore[attr-defined]
            engine = await asyncio.to_thread(Pipeline, service.ready.engine_socket)
            try:
                yield service, engine
            finally:
                await asyncio.to_thread(engine.close)

    return made


@asynccontextmanager
async def blocked(service: Service, rank: int, kind: str) -> AsyncIterator[None]:
    """Nothing is copied in this direction on this rank until the end."""
    assert service.sidecar.tier is not None
    gate = threading.Event()
    service.sidecar.tier.lanes[rank]._workers[kind]._copier.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not what():
            await asyncio.sleep(0.001)


async def reported(service: Service, rank: int, moved: int) -> None:
    """This rank has copied so many bytes."""
    await until(lambda: service.sidecar.tier.lanes[rank].bytes_moved == moved)  # type: ignore[union-attr]


async def check(service: Service, engine: Pipeline) -> dict[str, int]:
    inspected = await asyncio.to_thread(engine.client.inspect, residents=True)
    assert inspected is not None
    if inspected.next_seq:
        await assert_stream_is_true(service, inspected)
    else:
        assert not inspected.stats["blocks_resident"]
    return inspected.stats


async def test_every_rank_gets_its_own_bytes_back(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 2, 0, 1)
        assert service.sidecar.tier.scheduler.pool.capacity == 20
        assert await asyncio.to_thread(engine.store, chain(1, 8), list(range(8)), 10) == (8, 0)
        assert await asyncio.to_thread(engine.load, chain(1, 8), list(range(30, 38))) == 8
        assert engine.hold(list(range(30, 38)), 10)
        for seed in range(2, 8):
            assert await asyncio.to_thread(engine.store, chain(seed, 6), list(range(6)), seed) == (6, 0)
        assert await asyncio.to_thread(engine.load, chain(7, 6), list(range(20, 26))) == 6
        assert engine.hold(list(range(20, 26)), 7)
        stats = await check(service, engine)
        assert (stats["workers"], stats["bytes_moved"]) == (3, (8 + 8 + 36 + 6) * BLOCK_BYTES)


async def test_block_ids_are_below_the_smallest_block_count_of_the_ranks(pipeline) -> None:
    async with pipeline() as (_, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 1), [39], 5) == (1, 0)
        engine.client.step([chain(2, 1).offer([40])])
        assert (await asyncio.to_thread(engine.ended)).steps[0].stored == 0
        assert "bad_block_ids" in engine.client.last_error
        assert "below 40" in engine.client.last_error


async def test_until_every_rank_is_there_the_engine_is_told_no_at_once(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 5) == (0, 2)
        assert (await asyncio.to_thread(engine.client.lookup, "r", chain(1, 2).packed)).blocks == 0
        assert await asyncio.to_thread(engine.client.reset) == 0
        assert (await check(service, engine))["declined_ranks_absent"] == 2
        await asyncio.to_thread(engine.start, 1)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 5) == (2, 0)
        assert (await check(service, engine))["declined_ranks_absent"] == 2


async def test_a_rank_killed_in_the_middle_of_a_store_fails_it_after_the_last_copy(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 50) == (2, 0)
        async with blocked(service, 1, "store"):
            await asyncio.to_thread(engine.offer, chain(2, 3), [2, 3, 4], 60)
            await asyncio.to_thread(engine.offer, chain(3, 2), [5, 6], 70)
            await reported(service, 0, 7 * PIPELINE[0].block_bytes)
            await asyncio.to_thread(engine.kill, 1)
            await until(lambda: service.sidecar.roster.workers == 2)
            done = (await asyncio.to_thread(engine.ended)).steps  # it was queued on the dead rank: it need not wait
            assert [(one.stored, one.declined) for one in done] == [(0, 2)]
            assert (await asyncio.to_thread(engine.client.poll, 0.05)).steps == []  # a copy still runs (I9)
            assert await asyncio.to_thread(engine.store, chain(4, 1), [9], 80) == (0, 1)
        done = (await asyncio.to_thread(engine.ended)).steps
        assert [(one.stored, one.declined) for one in done] == [(0, 3)]
        stats = await check(service, engine)
        assert (stats["transfers_lost_a_rank"], stats["blocks_resident"], stats["blocks_pending"]) == (2, 2, 0)
        engine.memories[1].clear()
        await asyncio.to_thread(engine.start, 1)
        assert await asyncio.to_thread(engine.load, chain(1, 2), [20, 21]) == 2
        assert engine.hold([20, 21], 50)
        assert await asyncio.to_thread(engine.store, chain(2, 3), [2, 3, 4], 90) == (3, 0)
        await check(service, engine)


@pytest.mark.parametrize("victim", [1, 2], ids=["still copying", "has reported"])
async def test_a_rank_killed_in_the_middle_of_a_load_makes_it_a_miss(pipeline, victim: int) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 50) == (2, 0)
        async with blocked(service, 1, "load"):
            await asyncio.to_thread(engine.start_load, chain(1, 2), [10, 11])
            await reported(service, 2, 4 * PIPELINE[2].block_bytes)
            await asyncio.to_thread(engine.kill, victim)
            await until(lambda: service.sidecar.roster.workers == 2)
            assert (await asyncio.to_thread(engine.client.poll, 0.05)).loads == []
        assert [end.blocks for end in (await asyncio.to_thread(engine.ended)).loads] == [0]
        await asyncio.to_thread(engine.start, victim)
        assert await asyncio.to_thread(engine.load, chain(1, 2), [20, 21]) == 2
        assert engine.hold([20, 21], 50)
        assert (await check(service, engine))["leases"] == 0


async def test_a_place_is_free_when_the_last_copy_of_its_connection_has_ended(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        async with blocked(service, 1, "store"):
            await asyncio.to_thread(engine.offer, chain(2, 3), [2, 3, 4], 60)
            await asyncio.to_thread(engine.kill, 1)
            await until(lambda: service.sidecar.roster.workers == 2)
            answer = await worker_answer(service, engine_id="pipe-1", rank=1, ranks=3)
            assert (answer.code, answer.field) == ("rank_taken", "rank")
        await asyncio.to_thread(engine.ended)
        await asyncio.to_thread(engine.start, 1)


async def test_workers_outlive_their_engine_and_serve_its_return(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 50) == (2, 0)
        assert await asyncio.to_thread(engine.client.close, WAIT_S)
        layout = engine.client.layout
        engine.client = OffloadClient(engine.path, layout, PATIENT)
        assert await asyncio.to_thread(engine.client.wait_connected, WAIT_S)
        assert await asyncio.to_thread(engine.load, chain(1, 2), [20, 21]) == 2
        assert engine.hold([20, 21], 50)
        await check(service, engine)


async def test_engines_of_several_ranks_share_a_tier(pipeline) -> None:
    async with pipeline() as (service, engine):
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 2), [0, 1], 50) == (2, 0)
        layout = EngineLayout("pipe-2", "tiny", GROUPS, ranks=RANKS)
        memories = [RankMemory(rank, shape._replace(blocks=8)) for rank, shape in enumerate(PIPELINE)]
        second = OffloadClient(engine.path, layout, PATIENT)
        workers = [await asyncio.to_thread(memory.client, engine.path, "pipe-2", RANKS) for memory in memories]
        hit = await asyncio.to_thread(second.lookup, "r", chain(1, 2).packed)
        assert second.load("r", hit, pack_int32([6, 7])) is not None
        assert [end.blocks for end in (await asyncio.to_thread(second.poll, WAIT_S)).loads] == [2]
        assert all(memory.holds(6, 50) and memory.holds(7, 51) for memory in memories)
        for client in (second, *workers):
            assert await asyncio.to_thread(client.close, WAIT_S)
        for memory in memories:
            memory.close()
        await check(service, engine)


async def test_another_layout_of_ranks_gets_an_empty_tier_once_no_engine_uses_the_old_one(run) -> None:
    async with run(host_bytes=1 << 16) as service:
        path = service.ready.engine_socket
        for size, resident in ((64, 1), (128, 1)):
            memory = RankMemory(0, Shape(1, 8, size))
            client = OffloadClient(path, EngineLayout(f"e-{size}", "tiny", GROUPS), PATIENT)
            worker = await asyncio.to_thread(memory.client, path, f"e-{size}", 1)
            assert await asyncio.to_thread(client.wait_connected, WAIT_S)
            assert client.step([chain(size, 1).offer([3])]) is not None
            assert (await asyncio.to_thread(client.poll, WAIT_S)).steps[0].stored == 1
            inspected = await asyncio.to_thread(client.inspect, residents=True)
            await assert_stream_is_true(service, inspected)
            assert inspected.stats["blocks_resident"] == resident
            assert await asyncio.to_thread(client.close, WAIT_S)
            assert await asyncio.to_thread(worker.close, WAIT_S)
            memory.close()
        assert inspected.stats["blocks_stored"] == 2  # counters go on over the change


# refused


def worker_hello(**changes: object) -> Hello:
    hello = Hello(1, "worker", "w", memories=[Memory(4096)], regions=[Region("l", 0, 0, 64, 64, 8)], ranks=2)
    return msgspec.structs.replace(hello, **changes)


async def worker_answer(service: Service, **changes: object) -> object:
    """The answer to a hello; its memory is a name, so that a bare socket will do."""
    async with RawPeer(service.ready.engine_socket) as peer:
        await peer.send(named(worker_hello(**changes)))
        return await peer.answer()


def named(hello: Hello) -> Hello:
    if not hello.memories:
        return hello
    with open(f"/dev/shm/{SHM_NAME}", "wb") as file:
        file.truncate(4096)
    return msgspec.structs.replace(hello, memories=[Memory(4096, SHM_NAME)])


ENGINE = engine_hello(engine_id="w", ranks=2, memories=[], regions=[])


@pytest.mark.parametrize(
    ("hello", "code", "field"),
    [
        (worker_hello(rank=2), "bad_rank", "rank"),
        (worker_hello(rank=-1), "bad_rank", "rank"),
        (worker_hello(ranks=0), "bad_rank", "ranks"),
        (worker_hello(ranks=129), "bad_rank", "ranks"),
        (worker_hello(ranks=3), "bad_rank", "ranks"),
        (worker_hello(engine_id=""), "bad_hello", "engine_id"),
        (worker_hello(memories=[], regions=[]), "bad_memory", "regions"),
        (worker_hello(rank=0), "rank_taken", "rank"),
        (worker_hello(rank=1, regions=[Region("l", 0, 0, 2048, 2048, 1)]), "tier_too_small", "host_bytes"),
        (ENGINE, "engine_taken", "engine_id"),
        (msgspec.structs.replace(ENGINE, ranks=4, engine_id="x"), "other_layout", "namespace"),
        (engine_hello(ranks=2, engine_id="x"), "bad_rank", "regions"),
        (engine_hello(ranks=0), "bad_rank", "ranks"),
        (engine_hello(regions=[]), "bad_memory", "regions"),
    ],
)
async def test_a_hello_that_cannot_be_is_refused_and_named(run, hello: Hello, code: str, field: str) -> None:
    async with run(host_bytes=1024) as service, RawPeer(service.ready.engine_socket) as engine:
        await engine.send(ENGINE)
        welcome = await engine.answer()
        assert isinstance(welcome, Welcome)
        assert (welcome.capacity_blocks, welcome.block_bytes) == (0, 0)
        async with RawPeer(service.ready.engine_socket) as first, RawPeer(service.ready.engine_socket) as peer:
            await first.send(named(worker_hello(rank=0)))
            assert isinstance(await first.answer(), Welcome)
            await peer.send(named(hello))
            answer = await peer.answer()
            assert isinstance(answer, Error), answer
            assert (answer.code, answer.field) == (code, field)
            assert await peer.answer() is None
            welcome = await worker_answer(service, rank=1)  # whatever was refused left the place free
            assert (welcome.capacity_blocks, welcome.block_bytes) == (8, 128)


async def test_a_rank_of_a_tier_in_use_keeps_its_layout(run) -> None:
    async with run(host_bytes=1024) as service, RawPeer(service.ready.engine_socket) as engine:
        await engine.send(ENGINE)
        await engine.answer()
        async with RawPeer(service.ready.engine_socket) as first:
            await first.send(named(worker_hello(rank=0)))
            await first.answer()
            assert isinstance(await worker_answer(service, rank=1), Welcome)
            await until(lambda: service.sidecar.roster.places == 2)  # the engine and the first rank
            answer = await worker_answer(service, rank=1, regions=[Region("l", 0, 0, 32, 64, 8)])
            assert (answer.code, answer.field) == ("other_layout", "regions")
            assert "64" in answer.expected
        await until(lambda: service.sidecar.roster.places == 1)
        answer = await worker_answer(service, rank=0, regions=[Region("l", 0, 0, 32, 64, 8)])
        assert answer.code == "other_layout"
        assert isinstance(await worker_answer(service, rank=0), Welcome)


async def test_workers_of_another_number_of_ranks_keep_an_engine_out(run) -> None:
    async with run() as service, RawPeer(service.ready.engine_socket) as first:
        await first.send(named(worker_hello(ranks=3)))
        assert isinstance(await first.answer(), Welcome)
        async with RawPeer(service.ready.engine_socket) as engine:
            await engine.send(ENGINE)
            answer = await engine.answer()
            assert (answer.code, answer.field) == ("bad_rank", "ranks")


async def test_a_worker_may_only_inspect(run) -> None:
    async with run() as service, RawPeer(service.ready.engine_socket) as peer:
        await peer.send(named(worker_hello()))
        assert isinstance(await peer.answer(), Welcome)
        await peer.send(Lookup(3, "r", b""))
        refused = await peer.answer()
        assert (refused.call_id, refused.code) == (3, "not_now")
        await peer.send(Inspect(4))
        assert (await peer.answer()).stats["workers"] == 1
