"""Round trip, in us, of `lookup` of an 8k-token prefix (512 hashes) against a running sidecar process.

Every block is resident, so a hit is granted, pinned and leased; its release is outside the timing. "spaced" is
the same with 1 ms between calls, so that the sidecar sleeps; a miss asks for a chain it has never seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

from benchmarks.harness import HASH_BYTES, Chain, Spread, make_chain, note, report
from benchmarks.served import engine, observer, sidecar, wait_idle
from kvevents_service.engine.client import OffloadClient, PrefixHit
from kvevents_service.engine.offers import make_offer

BLOCKS = 512
CALLS, RUNS, SPACED_CALLS = 2000, 5, 1000
WARM_UP_CALLS = 200
SPACE_S = 0.001
ABSENT = bytes(HASH_BYTES)
TARGET_P50_US, TARGET_P99_US = 60.0, 250.0
LMCACHE_LOOKUP_8K_US = 1381.0
"""Recorded on a machine of two cores (LMCache 0.5.6 multiprocess server over ipc); not measured here."""


def store(client: OffloadClient, watcher: OffloadClient, chain: Chain) -> None:
    """Make the chain resident."""
    step_id = client.step([make_offer(chain.request_id, chain.block_hashes, chain.token_ids, range(BLOCKS))])
    wait_idle(watcher)
    done = client.poll(1.0).steps
    assert [(end.step_id, end.stored) for end in done] == [(step_id, BLOCKS)], done


def timed_calls(client: OffloadClient, packed: bytes, expected: int, calls: int, space_s: float) -> list[float]:
    """Microseconds of each call. What it granted is released after the clock has stopped, and a small lookup sees
    to it that the sidecar is done with the release and waits again.
    """
    times, clock = [], time.perf_counter
    for _ in range(calls):
        if space_s:
            time.sleep(space_s)
        started = clock()
        hit: PrefixHit = client.lookup("bench", packed)
        times.append((clock() - started) * 1e6)
        assert hit.blocks == expected, (hit, client.last_error)
        client.release(hit)
        client.lookup("fence", ABSENT)
    return times


def percentile(times: list[float], percent: int) -> float:
    return quantiles(times, n=100)[percent - 1]


def measure(call: Callable[[int, float], list[float]]) -> tuple[Spread, list[float], float]:
    """Spread of the runs' medians, every time, and the median of spaced calls."""
    call(WARM_UP_CALLS, 0.0)
    runs = [call(CALLS, 0.0) for _ in range(RUNS)]
    medians = Spread.of([percentile(run, 50) for run in runs])
    return medians, [time_us for run in runs for time_us in run], percentile(call(SPACED_CALLS, SPACE_S), 50)


def main() -> None:
    chain, other = make_chain(1, BLOCKS), make_chain(2, BLOCKS)
    resident, absent = b"".join(chain.block_hashes), b"".join(other.block_hashes)
    with sidecar(4 * BLOCKS) as path, engine(path, BLOCKS) as client, observer(path) as watcher:
        store(client, watcher, chain)
        hit, times, spaced = measure(lambda calls, space: timed_calls(client, resident, BLOCKS, calls, space))
        miss, misses, miss_spaced = measure(lambda calls, space: timed_calls(client, absent, 0, calls, space))
    p99 = percentile(times, 99)
    note(f"hit p50 {hit} us, p99 {p99:.0f}; spaced {spaced:.0f}; miss p50 {miss}, spaced {miss_spaced:.0f}")
    report(
        "lookup",
        hit,
        "us p50",
        TARGET_P50_US,
        p99=p99,
        slowest=max(times),
        target_p99=TARGET_P99_US,
        meets_p99=p99 <= TARGET_P99_US,
        calls=len(times),
        spaced_p50=spaced,
        miss_p50=miss.median,
        miss_p99=percentile(misses, 99),
        miss_spaced_p50=miss_spaced,
        recorded_peer={"LMCache 0.5.6 lookup of 8k tokens, us p50": LMCACHE_LOOKUP_8K_US},
    )


if __name__ == "__main__":
    main()
