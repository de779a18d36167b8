"""Blocks per second to a subscriber process: batches of one event with 64 blocks of 16 tokens.

One process runs the publisher coroutine with journal and PUB socket, another receives and counts without decoding.
Nothing may be lost: the producer paces itself by the journal, and every gap in the numbers fails the bench.
Peer: vLLM's ZmqEventPublisher with 64 events of one block per batch, which is what its scheduler emits.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import uvloop
import zmq

from benchmarks.harness import BLOCK_TOKENS, HASH_BYTES, Spread, ask_peer, make_chain, note, report
from kvevents_service.cli.tuning import GC_THRESHOLD
from kvevents_service.core.journal import Journal, PendingBatch
from kvevents_service.core.metadata import BlockStoreMeta, snapshot
from kvevents_service.engine.offers import make_offer
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.wire.control import GroupSpec

BLOCKS, BATCHES, RUNS = 64, 15_000, 5
PEER_BATCHES = 1500
DISTINCT = 256
PENDING_BATCHES, REFILL_BATCHES = 1024, 512
TARGET_BLOCKS_PER_S, TARGET_BYTES = 1_000_000.0, 95.0
DEADLINE_MS = 20_000


def snapshots() -> list[BlockStoreMeta]:
    """Runs as they ride on a transfer."""
    group = GroupSpec(0, "full_attention", BLOCK_TOKENS)
    metas = []
    for number in range(DISTINCT):
        chain = make_chain(number, BLOCKS + 1)
        hashes, tokens = chain.block_hashes[1:], chain.token_ids[BLOCK_TOKENS:]
        offer = make_offer(chain.request_id, hashes, tokens, range(BLOCKS), parent=chain.block_hashes[0])
        metas.append(snapshot(offer, group, "CPU", HASH_BYTES))
    return metas


def subscribe(endpoint: str, batches: int, answers: Connection) -> None:
    """Count `batches` batches; answer with when the last one came, gaps and bytes."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.set_hwm(0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    expected = gaps = size = received = 0
    while received < batches and socket.poll(DEADLINE_MS):
        _, seq_frame, payload = socket.recv_multipart()
        seq = int.from_bytes(seq_frame, "big")
        gaps += seq - expected
        expected = seq + 1
        received += 1
        size += len(payload)
    answers.send((time.perf_counter(), batches - received + gaps, size))


@contextmanager
def subscribed(
    batches: int, run: Callable[..., None] = subscribe, *more: object
) -> Iterator[tuple[zmq.Socket[bytes], Connection]]:
    """A bound publish socket whose subscriber process is there (an XPUB tells when), and its answers."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder, zmq.Context() as context:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        with context.socket(zmq.XPUB) as socket:
            socket.set(zmq.SNDHWM, batches + 1)
            socket.bind(endpoint := f"ipc://{folder}/pub")
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(endpoint, batches, theirs, *more)
            )
            process.start()
            assert socket.poll(DEADLINE_MS), "no subscriber"
            socket.recv()
            yield socket, ours
            process.join()


class PacedJournal(Journal):
    """A journal that says when it has been drained below its bound and when it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.room = asyncio.Event()
        self.empty = asyncio.Event()

    def take_pending(self) -> PendingBatch | None:
        batch = super().take_pending()
        if batch is None or batch.seq % REFILL_BATCHES == 0:
            self.room.set()
        if batch is None:
            self.empty.set()
        return batch


async def produce(publisher: Publisher, journal: PacedJournal, metas: list[BlockStoreMeta]) -> float:
    """Publish all batches while the coroutine sends; returns when the first one was published."""
    running = asyncio.create_task(publisher.run())
    started = time.perf_counter()
    for number in range(BATCHES):
        if number % REFILL_BATCHES == 0 and number >= PENDING_BATCHES:
            journal.room.clear()
            await journal.room.wait()
        publisher.publish((metas[number % DISTINCT],))
    journal.empty.clear()
    await journal.empty.wait()
    running.cancel()
    assert publisher.batches_sent == BATCHES, publisher
    return started


def run_once(metas: list[BlockStoreMeta]) -> tuple[float, float]:
    """Blocks per second and bytes per block of one run."""
    with subscribed(BATCHES) as (socket, answers):
        journal = PacedJournal()
        publisher = Publisher(journal, [Output(socket)], numbers=None, wall_clock=time.time)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            started = runner.run(produce(publisher, journal, metas))
        assert answers.poll(DEADLINE_MS / 1000), "no answer"
        ended, lost, size = answers.recv()
    assert not lost, f"{lost} batches lost"
    return BATCHES * BLOCKS / (ended - started), size / (BATCHES * BLOCKS)


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    metas, results, peers = snapshots(), [], []
    for _ in range(RUNS):  # in turns, so that both meet the same neighbours
        results.append(run_once(metas))
        peers.append(ask_peer("publish", PEER_BATCHES, BLOCKS, 1))
    rates = [rate for peer in peers if peer for rate in peer["blocks_per_s"]]
    spread, peer_spread = Spread.of([rate for rate, _ in results]), Spread.of(rates) if rates else None
    size, peer_size = results[0][1], peers[0]["bytes_per_block"] if peers[0] else None
    note(f"{spread} blocks/s, {size:.1f} bytes a block; peer {peer_spread}, {peer_size}")
    report(
        "publish",
        spread,
        "blocks/s",
        TARGET_BLOCKS_PER_S,
        rate=True,
        peer="vLLM 0.33 ZmqEventPublisher, 64 single-block events per batch" if rates else None,
        peer_value=peer_spread.median if peer_spread else None,
        bytes_per_block=size,
        target_bytes=TARGET_BYTES,
        meets_bytes=size <= TARGET_BYTES,
        peer_bytes_per_block=peer_size,
        peer_min_max=[peer_spread.min, peer_spread.max] if peer_spread else None,
        lost=0,
    )


if __name__ == "__main__":
    main()
