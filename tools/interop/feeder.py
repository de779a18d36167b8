"""A small engine with real memory: it stores blocks of prompts that we know through the real engine socket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from random import randbytes

from consumer import BLOCK_SIZE
from truth import NAME_BYTES, Held

from kvevents_service.engine.client import OffloadClient, Timeouts
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.testing import Chain
from kvevents_service.wire.control import GroupSpec, Inspected, Memory

BLOCKS, LAYERS, LAYER_BYTES = 256, 2, 64
BYTES_PER_BLOCK = LAYERS * LAYER_BYTES
WAIT_S = 20.0
PATIENT = Timeouts(lookup_s=5.0, send_s=1.0, redial_s=0.02)


class Feeder:
    """Offers chains of blocks, one step a chain, and waits for the copies."""

    def __init__(self, engine_socket: str) -> None:
        self._memory = SharedMemory.create(BLOCKS * BYTES_PER_BLOCK)
        self._memory.map[:] = randbytes(BLOCKS * BYTES_PER_BLOCK)
        layout = EngineLayout(
            "interop",
            "interop",
            [GroupSpec(0, "full_attention", BLOCK_SIZE)],
            [Memory(BLOCKS * BYTES_PER_BLOCK)],
            uniform_layers(LAYERS, BLOCKS, LAYER_BYTES),
            [self._memory.fd],
        )
        self.client = OffloadClient(engine_socket, layout, PATIENT)

    def store(self, *chains: Chain) -> int:
        """Offer these in one step and wait; returns how many blocks were copied. TimeoutError if none ends."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            step = self._offer(chains)
            while step is not None and time.monotonic() < deadline:
                for done in self.client.poll(0.2).steps:
                    if done.step_id == step:
                        return done.stored
        raise TimeoutError(f"the copies did not end: {self.client!r}: {self.client.last_error}")

    def _offer(self, chains: Sequence[Chain]) -> int | None:
        """The number of the step; None if the sidecar is away just now."""
        if not self.client.wait_connected(WAIT_S):
            return None
        places = iter(range(BLOCKS))
        offers = [chain.offer(islice(places, len(chain.hashes))) for chain in chains]
        return self.client.step(offers, ["r"])

    def inspect(self) -> Inspected:
        inspected = self.client.inspect(residents=True)
        if inspected is None:
            raise TimeoutError(f"the sidecar gave no answer: {self.client!r}")
        return inspected

    def held(self) -> Held:
        """What the sidecar says is resident."""
        inspected = self.inspect()
        held: Held = {}
        for shelf in inspected.residents:
            size, packed = inspected.hash_bytes, shelf.block_hashes
            names = (packed[i : i + size][-NAME_BYTES:] for i in range(0, len(packed), size))
            held[shelf.medium] = held.get(shelf.medium, frozenset()) | frozenset(names)
        return held

    def close(self) -> None:
        self.client.close()
        self._memory.map.close()
