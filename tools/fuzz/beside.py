"""What runs beside the bad input and must stay right: an engine that checks every byte, and a reader that folds."""

from __future__ import annotations

import threading
import time
from random import Random

from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.engine.registration import Timeouts
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import Memory
from kvevents_service.wire.packing import pack_int32
from tools.fuzz.messages import BLOCK_SIZE, BLOCKS, GROUP, LAYER_BYTES, LAYERS, MEMORY_BYTES, NAMESPACE

CHAIN_BLOCKS = 8
WAIT_S = 30.0
PAUSE_S = 0.005
LEAST_HITS = 0.5
"""Resets and leases of the others may cost it the rest."""
PATIENT = Timeouts(lookup_s=WAIT_S, send_s=WAIT_S)


class HealthyEngine(threading.Thread):
    """Stores a new prompt, loads it into other blocks, looks at the bytes; again and again until `end`."""

    def __init__(self, path: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.rounds = self.loaded = self.wrong_bytes = 0
        self.slowest_s = 0.0
        self.fault = ""
        self._random = Random(seed)
        self._over = threading.Event()
        self._memory = SharedMemory.create(MEMORY_BYTES)
        layout = EngineLayout(
            "healthy",
            NAMESPACE,
            [GROUP],
            [Memory(MEMORY_BYTES)],
            uniform_layers(LAYERS, BLOCKS, LAYER_BYTES),
            [self._memory.fd],
        )
        self.client = OffloadClient(path, layout, PATIENT)
        if not self.client.wait_connected(WAIT_S):
            raise RuntimeError(f"no sidecar: {self.client.last_error}")

    def run(self) -> None:
        try:
            while not self._over.wait(PAUSE_S):
                started = time.monotonic()
                self._round()
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                self.rounds += 1
        except TimeoutError as error:
            self.fault = str(error)

    def _round(self) -> None:
        tokens = [self._random.randrange(100_000) for _ in range(CHAIN_BLOCKS * BLOCK_SIZE)]
        chain = make_chain(tokens, BLOCK_SIZE)
        contents = {block: self._random.randbytes(LAYER_BYTES) for block in range(CHAIN_BLOCKS)}
        for block, content in contents.items():
            self._write(block, content)
        step = self.client.step([chain.offer(range(CHAIN_BLOCKS), request_id="healthy")], ["healthy"])
        self._wait(step)
        self._load(chain, contents)

    def _load(self, chain: Chain, contents: dict[int, bytes]) -> None:
        hit = self.client.lookup("healthy", chain.packed)
        if not hit.blocks:
            return
        places = range(CHAIN_BLOCKS, CHAIN_BLOCKS + hit.blocks)
        blocks = self._wait(self.client.load("healthy", hit, pack_int32(places)))
        self.loaded += blocks
        for block in range(blocks):
            self.wrong_bytes += not self._holds(CHAIN_BLOCKS + block, contents[block])

    def _wait(self, number: int | None) -> int:
        """The end of a step or a load: of a load, how many blocks came."""
        if number is None:
            raise TimeoutError(f"the healthy engine was refused: {self.client.last_error}")
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            ended = self.client.poll(0.1)
            for done in ended.steps:
                if done.step_id == number:
                    return done.stored
            for load in ended.loads:
                if load.load_id == number:
                    return load.blocks
        raise TimeoutError(f"the healthy engine waited {WAIT_S:.0f} s: {self.client!r}")

    def _spans(self, block: int) -> list[slice]:
        starts = [(layer * BLOCKS + block) * LAYER_BYTES for layer in range(LAYERS)]
        return [slice(start, start + LAYER_BYTES) for start in starts]

    def _write(self, block: int, content: bytes) -> None:
        for layer, span in enumerate(self._spans(block)):
            self._memory.map[span] = bytes(byte ^ layer for byte in content)

    def _holds(self, block: int, content: bytes) -> bool:
        spans = enumerate(self._spans(block))
        return all(self._memory.map[span] == bytes(byte ^ layer for byte in content) for layer, span in spans)

    def end(self) -> list[str]:
        """Stop; what went wrong."""
        self._over.set()
        self.join()
        lost = self.client.counters["registrations"] > 1
        self.client.close(WAIT_S)
        checks = {
            self.fault: self.fault,
            f"{self.wrong_bytes} blocks of the healthy engine had wrong bytes": self.wrong_bytes,
            "the healthy engine lost its connection": lost,
            f"the healthy engine loaded {self.loaded} blocks in {self.rounds} rounds": (
                self.loaded < LEAST_HITS * CHAIN_BLOCKS * self.rounds or not self.loaded
            ),
        }
        return [text for text, there in checks.items() if there]
