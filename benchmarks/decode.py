"""CPU us per block that a subscriber's process spends on decoding batches of 64 blocks of 16 tokens.

Ours is `decode_batch` on one event of 64 hashes, as our publisher sends it, for a router that follows hashes: the
tokens are stepped over, their ints are never made. `with_tokens` is for one that reads every token
(`read_tokens=True`), `tokens_later` for one that did not say so and reads them all the same. Peer: vLLM's event
types on 64 events of one hash, as its scheduler emits them; they make all ints. Extra: our decoder on that layout,
and the whole of a `Subscriber` in a process of its own (ZeroMQ, order, decoding, `track` on and off), fed as fast
as it takes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

from benchmarks.harness import Spread, ask_peer, note, report
from benchmarks.publish import BLOCKS, DEADLINE_MS, snapshots, subscribed
from kvevents_service.cli.tuning import GC_THRESHOLD
from kvevents_service.core.encoding import Encoding
from kvevents_service.subscriber import Batch, Subscriber
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import BlockStored
from kvevents_service.wire.frames import live_frames

TURNS, RUNS, ROUNDS, SUBSCRIBER_RUNS, SUBSCRIBER_BATCHES = 3, 5, 2, 3, 4000
RECORDED_PEER_US = 0.831
"""vLLM 0.33 on a machine of two cores; half of it is the target where no peer is measured."""


def payloads(*, single: bool = False) -> list[bytes]:
    """Batches as they are published, or the same with an event for each block."""
    runs = [[meta.part(place, place + 1) for place in range(BLOCKS)] if single else [meta] for meta in snapshots()]
    return [Encoding().encode(run, time.time()) for run in runs]


def read_later(payload: bytes) -> None:
    """Decode, then look at every token."""
    for event in decode_batch(payload).batch.events:
        assert isinstance(event, BlockStored)
        event.token_ids[-1]


WAYS: dict[str, Callable[[bytes], object]] = {
    "value": decode_batch,
    "with_tokens": partial(decode_batch, read_tokens=True),
    "tokens_later": read_later,
}


def decoding_us(batches: list[bytes], decode: Callable[[bytes], object] = decode_batch) -> float:
    """CPU us per block, of all batches several times over."""
    started = time.thread_time()
    for _ in range(ROUNDS):
        for payload in batches:
            decode(payload)
    return (time.thread_time() - started) / (ROUNDS * len(batches) * BLOCKS) * 1e6


def subscribe(endpoint: str, batches: int, answers: Connection, track: bool) -> None:
    gc.set_threshold(GC_THRESHOLD)
    answers.send(asyncio.run(_consumed(endpoint, batches, track)))


async def _consumed(endpoint: str, batches: int, track: bool) -> float:
    """CPU seconds of this process from the first batch to the last; its ZeroMQ thread's share included."""
    expected, started = 0, 0.0
    async with asyncio.timeout(DEADLINE_MS / 1000), Subscriber(endpoint, track=track) as subscriber:
        async for item in subscriber:
            assert isinstance(item, Batch), item
            assert item.seq == expected, item
            started = started or time.process_time()
            expected += 1
            if expected == batches:
                return time.process_time() - started
    raise AssertionError("closed")


def subscriber_us(batches: list[bytes], *, track: bool) -> float:
    """CPU us per block of a process that iterates over a Subscriber."""
    with subscribed(SUBSCRIBER_BATCHES, subscribe, track) as (socket, answers):
        for seq in range(SUBSCRIBER_BATCHES):
            socket.send_multipart(live_frames(b"", seq, batches[seq % len(batches)]))
        assert answers.poll(DEADLINE_MS / 1000), "no answer"
        return float(answers.recv()) / (SUBSCRIBER_BATCHES * BLOCKS) * 1e6


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    ours, single = payloads(), payloads(single=True)
    decoding_us(ours)
    results: dict[str, list[float]] = {name: [] for name in WAYS}
    singles, peers = [], []
    for _ in range(TURNS):  # so that both meet the same neighbours
        for _ in range(RUNS):
            for name, decode in WAYS.items():
                results[name].append(decoding_us(ours, decode))
        singles += [decoding_us(single) for _ in range(RUNS)]
        peers.append(ask_peer("decode", len(ours), BLOCKS, RUNS))
    costs = [cost for peer in peers if peer for cost in peer["us_per_block"]]
    spread, peer_spread = Spread.of(results.pop("value")), Spread.of(costs) if costs else None
    whole = [median(subscriber_us(ours, track=track) for _ in range(SUBSCRIBER_RUNS)) for track in (False, True)]
    target = (peer_spread.median if peer_spread else RECORDED_PEER_US) / 2
    reading = {name: median(costs) for name, costs in results.items()}
    note(
        f"decode {spread} us a block, peer {peer_spread}; whole subscriber {whole[0]:.2f}, tracking {whole[1]:.2f}"
    )
    report(
        "decode",
        spread,
        "us/block",
        target,
        peer="vLLM 0.33 KVEventBatch decoder, 64 single-block events per batch" if costs else None,
        peer_value=peer_spread.median if peer_spread else None,
        peer_min_max=[peer_spread.min, peer_spread.max] if peer_spread else None,
        **reading,
        single_block_events=median(singles),
        subscriber=whole[0],
        subscriber_tracking=whole[1],
    )


if __name__ == "__main__":
    main()
