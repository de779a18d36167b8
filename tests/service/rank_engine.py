"""Engines whose KV memory is in several processes, each with a layout of its own (as with pipeline parallelism)."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from kvevents_service.engine.layout import SharedMemory, uniform_layers
from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.wire.control import Memory

SCRIPT = Path(__file__).with_name("rank_process.py")
WAIT_S = 20.0


class Shape(NamedTuple):
    """What one rank holds of the model."""

    layers: int
    blocks: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.block_bytes


PIPELINE = (Shape(2, 64, 64), Shape(3, 40, 64), Shape(1, 50, 24))
"""Three stages: other layer counts, block counts and sizes. Their smallest block count is 40."""


class RankMemory:
    """The KV memory of one rank. A block's bytes tell rank, layer and value."""

    def __init__(self, rank: int, shape: Shape) -> None:
        self.rank, self.shape = rank, shape
        self.shared = SharedMemory.create(shape.size_bytes)

    def _spans(self, block: int) -> list[slice]:
        _, blocks, size = self.shape
        starts = [(layer * blocks + block) * size for layer in range(self.shape.layers)]
        return [slice(start, start + size) for start in starts]

    def _wanted(self, layer: int, value: int) -> bytes:
        return bytes([value, self.rank, layer]) * (self.shape.layer_bytes // 3 + 1)

    def fill(self, block: int, value: int) -> None:
        for layer, span in enumerate(self._spans(block)):
            self.shared.map[span] = self._wanted(layer, value)[: self.shape.layer_bytes]

    def holds(self, block: int, value: int) -> bool:
        parts = [self.shared.map[span] for span in self._spans(block)]
        return parts == [self._wanted(layer, value)[: self.shape.layer_bytes] for layer in range(len(parts))]

    def clear(self) -> None:
        self.shared.map[:] = bytes(self.shape.size_bytes)

    def close(self) -> None:
        self.shared.map.close()
        os.close(self.shared.fd)

    def layout(self, engine_id: str, ranks: int) -> RankLayout:
        layers, blocks, size = self.shape
        regions = uniform_layers(layers, blocks, size)
        return RankLayout(engine_id, self.rank, ranks, [Memory(self.shape.size_bytes)], regions, [self.shared.fd])

    def client(self, path: str, engine_id: str, ranks: int) -> RankClient:
        made = RankClient(path, self.layout(engine_id, ranks))
        assert made.wait_connected(WAIT_S), made
        return made


class RankProcess:
    """A rank as a process that can be killed. This process can look into its memory."""

    def __init__(self, path: str, engine_id: str, ranks: int, memory: RankMemory) -> None:
        fd = memory.shared.fd
        words = [path, engine_id, *map(str, (memory.rank, ranks, fd, *memory.shape))]
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._end()

    def leave(self) -> str:
        """Close as an engine would; returns what it said of it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        last = self.said()
        self._end()
        return last

    def _end(self) -> None:
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
