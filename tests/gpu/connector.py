"""vLLM's connector on the device without vLLM: both halves, a scheduler that plays vLLM's, and real bytes.

A step is played as done as soon as it has been given to the device, which computes it some time later: a store that
did not wait for its mark would copy nothing, and a load that did not would be overwritten.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from engine.vllm_toy import FULL, Content, ToyVllm

from gpu.engine import DEADLINE_S, PATIENT, KvCache, Shape
from gpu.machine import CpuMachine, Machine
from kvevents_service.core.groups import check_groups
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.vllm_layout import Place, places_of
from kvevents_service.engine.vllm_marks import MarkingClient
from kvevents_service.engine.vllm_memory import CudaDevice
from kvevents_service.engine.vllm_scheduler import Said
from kvevents_service.engine.vllm_worker import Rank, WorkerHalf
from kvevents_service.errors import ConfigError

SHAPE = Shape(4, 96, 256)
PROMPTS, TOKENS = 4, 33
IDLE_S = 0.001
Result = dict[str, object]


def places(cache: KvCache) -> list[Place]:
    """As vLLM says where its blocks are: keys and values of a layer apart."""
    shape = cache.shape
    block = shape.words * 8
    caches = {f"layers.{number}": layer for number, layer in enumerate(cache.layers)}
    tensors = [
        SimpleNamespace(
            layers=[name], layer_stride=2 * shape.blocks * block, block_stride=block, offset=0, host_resident=False
        )
        for name in caches
    ]
    config: Any = SimpleNamespace(num_blocks=shape.blocks, kv_cache_tensors=tensors)
    return places_of(config, caches)


class DeviceVllm(ToyVllm):
    """Steps fill the device's blocks, and what is loaded is read there."""

    def __init__(self, machine: Machine, path: str) -> None:
        self.cache = KvCache(machine, SHAPE)
        self.worker = WorkerHalf(
            path, Rank("gpu-connector", 0, 1), CudaDevice(machine.driver, lambda: machine.stream)
        )
        self.worker.lend(places(self.cache))
        layout = EngineLayout("gpu-connector", "gpu-connector", check_groups([FULL], 4), hash_tokens=4)
        self.marking = MarkingClient(path, layout, PATIENT)
        self.loaded = self.corrupt = 0
        super().__init__(blocks=SHAPE.blocks, client=self.marking)
        if not self.marking.wait_connected(DEADLINE_S):
            raise TimeoutError(self.marking.last_error)

    def schedule(self, chunk: int = 16) -> Said:
        said = super().schedule(chunk)
        self.marking.begun = said.step
        fills = list(self.flights[-1].fills)
        self.worker.said = said
        if fills:
            self.cache.machine.compute(lambda: self._fill(fills))
        else:
            time.sleep(IDLE_S)
        self.worker.end_step()
        return said

    def _fill(self, fills: list[tuple[int, Content]]) -> None:
        self.cache.fill([block for block, _ in fills], [_seed(content) for _, content in fills])

    def run(self) -> None:
        self.marking.landed = max(self.marking.landed, self.worker.computed)
        super().run()

    def _end_load(self, request_id: str, *, failed: bool, keep: bool) -> None:
        request = self.loading[request_id]
        if not failed:
            stop = request.num_computed_tokens // 4
            blocks = [block.block_id for block in request.tables[0][:stop]]
            contents = [(0, name) for name in request.block_hashes[:stop]]
            self.loaded += len(blocks)
            self.corrupt += self.cache.corrupt(blocks, [_seed(content) for content in contents])
            for block, content in zip(blocks, contents, strict=True):
                self.pool.content[block] = content
        super()._end_load(request_id, failed=failed, keep=keep)

    def play(self) -> None:
        """All prompts at once, until every one has ended and no block is held."""
        deadline = time.monotonic() + DEADLINE_S
        for number in range(PROMPTS):
            self.add(f"r{number}-{self.marking.begun}", range(number * 50, number * 50 + TOKENS), 1)
        while self.requests or self.half.planner.book.held_blocks or not self.pool.reset():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.half!r}")
            self.step()

    def close(self) -> bool:
        self.half.close()
        return self.worker.take_back()


def _seed(content: Content) -> int:
    return int.from_bytes(content[1][:4], "little")


def connector(machine: Machine, path: str) -> Result:
    """Stored, evicted and loaded; the same again after the memory was taken back and lent again, as for a sleep."""
    vllm = DeviceVllm(machine, path)
    vllm.play()
    stored = vllm.half.stored_blocks
    vllm.cache.poison(list(range(SHAPE.blocks)))
    vllm.play()
    awake = vllm.loaded
    let_go = vllm.worker.take_back()
    vllm.cache.poison(list(range(SHAPE.blocks)))
    vllm.worker.lend_again()
    client = vllm.worker.client
    back = client is not None and client.wait_connected(DEADLINE_S)
    vllm.play()
    blocks = PROMPTS * (TOKENS // 4)
    good = (
        stored == blocks and awake == blocks and vllm.loaded == 2 * blocks and not vllm.corrupt and let_go and back
    )
    return {
        "ok": good and vllm.close(),
        "stored": stored,
        "loaded": awake,
        "loaded_after_sleep": vllm.loaded - awake,
        "corrupt": vllm.corrupt,
    }


def connector_refusal(machine: Machine) -> str:
    """What a start says of memory that has no handle."""
    if isinstance(machine, CpuMachine):
        machine.library.legacy = False
    try:
        CudaDevice(machine.driver, lambda: machine.stream).share(places(KvCache(machine, SHAPE)))
    except ConfigError as error:
        return str(error)
    return "it was not refused"
