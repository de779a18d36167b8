"""What events cost: CPU us per 16-token block with them minus without, on the engine's thread and in the sidecar.

Engine: making a step's offers of the engine's own lists, encoding them and writing them to a socket that another
process reads. With: token ids, parent, and in the `keyed` case LoRA and extra keys. Without: hashes and block ids,
which no sidecar accepts (it needs the tokens to describe the blocks), so the other end only answers.

Sidecar: decoding a step, the scheduler's step, the end of an instant copy, and publishing: journal, announce,
encode, PUB socket, until a subscriber process has it all; of the whole process, ZeroMQ's thread too. Without: the
frame has no metadata, and a publisher only counts; the scheduler still checks and keeps the tokens it was given.

Steps of 256 or 2,048 blocks of one request; beside the target also (`decode`) of one block each of 256 requests.
Each round measures without, with, and without again, in turns: `noise` is what two times without differ by.
Peer: vLLM's SimpleCPUOffloadScheduler with enable_kv_cache_events on and off, in turns in one process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.events_cases import Case, Costs
from benchmarks.events_engine import engine_costs
from benchmarks.events_sidecar import sidecar_costs
from benchmarks.harness import Spread, ask_peer, note, report, stage_total
from kvevents_service.cli.tuning import GC_THRESHOLD

TARGET_ENGINE_US, TARGET_SIDECAR_US = 0.3, 2.0
PEER_STAGES = ("prepare", "complete", "take_events")
PEER_OF = {"256_keyed": "256_filling"}
"""vLLM is measured without adapters: the case to compare with."""
ENGINE_CASES = (
    Case("256_filling", 1, 256),
    Case("2048_filling", 1, 2048),
    Case("256_keyed", 1, 256, keyed=True),
    Case("256_decode", 256, 1),
)
SIDECAR_CASES = (
    Case("256_filling", 1, 256),
    Case("256_evicting", 1, 256, evicting=True),
    Case("2048_filling", 1, 2048),
    Case("2048_evicting", 1, 2048, evicting=True),
    Case("256_keyed", 1, 256, keyed=True),
    Case("256_decode", 256, 1),
)


class PeerCosts(NamedTuple):
    """us per block that vLLM's events add: on the engine's thread, and there with the encoding of its publisher."""

    engine: float
    whole: float


def peer_costs(case: Case) -> PeerCosts | None:
    """None where ORACLE is not set."""
    runs = 16384 // case.step_blocks + 32
    answer = ask_peer("events", case.blocks, int(case.evicting), runs, case.offers)
    if answer is None:
        return None
    on, off = (stage_total(answer[name], PEER_STAGES) for name in ("on", "off"))
    return PeerCosts(on - off, on - off + stage_total(answer["on"], ("encode",)))


def costs(case: Case, side: str, measure: Callable[[Case], Costs]) -> Costs:
    """Measured, and said."""
    found = measure(case)
    note(
        f"{side} {case.name}: +{found.added} us/block, at least {found.least:.3g};"
        f" without {found.without:.3g}, noise {found.noise:.2g}"
    )
    return found


def summary(engine: Costs, sidecar: Costs, peer: PeerCosts | None) -> str:
    """One line for people, of the usual case."""
    ours, elsewhere = engine.added.median, sidecar.added.median
    line = f"events add {ours:.2f} us a block to the engine and {elsewhere:.2f} to the sidecar"
    if peer is None:
        return line
    return (
        f"{line}; vLLM's add {peer.engine:.1f} to the engine: {peer.engine / ours:.0f} times as much there,"
        f" {peer.whole / (ours + elsewhere):.0f} times with what is done off the engine's thread"
    )


def worst(found: dict[Case, Costs]) -> tuple[str, Spread]:
    """The dearest of the judged cases."""
    case = max((case for case in found if case.judged), key=lambda case: found[case].added.median)
    return case.name, found[case].added


def by_name(found: dict[Case, Costs], field: str) -> dict[str, float]:
    return {case.name: getattr(cost, field) for case, cost in found.items()}


def side_report(found: dict[Case, Costs]) -> dict[str, dict[str, float]]:
    """Every case of one side."""
    added = {case.name: cost.added.median for case, cost in found.items()}
    return {"added": added, **{field: by_name(found, field) for field in ("least", "without", "noise")}}


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    engine = {case: costs(case, "engine", engine_costs) for case in ENGINE_CASES}
    sidecar, peers = {}, {}
    for case in SIDECAR_CASES:  # ours and the peer's in turns, so that both meet the same neighbours
        sidecar[case] = costs(case, "sidecar", sidecar_costs)
        if not case.keyed and (found := peer_costs(case)):
            peers[case.name] = found
    note(summary(engine[ENGINE_CASES[0]], sidecar[SIDECAR_CASES[0]], peers.get(SIDECAR_CASES[0].name)))
    (case_name, spread), (sidecar_case, sidecar_spread) = worst(engine), worst(sidecar)
    report(
        "events_cost",
        spread,
        "us/block added on the engine's thread",
        TARGET_ENGINE_US,
        peer="vLLM 0.33 SimpleCPUOffloadScheduler, events on minus off" if peers else None,
        peer_value=peers[PEER_OF.get(case_name, case_name)].engine if peers else None,
        case=case_name,
        sidecar_value=sidecar_spread.median,
        sidecar_case=sidecar_case,
        target_sidecar=TARGET_SIDECAR_US,
        meets_sidecar=sidecar_spread.median <= TARGET_SIDECAR_US,
        engine=side_report(engine),
        sidecar=side_report(sidecar),
        peer_cases={name: peer.engine for name, peer in peers.items()} or None,
        peer_cases_with_encode={name: peer.whole for name, peer in peers.items()} or None,
    )


if __name__ == "__main__":
    main()
