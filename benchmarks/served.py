"""A `kvevents serve` of our own in a temporary directory, stopped by its own pid; and engines for it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.harness import BLOCK_TOKENS, HASH_BYTES
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.engine.registration import Timeouts
from kvevents_service.wire.control import GroupSpec, Memory

BLOCK_BYTES = 1024
CONNECT_S = 20.0
STOP_S = 15.0
SERVE = "from kvevents_service.cli import main; main()"


@contextmanager
def sidecar(capacity_blocks: int) -> Iterator[str]:
    """A running sidecar with room for so many blocks; gives its engine socket."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        process = _start(Path(folder), capacity_blocks)
        try:
            assert process.stdout is not None
            yield msgspec.json.decode(process.stdout.readline())["engine_socket"]
        finally:
            process.terminate()
            process.wait(STOP_S)


def _start(folder: Path, capacity_blocks: int) -> subprocess.Popen[bytes]:
    flags = {
        "--engine-socket": folder / "engine.sock",
        "--host-bytes": capacity_blocks * BLOCK_BYTES,
        "--pub": f"ipc://{folder}/pub",
        "--replay": f"ipc://{folder}/replay",
        "--log-level": "warning",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    return subprocess.Popen([sys.executable, "-c", SERVE, "serve", *words], stdout=subprocess.PIPE)


@contextmanager
def engine(socket_path: str, blocks: int) -> Iterator[OffloadClient]:
    """A registered engine with memory for so many blocks. Its deadlines never bite here."""
    size_bytes = blocks * BLOCK_BYTES
    memory = SharedMemory.create(size_bytes)
    layout = EngineLayout(
        "bench",
        "bench",
        [GroupSpec(0, "full_attention", BLOCK_TOKENS)],
        [Memory(size_bytes)],
        uniform_layers(1, blocks, BLOCK_BYTES),
        [memory.fd],
        HASH_BYTES,
    )
    yield from _connected(socket_path, layout)


@contextmanager
def observer(socket_path: str) -> Iterator[OffloadClient]:
    """A client that only inspects."""
    yield from _connected(socket_path, EngineLayout("observer", "", [], [], []))


def _connected(socket_path: str, layout: EngineLayout) -> Iterator[OffloadClient]:
    client = OffloadClient(socket_path, layout, Timeouts(lookup_s=5.0, send_s=5.0))
    try:
        assert client.wait_connected(CONNECT_S), client.last_error
        yield client
    finally:
        client.close()


def wait_idle(watcher: OffloadClient) -> None:
    """Wait, on another connection, until the sidecar has no copy under way and has answered for all of them."""
    while (seen := watcher.inspect()) is None or seen.stats["transfers"]:
        time.sleep(0.001)
    time.sleep(0.001)
