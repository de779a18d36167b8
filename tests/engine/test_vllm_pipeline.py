"""Two pipeline stages as vLLM's workers lend them: each has layers of its own, and a block counts on both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.vllm_toy import FULL, Content, ToyVllm
from test_client import LONG_S, Sidecar

from kvevents_service.core.groups import check_groups
from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.vllm_layout import places_of
from kvevents_service.engine.vllm_memory import HostDevice
from kvevents_service.engine.vllm_scheduler import Said
from kvevents_service.engine.vllm_worker import Rank, WorkerHalf

STEP_S = 0.001
"""A step takes a moment, in which other threads run: steps that take none outrun any courier."""
BLOCKS = 40
STAGES = ({"layers.0": 64, "layers.1": 64}, {"layers.2": 24})
"""Bytes of a block in each layer of a stage."""


class Stage:
    """A worker and its memory. A block's bytes tell what is in it, and the layer."""

    def __init__(self, path: str, rank: int) -> None:
        sizes = STAGES[rank]
        self.caches = {name: torch.zeros(BLOCKS, size, dtype=torch.uint8) for name, size in sizes.items()}
        tensors = [
            SimpleNamespace(
                layers=[name], layer_stride=BLOCKS * size, block_stride=size, offset=0, host_resident=False
            )
            for name, size in sizes.items()
        ]
        self._config: Any = SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=tensors)
        self.worker = WorkerHalf(path, Rank("pipe", rank, len(STAGES)), HostDevice())

    def lend(self) -> None:
        self.worker.lend(places_of(self._config, self.caches))

    def _bytes(self, name: str, content: Content) -> torch.Tensor:
        seed = torch.frombuffer(bytearray(content[1]), dtype=torch.uint8)
        return (seed.repeat(2)[: STAGES[self.worker._rank.rank][name]] + int(name[-1])) & 0xFF

    def fill(self, block: int, content: Content) -> None:
        for name, cache in self.caches.items():
            cache[block] = self._bytes(name, content)

    def holds(self, block: int, content: Content) -> bool:
        return all(torch.equal(cache[block], self._bytes(name, content)) for name, cache in self.caches.items())

    def clear(self) -> None:
        for cache in self.caches.values():
            cache.zero_()


class Pipeline(ToyVllm):
    """The second stage computes a step after the first one: a step is reported when both have."""

    def __init__(self, path: str) -> None:
        self.stages = [Stage(path, rank) for rank in range(len(STAGES))]
        layout = EngineLayout("pipe", "tiny", check_groups([FULL], 4), hash_tokens=4, ranks=len(STAGES))
        self.link = OffloadClient(path, layout, Timeouts(lookup_s=5.0))
        self.wrong = 0
        super().__init__(blocks=BLOCKS, client=self.link)
        assert self.link.wait_connected(LONG_S)

    def schedule(self, chunk: int = 16) -> Said:
        said = super().schedule(chunk)
        for stage in self.stages:
            stage.worker.said = said
            for block, content in self.flights[-1].fills:
                stage.fill(block, content)
        return said

    def run(self) -> None:
        time.sleep(STEP_S)
        for stage in self.stages:
            stage.worker.end_step()
        assert {stage.worker.computed for stage in self.stages} == {self.flights[0].number}
        assert all(stage.worker.loaded() == set(self.flights[0].said.ended) for stage in self.stages)
        super().run()

    def _end_load(self, request_id: str, *, failed: bool, keep: bool) -> None:
        request = self.loading[request_id]
        for number in range(request.num_computed_tokens // 4 if not failed else 0):
            block, content = request.tables[0][number].block_id, (0, request.block_hashes[number])
            self.wrong += not all(stage.holds(block, content) for stage in self.stages)
            self.pool.content[block] = content
        super()._end_load(request_id, failed=failed, keep=keep)

    def ask(self, name: str) -> int:
        """Tokens that were loaded for a prompt of 4 blocks. At the end nothing is held, and the pool is empty."""
        before = self.half.loads.counters["loaded_tokens"]
        self.add(name, range(17), 1)
        for _ in range(2000):
            self.step()
            if name not in self.requests and not self.half.planner.book.held_blocks and self.pool.reset():
                break
        else:
            raise AssertionError(f"{self.half!r}")
        for stage in self.stages:
            stage.clear()
        return self.half.loads.counters["loaded_tokens"] - before


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    sidecar = Sidecar(tmp_path)
    sidecar.start()
    made = Pipeline(sidecar.path)
    yield made
    made.half.close()
    for stage in made.stages:
        assert stage.worker.take_back()
    sidecar.end()


def test_a_block_counts_when_every_stage_has_it(pipeline: Pipeline) -> None:
    first, second = pipeline.stages
    first.lend()
    assert pipeline.ask("one stage is not there") == 0
    assert pipeline.half.declined_blocks >= 4
    assert pipeline.half.stored_blocks == 0
    second.lend()
    assert pipeline.ask("both are") == 0
    assert pipeline.half.stored_blocks == 4
    assert pipeline.ask("and have it") == 16
    assert second.worker.take_back()
    assert pipeline.ask("one has left") == 0
    second.worker.lend_again()
    assert second.worker.client is not None
    assert second.worker.client.wait_connected(LONG_S)
    assert pipeline.ask("it is back") == 16
    assert pipeline.wrong == 0


def test_what_runs_is_offered_again_when_a_stage_that_was_missing_has_come(pipeline: Pipeline) -> None:
    first, second = pipeline.stages
    first.lend()
    pipeline.add("r", range(17), 120)
    while pipeline.half.declined_blocks < 4:
        pipeline.step()
    second.lend()
    while pipeline.half.stored_blocks < 4:
        assert "r" in pipeline.requests, pipeline.half
        pipeline.step()
    pipeline.abort("r")


def test_a_stage_without_layers_is_one_clear_error(pipeline: Pipeline) -> None:
    pipeline.stages[1].caches.clear()
    with pytest.raises(Exception, match="expected at least one layer with a KV cache"):
        pipeline.stages[1].lend()
