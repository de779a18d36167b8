"""Bytes per resident block of the scheduler's state at a million resident blocks.

RSS growth of a fresh process from before the tier is made until a million blocks are stored: capacity arrays,
hash index, eviction queue and metadata (hashes and token ids), from decoded frames, in runs of 64 blocks. Extra:
runs of one block, with the same number of blocks. "owned" is the sum of the parts by sys.getsizeof.
Peer: vLLM's offload scheduler with the same number of resident blocks, which keeps no metadata once announced.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from random import Random

from benchmarks.harness import BLOCK_TOKENS, HASH_BYTES, Spread, ask_peer, note, report
from kvevents_service.core.commands import Copy
from kvevents_service.core.pool import BlockPool
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.wire.control import GroupSpec, Offer, Step
from kvevents_service.wire.framing import decode_client, encode_message
from kvevents_service.wire.packing import pack_int32

BLOCKS = 1_000_000
CHAIN_BLOCKS = 512
VOCABULARY = 128_000
RUN_BLOCKS = 64
TARGET_BYTES = 400.0
RUNS = 3


def rss_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def offers(random: Random, run_blocks: int) -> list[Offer]:
    """A chain of CHAIN_BLOCKS blocks, offered in runs."""
    hashes = [random.randbytes(HASH_BYTES) for _ in range(CHAIN_BLOCKS)]
    made = []
    for start in range(0, CHAIN_BLOCKS, run_blocks):
        run = hashes[start : start + run_blocks]
        tokens = pack_int32(random.choices(range(VOCABULARY), k=len(run) * BLOCK_TOKENS))
        parent = hashes[start - 1] if start else None
        made.append(Offer("bench", 0, b"".join(run), tokens, pack_int32(range(len(run))), parent))
    return made


def steps(run_blocks: int) -> Iterator[Step]:
    """Steps as decoded from the wire, BLOCKS blocks in all."""
    random = Random(run_blocks)
    for number in range(-(-BLOCKS // CHAIN_BLOCKS)):
        step = decode_client(bytes(encode_message(Step(number, offers(random, run_blocks)))[4:]))
        assert isinstance(step, Step)
        yield step


def fill(scheduler: OffloadScheduler, run_blocks: int) -> None:
    for step in steps(run_blocks):
        for command in scheduler.step(1, step, 0.0):
            if isinstance(command, Copy):
                scheduler.complete(command.transfer)


def make_scheduler(capacity: int) -> OffloadScheduler:
    group = GroupSpec(0, "full_attention", BLOCK_TOKENS)
    scheduler = OffloadScheduler(TierSpec("CPU", capacity, HASH_BYTES, (group,), BLOCK_TOKENS))
    scheduler.hello(1, CHAIN_BLOCKS)
    return scheduler


def measure(run_blocks: int) -> tuple[float, float]:
    """Bytes per block by RSS and by getsizeof. In a fresh process."""
    fill(make_scheduler(4 * CHAIN_BLOCKS), run_blocks)
    gc.collect()
    before = rss_bytes()
    scheduler = make_scheduler(BLOCKS + CHAIN_BLOCKS)
    fill(scheduler, run_blocks)
    gc.collect()
    resident = len(scheduler.pool)
    assert resident >= BLOCKS
    return (rss_bytes() - before) / resident, owned_bytes(scheduler.pool) / resident


def owned_bytes(pool: BlockPool) -> int:
    """What the pool's containers and everything in them take, each object once."""
    seen: set[int] = set()
    return sum(_size(part, seen) for part in (vars(pool), vars(pool._free), *_slots(pool)))


def _slots(pool: BlockPool) -> list[object]:
    queue = pool._queue
    tables = [table for names in (*pool.index, *pool.inner) for table in names.shards]
    return [*tables, *(getattr(queue, name) for name in queue.__slots__)]


def _size(value: object, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, memoryview):
        return sys.getsizeof(value) + value.nbytes
    inner: list[object] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif hasattr(value, "__struct_fields__"):
        inner = [getattr(value, name) for name in value.__struct_fields__]
    return sys.getsizeof(value) + sum(_size(item, seen) for item in inner)


def fresh(run_blocks: int) -> tuple[float, float]:
    """`measure` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        return processes.apply(measure, (run_blocks,))


def main() -> None:
    results = [fresh(RUN_BLOCKS) for _ in range(RUNS)]
    spread = Spread.of([rss for rss, _ in results])
    note(f"runs of {RUN_BLOCKS}: {spread} bytes/block by RSS, {results[0][1]:.0f} by getsizeof")
    single_rss, single_owned = fresh(1)
    note(f"runs of 1: {single_rss:.0f} bytes/block by RSS, {single_owned:.0f} by getsizeof")
    peer = ask_peer("memory", BLOCKS)
    report(
        "index_memory",
        spread,
        "bytes/block",
        TARGET_BYTES,
        peer="vLLM 0.33 SimpleCPUOffloadScheduler, RSS growth" if peer else None,
        peer_value=peer["bytes_per_block"] if peer else None,
        owned=results[0][1],
        single_block_runs=single_rss,
        single_block_runs_owned=single_owned,
        resident_blocks=BLOCKS,
    )


if __name__ == "__main__":
    main()
