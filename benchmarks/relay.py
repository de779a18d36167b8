"""What a relay costs: the delay it adds at 5,000 batches/s, its rate beside a direct subscription, its memory.

Delay: a process sends batches of 4 blocks at a steady rate; the first hash of each is the time it was sent (ns of
CLOCK_MONOTONIC, which all processes of a machine share). Another process hears the source and the relay; added is
the difference, batch by batch. Rate: as fast as the source can send; a direct `Subscriber` is timed on the same
batches. The relay runs as `kvevents relay` does, in a process of its own. Memory: by tracemalloc, of runs of 8
blocks (and of 1 and of 32) of 16 tokens.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from random import Random
from statistics import quantiles

import zmq

from benchmarks.harness import BLOCK_TOKENS, VOCABULARY, Spread, note, report
from kvevents_service.core.source import StreamSource
from kvevents_service.subscriber import Batch, Subscriber
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.events import BlockStored, EventBatch
from kvevents_service.wire.frames import live_frames

BLOCKS = 4
RATE_HZ = 5_000
BURST = 5
"""Batches that are sent together, every ms: an engine's step does not come alone."""
SECONDS = 6.0
WARM_UP_S = 1.0
RUNS = 3
MANY = 30_000
RESIDENT = 100_000
DEADLINE_MS = 60_000
TARGET_MS, TARGET_RATIO, TARGET_BYTES = 2.0, 0.5, 300.0


def store(first: int, random: Random, blocks: int = BLOCKS) -> BlockStored:
    hashes: list[int | bytes] = [first, *(random.getrandbits(64) for _ in range(blocks - 1))]
    tokens = [random.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]
    return BlockStored(hashes, None, tokens, BLOCK_TOKENS, None, "GPU", None)


def send(rate_hz: float, batches: int, orders: Connection) -> None:
    """The source: say where it is, wait for two subscriptions, send. rate_hz 0: as fast as it can."""
    random = Random(1)
    template = [store(0, random) for _ in range(64)]
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind("tcp://127.0.0.1:0")
        orders.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        for _ in range(orders.recv()):
            socket.recv()
        start = time.monotonic()
        for seq in range(batches):
            if rate_hz and seq % BURST == 0:
                time.sleep(max(0.0, start + seq / rate_hz - time.monotonic()))
            event = template[seq % len(template)]
            event.block_hashes[0] = time.monotonic_ns()
            event.block_hashes[1:] = [random.getrandbits(64) for _ in range(BLOCKS - 1)]
            socket.send_multipart(live_frames(b"kv", seq, encode_batch(EventBatch(time.time(), [event], 0))))
        orders.recv()


def hear(endpoints: list[str], batches: int, answers: Connection) -> None:
    """When each batch came over each endpoint, by the time it was sent; ns."""
    with zmq.Context() as context:
        poller, ears, heard = zmq.Poller(), [], [dict[int, int]() for _ in endpoints]
        for endpoint in endpoints:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
            ears.append(socket)
        places = {socket: place for place, socket in enumerate(ears)}
        while min(map(len, heard)) < batches and (ready := poller.poll(DEADLINE_MS)):
            for socket, _ in ready:
                payload, now = socket.recv_multipart()[2], time.monotonic_ns()
                for event in decode_batch(payload).batch.events:
                    assert isinstance(event, BlockStored)
                    heard[places[socket]].setdefault(int(event.block_hashes[0]), now)  # type: ignore[arg-type]
        answers.send(heard)
        for socket in ears:
            socket.close()


@contextmanager
def process(target: object, *arguments: object) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)  # type: ignore[arg-type]
    child.start()
    try:
        yield ours
    finally:
        child.kill()
        child.join()


@contextmanager
def relay_of(source: str) -> Iterator[str]:
    """Where a relay of it publishes."""
    words = [
        "--from",
        source,
        "--pub",
        "tcp://127.0.0.1:0",
        "--replay",
        "tcp://127.0.0.1:0",
        "--log-level",
        "error",
    ]
    child = subprocess.Popen([sys.executable, "-m", "kvevents_service", "relay", *words], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["outputs"][0]["pub"]
    finally:
        child.kill()
        child.communicate()


def delays_ms(seconds: float) -> tuple[list[float], list[float]]:
    """What the relay added, and what a direct subscription took."""
    batches = int(RATE_HZ * seconds)
    with process(send, RATE_HZ, batches) as source:
        endpoint = source.recv()
        with relay_of(endpoint) as relayed, process(hear, [endpoint, relayed], batches) as ears:
            time.sleep(WARM_UP_S)
            source.send(2)
            assert ears.poll(DEADLINE_MS), "no answer"
            direct, late = ears.recv()
    assert len(late) == batches, f"{len(late)} of {batches} came through"
    sent = sorted(direct)[int(RATE_HZ * WARM_UP_S) :]
    return [(late[at] - direct[at]) / 1e6 for at in sent], [(direct[at] - at) / 1e6 for at in sent]


def relayed_rate() -> float:
    """Batches/s that came out of a relay, from the first to the last."""
    with (
        process(send, 0, MANY) as source,
        relay_of(source.recv()) as relayed,
        process(hear, [relayed], MANY) as ears,
    ):
        time.sleep(WARM_UP_S)
        source.send(1)
        assert ears.poll(DEADLINE_MS), "no answer"
        (heard,) = ears.recv()
    assert len(heard) == MANY, f"{len(heard)} of {MANY} came through"
    return MANY / ((max(heard.values()) - min(heard)) / 1e9)


def direct_rate() -> float:
    """Batches/s of a subscriber that reads every token and does nothing with them."""

    async def follow(endpoint: str, orders: Connection) -> float:
        async with Subscriber(endpoint, read_tokens=True) as subscriber:
            orders.send(1)
            item = await anext(subscriber)
            start = time.monotonic()
            while not (isinstance(item, Batch) and item.seq == MANY - 1):
                item = await anext(subscriber)
            return MANY / (time.monotonic() - start)

    with process(send, 0, MANY) as source:
        return asyncio.run(follow(source.recv(), source))


def bytes_per_block(blocks: int) -> float:
    """Of prompts of 32 blocks that come `blocks` at a time."""
    random, source = Random(2), StreamSource()
    tracemalloc.start()
    for _ in range(RESIDENT // 32):
        parent = None
        for _ in range(32 // blocks):
            event = store(random.getrandbits(64), random, blocks)
            source.apply(
                [BlockStored(event.block_hashes, parent, event.token_ids, BLOCK_TOKENS, None, "GPU", None)]
            )
            parent = event.block_hashes[-1]
        del event
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / sum(source.resident().values())


def main() -> None:
    added = [delays_ms(SECONDS) for _ in range(RUNS)]
    p99 = [quantiles(late, n=100)[98] for late, _ in added]
    p50 = [quantiles(late, n=100)[49] for late, _ in added]
    direct = [quantiles(took, n=100)[98] for _, took in added]
    note(f"added p50 {Spread.of(p50)} ms, p99 {Spread.of(p99)} ms; direct p99 {Spread.of(direct)} ms")
    more = {"p50_ms": Spread.of(p50).median, "direct_p99_ms": Spread.of(direct).median}
    report("relay_delay", Spread.of(p99), "ms p99 added", TARGET_MS, batches_per_s=RATE_HZ, **more)
    rates = [(relayed_rate(), direct_rate()) for _ in range(RUNS)]
    note(f"relayed {Spread.of([a for a, _ in rates])}, direct {Spread.of([b for _, b in rates])} batches/s")
    report(
        "relay_rate", Spread.of([ours / theirs for ours, theirs in rates]), "of a direct subscription's rate",
        TARGET_RATIO, rate=True, batches_per_s=Spread.of([ours for ours, _ in rates]).median,
    )  # fmt: skip
    sizes = {blocks: bytes_per_block(blocks) for blocks in (8, 1, 32)}
    report(
        "relay_memory",
        Spread.of([sizes[8]]),
        "bytes a block",
        TARGET_BYTES,
        one_by_one=sizes[1],
        in_runs_of_32=sizes[32],
    )


if __name__ == "__main__":
    main()
