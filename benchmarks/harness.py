"""What every bench shares: spreads, the one result line, the peer's process, synthetic chains of blocks."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from kvevents_service.wire.name_board import BOARD_BYTES, NameBoard

BLOCK_TOKENS = 16
HASH_BYTES = 32
VOCABULARY = 128_000
PEER_SCRIPT = Path(__file__).with_name("peer_vllm.py")
PEER_DEADLINE_S = 300


class Spread(NamedTuple):
    """Median, extremes and count of several runs."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.min:.3g} .. {self.max:.3g}] of {self.runs}"


class Chain(NamedTuple):
    """One request as the engine has it: plain Python lists, one hash per block."""

    request_id: str
    token_ids: list[int]
    block_hashes: list[bytes]


def make_chain(number: int, blocks: int) -> Chain:
    """A prompt like no other: tokens of a real vocabulary's size, random 32-byte hashes."""
    random = Random(number)
    tokens = [random.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]
    return Chain(f"request-{number}", tokens, [random.randbytes(HASH_BYTES) for _ in range(blocks)])


def a_board() -> NameBoard:
    """A name board, as a sidecar has one, but that nobody else sees it."""
    return NameBoard(memoryview(mmap.mmap(-1, BOARD_BYTES)))


def note(text: str) -> None:
    """Chatter, for people."""
    print(f"   {text}", file=sys.stderr, flush=True)


def report(
    bench: str,
    spread: Spread,
    unit: str,
    target: float,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    rate: bool = False,
    **extras: Any,
) -> None:
    """Print the result line. `rate`: more is better; then the ratio is value/peer, else peer/value."""
    value = spread.median
    ratio = None if peer_value is None else (value / peer_value if rate else peer_value / value)
    line = {
        "bench": bench,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "min": spread.min,
        "max": spread.max,
        "runs": spread.runs,
        "target": target,
        "meets": value >= target if rate else value <= target,
        **extras,
    }
    print(json.dumps(_rounded(line)), flush=True)


def _rounded(value: Any) -> Any:
    """Four significant digits: the machine is not better than that."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value


def ask_peer(*arguments: object) -> dict[str, Any] | None:
    """Run peer_vllm.py in the oracle's environment, without our modules; None where ORACLE is not set."""
    oracle = os.environ.get("ORACLE")
    if not oracle:
        return None
    command = [str(Path(oracle) / "bin" / "python"), "-P", str(PEER_SCRIPT), *map(str, arguments)]
    note(f"peer: {' '.join(command[1:])}")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PEER_DEADLINE_S)
    answer: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return answer


class StepCase(NamedTuple):
    """How one step is measured: its size, whether the tier is full, and how often."""

    blocks: int
    evicting: bool
    runs: int

    @property
    def name(self) -> str:
        return f"{self.blocks}_{'evicting' if self.evicting else 'filling'}"

    @property
    def capacity_blocks(self) -> int:
        """Room for everything, or for one step and a quarter."""
        return self.blocks * 5 // 4 if self.evicting else self.blocks * (self.runs + WARM_UP + 1)


WARM_UP = 3
STEP_CASES = tuple(
    StepCase(blocks, evicting, 16384 // blocks + 32) for blocks in (256, 2048) for evicting in (False, True)
)


def ask_peer_steps() -> dict[str, dict[str, list[float]]]:
    """vLLM's cost per block of the same cases, each stage's runs; {} where ORACLE is not set."""
    costs = {}
    for case in STEP_CASES:
        answer = ask_peer("step", case.blocks, int(case.evicting), case.runs)
        if answer is not None:
            costs[case.name] = answer
    return costs


def stage_total(peer: dict[str, list[float]], stages: Sequence[str]) -> float:
    """Median over the runs of the sum of these stages."""
    return statistics.median(map(sum, zip(*(peer[stage] for stage in stages), strict=True)))


def report_steps(
    bench: str, spreads: dict[str, Spread], target: float, stages: Sequence[str], peer: str, **extras: Any
) -> None:
    """The result line of the worst case, us per block, beside the sum of the peer's `stages`."""
    peers = {name: stage_total(costs, stages) for name, costs in ask_peer_steps().items()}
    worst = worst_of(spreads)
    report(
        bench,
        spreads[worst],
        "us/block",
        target,
        peer=f"vLLM 0.33 SimpleCPUOffloadScheduler: {peer}" if peers else None,
        peer_value=peers.get(worst),
        case=worst,
        cases={name: spread.median for name, spread in spreads.items()},
        peer_cases=peers or None,
        **extras,
    )


def worst_of(spreads: dict[str, Spread]) -> str:
    return max(spreads, key=lambda name: spreads[name].median)
