"""Engine side: us per 16-token block, on the engine's thread, of one step and its completion with events on.

Timed: cutting the engine's own lists, packing the offer, `step` to a running sidecar process, touching the blocks;
later `poll`, and giving the blocks back. Not timed: the wait for the copy in between, the hashing of tokens.
Peer: vLLM's in-process scheduler doing the same work: prepare, complete, take_events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import (
    STEP_CASES,
    WARM_UP,
    Chain,
    Spread,
    StepCase,
    make_chain,
    note,
    report_steps,
    worst_of,
)
from benchmarks.served import engine, observer, sidecar, wait_idle
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.offers import OfferBook, make_offer

TARGET_US = 0.8
PEER_STAGES = ("prepare", "complete", "take_events")


class Block:
    """A GPU block as vLLM's pool keeps it."""

    __slots__ = ("block_hash", "is_null", "ref_cnt")

    def __init__(self) -> None:
        self.ref_cnt = 0
        self.is_null = False
        self.block_hash: bytes | None = None


class GpuPool:
    """Reference counts and the free list, with the loops of vLLM's `touch` and `free_blocks`."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block() for _ in range(blocks)]
        self.free: dict[int, None] = dict.fromkeys(range(blocks))

    def touch(self, block_ids: list[int]) -> None:
        blocks = self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                del self.free[block_id]
            block.ref_cnt += 1

    def release(self, block_ids: list[int]) -> None:
        blocks, unused = self.blocks, []
        for block_id in block_ids:
            block = blocks[block_id]
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unused.append(block_id)
        self.free.update(dict.fromkeys(unused))


class StepTimes:
    """Seconds of one step, part by part."""

    def __init__(self) -> None:
        self.offer = self.step = self.hold = self.end = self.cpu = 0.0

    @property
    def total(self) -> float:
        return self.offer + self.step + self.hold + self.end


def submit(client: OffloadClient, book: OfferBook, chain: Chain, block_table: list[int], times: StepTimes) -> int:
    """What a connector does in build_connector_meta."""
    blocks, clock = len(chain.block_hashes), time.perf_counter
    started = clock()
    offer = make_offer(
        chain.request_id, chain.block_hashes[:blocks], chain.token_ids[: blocks * 16], block_table[:blocks]
    )
    packed = clock()
    step_id = client.step([offer])
    sent = clock()
    book.hold(step_id, block_table[:blocks])
    held = clock()
    assert step_id is not None, client.last_error
    times.offer, times.step, times.hold = packed - started, sent - packed, held - sent
    return step_id


def settle(client: OffloadClient, book: OfferBook, step_id: int, blocks: int, times: StepTimes) -> None:
    """What a connector does in update_connector_output."""
    while book.held_blocks:
        started = time.perf_counter()
        done = client.poll().steps
        book.settle(done)
        times.end += time.perf_counter() - started
    assert [(end.step_id, end.stored) for end in done] == [(step_id, blocks)], done


@contextmanager
def cpu_counted(times: StepTimes) -> Iterator[None]:
    """Add the thread's own CPU time: the same work without the other processes that want this core."""
    started = time.thread_time()
    yield
    times.cpu += time.thread_time() - started


def measure(case: StepCase) -> list[StepTimes]:
    """Every run's times of one case."""
    runs = []
    with sidecar(case.capacity_blocks) as path, engine(path, 2 * case.blocks) as client, observer(path) as watcher:
        pool = GpuPool(2 * case.blocks)
        book = OfferBook(pool.touch, pool.release, case.blocks)
        for number in range(case.runs + WARM_UP):
            chain, times = make_chain(number, case.blocks), StepTimes()
            block_table = list(range(number % 7, number % 7 + case.blocks))
            pool.touch(block_table)  # the request's own reference
            with cpu_counted(times):
                step_id = submit(client, book, chain, block_table, times)
            wait_idle(watcher)
            with cpu_counted(times):
                settle(client, book, step_id, case.blocks, times)
            pool.release(block_table)
            runs.append(times)
    return runs[WARM_UP:]


def parts(runs: list[StepTimes], blocks: int) -> dict[str, float]:
    """Median us per block of each part."""
    names = ("offer", "step", "hold", "end", "cpu")
    return {name: Spread.of([getattr(run, name) / blocks * 1e6 for run in runs]).median for name in names}


def main() -> None:
    spreads, shares = {}, {}
    for case in STEP_CASES:
        runs = measure(case)
        spreads[case.name] = Spread.of([run.total / case.blocks * 1e6 for run in runs])
        shares[case.name] = parts(runs, case.blocks)
        note(f"{case.name}: {spreads[case.name]} us/block")
    peer = "prepare + complete + take_events"
    report_steps(
        "engine_step",
        spreads,
        TARGET_US,
        PEER_STAGES,
        peer,
        parts=shares[worst_of(spreads)],
        cpu_cases={name: part["cpu"] for name, part in shares.items()},
    )


if __name__ == "__main__":
    main()
