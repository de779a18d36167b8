"""The longest single callback of the sidecar's event loop, in ms of its thread's CPU time, at many resident blocks.

A process runs what `kvevents serve` runs, on asyncio's own loop, whose every callback is timed: what holds the loop
is what a lookup or another engine waits for. CPU time is that of the loop's thread alone, so neighbours and the
copying threads do not count. Each phase is one kind of work at BLOCKS blocks in each of two tiers, the one behind
kept on the disk. `gc` is the longest pass of the garbage collector, which is a part of some callback; `over`, how
many callbacks of how many took longer than the target.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import zmq

from benchmarks.harness import BLOCK_TOKENS, HASH_BYTES, Spread, note, report
from benchmarks.served import CONNECT_S
from kvevents_service.cli.tuning import tune_process
from kvevents_service.config import ServeConfig
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.engine.registration import Timeouts
from kvevents_service.service.app import Ready, serve
from kvevents_service.transfer.disk import BLOCKS_NAME
from kvevents_service.wire.control import GroupSpec, Memory, Offer
from kvevents_service.wire.frames import parse_replay_reply, replay_request
from kvevents_service.wire.packing import pack_int32

BLOCKS = int(os.environ.get("LOOP_BLOCKS", 300_000))
TARGET_MS = 5.0
BLOCK_BYTES = 64
CHAIN_BLOCKS, RUN_BLOCKS = 2048, 512
"""A long prompt, offered in steps of a usual size."""
VOCABULARY = 128_000
DEADLINE_S = 120.0
NAMED = 5


class Held(NamedTuple):
    """A callback: milliseconds of CPU, and what it was."""

    ms: float
    name: str


class Taken(NamedTuple):
    """Of one phase: the longest callbacks, how many there were and were over the target, the longest gc in ms."""

    held: list[Held]
    calls: int
    over: int
    gc_ms: float


class Watch:
    """Times every callback of asyncio's loop in this process."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.calls = self.over = 0
        self.gc_ms = 0.0
        self._gc_at = 0.0
        run, clock = asyncio.events.Handle._run, time.thread_time

        def timed(handle: asyncio.events.Handle) -> None:
            started = clock()
            run(handle)
            took = clock() - started
            self.calls += 1
            self.over += took * 1e3 > TARGET_MS
            if took > 0.001:
                name = _name(handle)
                self.longest[name] = max(took, self.longest.get(name, 0.0))

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_at = time.thread_time()
        else:
            self.gc_ms = max(self.gc_ms, (time.thread_time() - self._gc_at) * 1e3)

    def take(self) -> Taken:
        """Since the last call."""
        held = sorted((Held(seconds * 1e3, name) for name, seconds in self.longest.items()), reverse=True)
        taken = Taken(held[:NAMED], self.calls, self.over, self.gc_ms)
        self.longest, self.calls, self.over, self.gc_ms = {}, 0, 0, 0.0
        return taken


def _name(handle: asyncio.events.Handle) -> str:
    """The coroutine of a task, or the function."""
    callback: Any = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return str(task.get_coro().__qualname__)
    while hasattr(callback, "func"):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))


def watched(directory: str, pipe: Connection) -> None:
    """A sidecar that answers on the pipe what held its loop, until SIGTERM."""
    tune_process()
    watch = Watch()

    def answer() -> None:
        while pipe.recv():
            pipe.send(watch.take())

    def ready(at: Ready) -> None:
        pipe.send(msgspec.to_builtins(at))
        threading.Thread(target=answer, daemon=True).start()

    config = ServeConfig(
        engine_socket=f"{directory}/engine.sock",
        host_bytes=BLOCKS * BLOCK_BYTES,
        disk_path=directory,
        disk_bytes=BLOCKS * BLOCK_BYTES,
        disk_page_cache=True,
        disk_keep=True,
        state_dir=f"{directory}/state",
        pub="tcp://127.0.0.1:0",
        replay="tcp://127.0.0.1:0",
        snapshot="tcp://127.0.0.1:0",
        admin="127.0.0.1:0",
    )
    sys.exit(asyncio.run(serve(config, ready)))


class Sidecar:
    """The watched process, from outside."""

    def __init__(self, directory: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=watched, args=(directory, theirs))
        self._process.start()
        assert self._pipe.poll(CONNECT_S), "the sidecar does not start"
        self.ready: dict[str, Any] = self._pipe.recv()

    def taken(self) -> Taken:
        self._pipe.send(True)
        assert self._pipe.poll(DEADLINE_S), "the sidecar does not answer"
        taken: Taken = self._pipe.recv()
        return taken

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(DEADLINE_S)


class Engine:
    """Offers chains that nobody has seen, and asks for them again."""

    def __init__(self, engine_socket: str, random: Random) -> None:
        size_bytes = CHAIN_BLOCKS * BLOCK_BYTES
        self._memory = SharedMemory.create(size_bytes)
        layout = EngineLayout(
            "bench", "bench", [GroupSpec(0, "full_attention", BLOCK_TOKENS)], [Memory(size_bytes)],
            uniform_layers(1, CHAIN_BLOCKS, BLOCK_BYTES), [self._memory.fd], HASH_BYTES,
        )  # fmt: skip
        self.client = OffloadClient(engine_socket, layout, Timeouts(lookup_s=DEADLINE_S, send_s=DEADLINE_S))
        assert self.client.wait_connected(DEADLINE_S), self.client.last_error
        self.chains: list[bytes] = []
        self._random = random
        self._tokens = pack_int32(random.choices(range(VOCABULARY), k=RUN_BLOCKS * BLOCK_TOKENS))
        self._numbers = count()

    def offer(self, blocks: int, run: int = RUN_BLOCKS) -> None:
        """So many new blocks, a step at a time; each is there before the next is offered."""
        for _ in range(-(-blocks // CHAIN_BLOCKS)):
            hashes = self._random.randbytes(HASH_BYTES * CHAIN_BLOCKS)
            self.chains.append(hashes)
            for start in range(0, CHAIN_BLOCKS, run):
                part = hashes[start * HASH_BYTES : (start + run) * HASH_BYTES]
                parent = hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else None
                tokens = (self._tokens * (run // RUN_BLOCKS))[: run * BLOCK_TOKENS * 4]
                ids = pack_int32(range(start, start + run))
                name = f"request-{next(self._numbers)}"
                self.client.step([Offer(name, 0, part, tokens, ids, parent)], [name])
                self._wait()

    def load(self, chain: bytes) -> int:
        """Ask for a chain, and have what there is of it copied; returns the blocks."""
        hit = self.client.lookup("again", chain)
        if not hit.blocks:
            return 0
        self.client.load("again", hit, pack_int32(range(hit.blocks)))
        self._wait()
        return hit.blocks

    def lease(self, chain: bytes) -> None:
        self.client.lookup(f"leased-{next(self._numbers)}", chain)

    def _wait(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.client.outstanding:
            assert time.monotonic() < deadline, self.client.last_error
            self.client.poll(0.5)


class Phases:
    """Runs one phase after the other, and notes what held the loop in each."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self.taken: dict[str, Taken] = {}
        sidecar.taken()

    def run(self, name: str, work: Callable[[], None], then_s: float = 0.5) -> None:
        work()
        time.sleep(then_s)
        taken = self.taken[name] = self.sidecar.taken()
        told = ", ".join(f"{one.ms:.1f} {one.name}" for one in taken.held[:3])
        note(f"{name:12s} {taken.over:4d} of {taken.calls:6d}; gc {taken.gc_ms:4.1f}; {told or 'none above 1 ms'}")


def join(endpoint: str) -> None:
    """A replay from 0, to its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(100_000)
        socket.connect(endpoint)
        socket.send_multipart(replay_request(0))
        while socket.poll(int(DEADLINE_S * 1000)):
            if parse_replay_reply(socket.recv_multipart()) is None:
                return
    raise AssertionError("the reply did not end")


def scrape(admin: str) -> None:
    for _ in range(5):
        for path in ("metrics", "state"):
            urllib.request.urlopen(f"{admin}/{path}", timeout=DEADLINE_S).read()


def spoil(directory: str) -> None:
    """Half of what the disk holds is overwritten."""
    with (Path(directory) / BLOCKS_NAME).open("r+b") as file:
        file.write(b"\xff" * (BLOCKS * BLOCK_BYTES // 2))


@contextmanager
def phases(directory: str) -> Iterator[tuple[Phases, Engine]]:
    sidecar = Sidecar(directory)
    try:
        yield Phases(sidecar), Engine(sidecar.ready["engine_socket"], Random(os.getpid()))
    finally:
        sidecar.stop()


def first_life(directory: str) -> Phases:
    with phases(directory) as (run, engine):
        ready = run.sidecar.ready
        run.run("fill", lambda: engine.offer(2 * BLOCKS), 3.0)
        run.run("evict", lambda: engine.offer(BLOCKS // 4))
        run.run("large_steps", lambda: engine.offer(BLOCKS // 4, CHAIN_BLOCKS))
        run.run("idle", lambda: time.sleep(2.0))
        run.run("hits", lambda: [engine.load(chain) for chain in engine.chains[-200::7]] and None)
        run.run("scrape", lambda: scrape(ready["admin"]))
        run.run("join", lambda: [join(ready["replay"]) for _ in range(3)] and None)
        run.run("lose", lambda: _lose(directory, engine))
        run.run("leave", lambda: _leave(engine))
        engine = Engine(ready["engine_socket"], Random(os.getpid() + 1))
        run.run("come", lambda: engine.offer(CHAIN_BLOCKS))
        run.run("reset", lambda: _reset(engine), 3.0)
        run.run("refill", lambda: engine.offer(BLOCKS * 3 // 2), 3.0)
        return run


def _lose(directory: str, engine: Engine) -> None:
    spoil(directory)
    for chain in engine.chains[::4]:
        engine.load(chain)


def _leave(engine: Engine) -> None:
    for chain in engine.chains[-1000:]:
        engine.lease(chain)
    engine.client.close()


def _reset(engine: Engine) -> None:
    assert engine.client.reset(DEADLINE_S)


def second_life(directory: str) -> Phases:
    with phases(directory) as (run, engine):
        run.run("adopt", lambda: engine.offer(CHAIN_BLOCKS), 3.0)
        return run


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvbench-loop-") as directory:
        lives = first_life(directory), second_life(directory)
    taken = {name: found for life in lives for name, found in life.taken.items()}
    worst = {name: found.held[0] for name, found in taken.items() if found.held}
    name = max(worst, key=lambda name: worst[name].ms)
    report(
        "loop",
        Spread.of([worst[name].ms]),
        "ms of CPU in one callback",
        TARGET_MS,
        phase=name,
        callback=worst[name].name,
        blocks_a_tier=BLOCKS,
        phases={name: {one.name: one.ms for one in found.held} for name, found in taken.items()},
        over={name: [found.over, found.calls] for name, found in taken.items()},
        gc={name: found.gc_ms for name, found in taken.items()},
    )


if __name__ == "__main__":
    main()
