"""One engine of the soak: the reference engine on a trace without end, until SIGTERM.

    python -m tools.soak.engine --engine-socket PATH --seed N

Half of the conversations come again in every turn of the trace, so that there are hits on both tiers; the others
are new ones each time, so that blocks must leave. A line of counters on stdout each second.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path

import click
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
SETTINGS = EngineSettings(max_running=16, step_tokens=16_384, forward_s=0.001)
TELL_S = 1.0


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
        raise click.ClickException(f"no sidecar: {client.last_error}")
    return client


@click.command()
@click.option("--engine-socket", required=True)
@click.option("--seed", default=1)
@click.option("--reset-every", default=0.0, help="Seconds between resets; 0: none.")
def main(engine_socket: str, seed: int, reset_every: float) -> None:
    torch.set_num_threads(1)
    traffic, resets = Traffic(seed), 0
    signal.signal(signal.SIGTERM, traffic.stop)
    cache = PagedCache(BLOCKS, LAYERS, LAYER_BYTES)
    client = connect(engine_socket, cache)
    planner = make_planner(cache, MODELS["full"], SETTINGS, lazy=False)
    engine = ReferenceEngine(cache, client, MODELS["full"], SETTINGS, planner)
    told = reset_at = time.monotonic()
    for counts in engine.run(traffic.lines()):
        now = time.monotonic()
        if reset_every and now - reset_at >= reset_every:
            reset_at, resets = now, resets + (client.reset(5.0) is not None)
        if now - told >= TELL_S or counts.done:
            told = now
            line = {
                **msgspec.to_builtins(counts),
                "resets": resets,
                "client_errors": client.counters["client_errors"],
            }
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
            sys.stdout.buffer.flush()
    client.close(10.0)


if __name__ == "__main__":
    main()
