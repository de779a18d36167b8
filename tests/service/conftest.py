"""A running sidecar in the test's own loop, and a small engine with real memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvevents_service.config import ServeConfig
from kvevents_service.engine.client import Completions, OffloadClient, PrefixHit, Timeouts
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.engine.offers import make_offer
from kvevents_service.service.app import Service, started
from kvevents_service.testing import Chain
from kvevents_service.wire.control import GroupSpec, Memory
from kvevents_service.wire.packing import pack_int32

DEADLINE_S = 60.0
BLOCK_SIZE, BLOCKS, LAYERS, LAYER_BYTES = 4, 64, 2, 64
PATIENT = Timeouts(lookup_s=5.0, send_s=1.0, redial_s=0.02)


class MiniEngine:
    """An engine whose block i of layer l is filled with one byte value; its calls are blocking."""

    def __init__(self, path: str, namespace: str = "tiny", timeouts: Timeouts = PATIENT) -> None:
        self.memory = SharedMemory.create(BLOCKS * LAYERS * LAYER_BYTES)
        self.client = OffloadClient(
            path,
            EngineLayout(
                "mini",
                namespace,
                [GroupSpec(0, "full_attention", BLOCK_SIZE)],
                [Memory(BLOCKS * LAYERS * LAYER_BYTES)],
                uniform_layers(LAYERS, BLOCKS, LAYER_BYTES),
                [self.memory.fd],
            ),
            timeouts,
        )

    def _span(self, layer: int, block: int) -> slice:
        start = (layer * BLOCKS + block) * LAYER_BYTES
        return slice(start, start + LAYER_BYTES)

    def fill(self, block: int, value: int) -> None:
        for layer in range(LAYERS):
            self.memory.map[self._span(layer, block)] = bytes([value ^ layer]) * LAYER_BYTES

    def holds(self, block: int, value: int) -> bool:
        return all(
            self.memory.map[self._span(layer, block)] == bytes([value ^ layer]) * LAYER_BYTES
            for layer in range(LAYERS)
        )

    def store(self, chain: Chain, blocks: list[int], finished: tuple[str, ...] = ()) -> Completions:
        """Offer and wait for the end of the step."""
        offer = make_offer("r", chain.hashes, chain.token_ids, blocks, parent=chain.parent)
        assert self.client.step([offer], finished) is not None, self.client
        return self.wait()

    def load(self, chain: Chain, blocks: list[int]) -> int:
        """Look up and load; returns how many blocks came."""
        hit = self.client.lookup("r", list(chain.hashes))
        return self.load_hit(hit, blocks[: hit.blocks]) if hit.blocks else 0

    def load_hit(self, hit: PrefixHit, blocks: list[int]) -> int:
        assert self.client.load("r", hit, pack_int32(blocks)) is not None
        return self.wait().loads[0].blocks

    def wait(self) -> Completions:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            ended = self.client.poll(0.5)
            if ended.steps or ended.loads:
                return ended
        raise TimeoutError

    def close(self) -> bool:
        gone = self.client.close(5.0)
        self.memory.map.close()
        return gone


@asynccontextmanager
async def running(tmp_path: Path, **settings: object) -> AsyncIterator[Service]:
    config = ServeConfig(
        engine_socket=str(tmp_path / "run" / "engine.sock"),
        pub="tcp://127.0.0.1:0",
        replay="tcp://127.0.0.1:0",
        **{"host_bytes": 32 * LAYERS * LAYER_BYTES, "admin": "off", **settings},  # type: ignore[arg-type]
    )
    async with asyncio.timeout(DEADLINE_S), started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        try:
            yield service
            await service.drain()
        finally:
            for task in tasks:
                task.cancel()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., object]:
    """`async with run() as service:` a sidecar with a tier of 32 blocks."""
    return lambda **settings: running(tmp_path, **settings)


@pytest.fixture
def engine(tmp_path: Path) -> object:
    """`engine()` makes a MiniEngine; all of them are closed at the end."""
    made: list[MiniEngine] = []

    def make(**options: object) -> MiniEngine:
        made.append(MiniEngine(str(tmp_path / "run" / "engine.sock"), **options))  # type: ignore[arg-type]
        assert made[-1].client.wait_connected(DEADLINE_S), made[-1].client
        return made[-1]

    yield make
    for one in made:
        one.close()
