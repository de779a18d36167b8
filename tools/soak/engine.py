"""One engine of the soak: the reference engine on a trace without end, until SIGTERM, no faster than it is told.

Half of the conversations come again in every turn of the trace, so that there are hits on both tiers; the others
are new ones each time, so that blocks must leave. It tells its counters each second.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.model import MODELS
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.reference import EngineSettings, ReferenceEngine, make_planner
from kvevents_service.engine.trace import TraceLine, read_trace

TRACE = Path(str(files("kvevents_service") / "data" / "conversation-200.jsonl"))
BLOCKS, LAYERS, LAYER_BYTES = 16_384, 2, 512
BLOCK_BYTES = LAYERS * LAYER_BYTES
MAX_PROMPT_TOKENS = 32_768
IDS_A_TURN = 1_000_000
SETTINGS = EngineSettings(max_running=16, step_tokens=8_192, forward_s=0.001)
TELL_S, RESET_S = 1.0, 5.0


class Orders(NamedTuple):
    """What an engine is to do. since: from this time of the monotonic clock on so many blocks a second are asked
    for; offered: how many of those others have offered. reset_every_s: 0, never."""

    engine_socket: str
    seed: int
    blocks_per_s: float
    since: float
    offered: int
    reset_every_s: float
    nice: int


class Traffic:
    """The trace again and again, until `stopped`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stopped = False

    def stop(self, *_: object) -> None:
        self.stopped = True

    def lines(self) -> Iterator[TraceLine]:
        trace = [*read_trace(TRACE)]
        for turn in count(1):
            for line in trace:
                if self.stopped:
                    return
                yield self._shifted(line, turn)

    def _shifted(self, line: TraceLine, turn: int) -> TraceLine:
        new = line.hash_ids[-1] % 2
        shift = (self.seed * 10_000 + turn) * IDS_A_TURN * new
        ids = [number + shift for number in line.hash_ids]
        length = min(line.input_length, MAX_PROMPT_TOKENS)
        return TraceLine(line.timestamp, length, min(line.output_length, 64), ids[: -(-length // 512)])


def connect(engine_socket: str, cache: PagedCache) -> OffloadClient:
    layout = EngineLayout(
        engine_id="soak",
        namespace="soak",
        groups=MODELS["full"].groups,
        memories=cache.memories,
        regions=cache.regions,
        fds=[cache.memory.fd],
        hash_tokens=MODELS["full"].hash_tokens,
    )
    client = OffloadClient(engine_socket, layout)
    if not client.wait_connected(20.0):
        raise RuntimeError(f"no sidecar: {client.last_error}")
    return client


class Pace:
    """Sleeps whenever more was offered since `orders.since` than was asked for until now."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def keep(self, offered: int) -> None:
        orders = self._orders
        due = orders.since + (orders.offered + offered) / orders.blocks_per_s
        time.sleep(max(0.0, due - time.monotonic()))


def serve(orders: Orders, pipe: Connection) -> None:
    """A process of its own: traffic until SIGTERM. Counters go down the pipe."""
    os.nice(orders.nice)
    torch.set_num_threads(1)
    traffic, resets, pace = Traffic(orders.seed), 0, Pace(orders)
    signal.signal(signal.SIGTERM, traffic.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cache = PagedCache(BLOCKS, LAYERS, LAYER_BYTES)
    client = connect(orders.engine_socket, cache)
    planner = make_planner(cache, MODELS["full"], SETTINGS, lazy=False)
    engine = ReferenceEngine(cache, client, MODELS["full"], SETTINGS, planner)
    told = reset_at = time.monotonic()
    for counts in engine.run(traffic.lines()):
        now = time.monotonic()
        if orders.reset_every_s and now - reset_at >= orders.reset_every_s:
            reset_at, resets = now, resets + (client.reset(RESET_S) is not None)
        if now - told >= TELL_S or counts.done:
            told = now
            beside = {"resets": resets, "client_errors": client.counters["client_errors"]}
            pipe.send({**msgspec.to_builtins(counts), **beside, "cpu_s": time.process_time()})
        if not traffic.stopped:
            pace.keep(counts.blocks_offered)
    client.close(10.0)
