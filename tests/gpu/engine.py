"""An engine with a paged KV cache on the device, whose every word says which block of which prompt it is."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import torch

from gpu.machine import Machine
from kvevents_service.engine.client import OffloadClient, PrefixHit, Timeouts
from kvevents_service.engine.cuda import ComputeEvents, KvTensor, export
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.packing import pack_int32

BLOCK_SIZE = 16
DEADLINE_S = 60.0
PATIENT = Timeouts(lookup_s=5.0, send_s=2.0, redial_s=0.05)
ODD = 0x2545F4914F6CDD1D
POISON = 0x5A5A5A5A5A5A5A5A


class Shape(NamedTuple):
    """`layers` tensors [2, blocks, words] of 8 bytes, as FlashAttention keeps keys and values."""

    layers: int
    blocks: int
    words: int

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.words * 8


def prompt(number: int, blocks: int) -> Chain:
    tokens = random.Random(number).choices(range(100_000), k=blocks * BLOCK_SIZE)
    return make_chain(tokens, BLOCK_SIZE)


class KvCache:
    """Layers on the device. Seeds name the contents of blocks."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self.machine = machine
        self.shape = shape
        size = 2 * shape.blocks * shape.words
        self.layers = [machine.empty(size).view(2, shape.blocks, shape.words) for _ in range(shape.layers)]
        self._ramp = torch.arange(shape.words, device=self.layers[0].device) * ODD

    def _content(self, layer: int, half: int, seeds: list[int]) -> torch.Tensor:
        base = torch.tensor(seeds, dtype=torch.int64, device=self._ramp.device).view(-1, 1) * 64 + layer * 2 + half
        return (base * ODD) ^ self._ramp

    def fill(self, blocks: list[int], seeds: list[int]) -> None:
        """What a forward pass does."""
        index = torch.tensor(blocks, device=self._ramp.device)
        for number, layer in enumerate(self.layers):
            for half in range(2):
                layer[half].index_copy_(0, index, self._content(number, half, seeds))

    def poison(self, blocks: list[int]) -> None:
        index = torch.tensor(blocks, device=self._ramp.device)
        for layer in self.layers:
            layer.index_fill_(1, index, POISON)
        self.machine.finish()

    def corrupt(self, blocks: list[int], seeds: list[int]) -> int:
        """Blocks that do not hold what their seeds say."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._ramp.device)
        good = torch.ones(len(blocks), dtype=torch.bool, device=self._ramp.device)
        for number, layer in enumerate(self.layers):
            for half in range(2):
                found = layer[half].index_select(0, index)
                good &= (found == self._content(number, half, seeds)).all(dim=1)
        return len(blocks) - int(good.sum())


class KvEngine(KvCache):
    """Calls are blocking."""

    def __init__(self, machine: Machine, path: str, shape: Shape) -> None:
        super().__init__(machine, shape)
        self.events = ComputeEvents(machine.driver)
        self.passes = -1
        tensors = [KvTensor(f"layer.{number}", layer, 1) for number, layer in enumerate(self.layers)]
        memories, regions = export(machine.driver, tensors)
        layout = EngineLayout(
            "gpu-check",
            f"gpu-check-{shape.layers}-{shape.words}",
            [GroupSpec(0, "full_attention", BLOCK_SIZE)],
            memories,
            regions,
            events=self.events.handles,
        )
        self.client = OffloadClient(path, layout, PATIENT)
        if not self.client.wait_connected(DEADLINE_S):
            raise TimeoutError(self.client.last_error)

    def compute(self, blocks: list[int], seeds: list[int]) -> int:
        """Submit a pass that fills these blocks, some time later. Returns its mark."""
        self.passes += 1
        self.machine.compute(lambda: self.fill(blocks, seeds))
        self.events.record(self.passes, self.machine.stream)
        self.client.mark(self.passes)
        return self.passes

    def offer(self, chain: Chain, blocks: list[int], mark: int) -> int:
        step = self.client.step([chain.offer(blocks)], mark=mark)
        assert step is not None, self.client
        return step

    def wait(self, number: int) -> int:
        """Blocks stored in this step, or units of this load."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            ended = self.client.poll(0.5)
            for step in ended.steps:
                if step.step_id == number:
                    return step.stored
            for load in ended.loads:
                if load.load_id == number:
                    return load.blocks
        raise TimeoutError(f"{self.client!r}: {number}")

    def load(self, chain: Chain, blocks: list[int]) -> int:
        """Blocks of this prompt that came, into the first of `blocks`."""
        hit: PrefixHit = self.client.lookup("r", chain.packed)
        if not hit.blocks:
            return 0
        number = self.client.load("r", hit, pack_int32(blocks[: hit.blocks]), mark=self.passes)
        assert number is not None, self.client
        return self.wait(number)

    def close(self) -> bool:
        gone = self.client.close(DEADLINE_S)
        if gone:
            self.events.close()
        return gone
