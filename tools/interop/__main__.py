"""`make interop`: real routers, unmodified, subscribed to a running sidecar.

    python tools/interop DIR [--engine DIR] [--large] [--consumer NAME]... [--scenario WORD]...

DIR is where setup.sh put the programs; the engine's, where vLLM for CPU is. Prints one JSON line per consumer and
scenario. Exit code 1 if one is not ok.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import stand_ins
from consumer import Kind
from dynamo import Dynamo
from prefix_index import Ours
from relay_scenarios import RELAY_SCENARIOS, RelayScenario
from relay_stage import EngineHome, RelayStage
from scenarios import LARGE_SCENARIOS, SCENARIOS, Scenario
from stage import Line, Stage
from vllm_router import VllmRouter

from kvevents_service.errors import KvEventsError


def kinds(home: Path) -> list[Kind]:
    return [
        Kind("dynamo 1.6.1", True, "dynamo", partial(Dynamo, home / "dynamo")),
        Kind("vllm-router 0.1.17", True, "vllm-router", partial(VllmRouter, home / "vllm-router")),
        Kind("kvevents PrefixIndex", True, "vllm", Ours),
        *stand_ins.kinds(),
    ]


def play(scenario: Scenario, asked: Sequence[Kind], directory: Path) -> Iterator[Line]:
    """Play it once with all consumers subscribed at the same time."""
    asked = [kind for kind in asked if kind.replays or not scenario.recovery]
    stage = Stage(
        directory, asked, blocks=scenario.blocks, retained=scenario.retained, check_s=scenario.check_s
    )  # fmt: skip
    yield from _played(scenario.name, scenario.play(stage), stage, asked)


def play_relay(scenario: RelayScenario, home: EngineHome, asked: Sequence[Kind], directory: Path) -> Iterator[Line]:
    """The same, behind a relay of a real engine."""
    stage = RelayStage(directory, asked, home)
    yield from _played(scenario.name, scenario.play(stage), stage, asked)


def _played(name: str, found_at: Iterator[dict[str, str]], stage: Stage, asked: Sequence[Kind]) -> Iterator[Line]:
    wrong: dict[str, str] = {}
    points = 0
    try:
        for points, found in enumerate(found_at, 1):
            for who, what in found.items():
                if what:
                    wrong.setdefault(who, f"at point {points}: {what}")
    except (OSError, RuntimeError, KvEventsError) as error:
        wrong |= {kind.name: f"the scenario broke off: {error!r}" for kind in asked if kind.name not in wrong}
    finally:
        stage.close()
    wrong = stage.failed | wrong
    for kind in asked:
        detail = wrong.get(kind.name, f"{len(stage.prompts)} prompts right at {points} points")
        yield Line(kind.name, kind.real, name, kind.name not in wrong, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--consumer", action="append", default=[], help="only those whose name has this in it")
    parser.add_argument("--scenario", action="append", default=[], help="only those whose name has this in it")
    parser.add_argument("--engine", type=Path, help="where a vLLM engine is: venv/bin/python and model")
    parser.add_argument("--large", action="store_true", help="instead: 300,000 blocks and a million, for the real")
    options = parser.parse_args()
    asked = [kind for kind in kinds(options.directory.resolve()) if _chosen(kind.name, options.consumer)]
    if options.large:
        asked = [kind for kind in asked if kind.real]
    all_ok = True
    for scenario in LARGE_SCENARIOS if options.large else SCENARIOS:
        if _chosen(scenario.name, options.scenario):
            all_ok &= report(scenario.name, partial(play, scenario, asked))
    if not options.large:
        all_ok &= relayed(options.engine, asked, options.scenario)
    return 0 if all_ok else 1


def relayed(engine: Path | None, asked: Sequence[Kind], words: Sequence[str]) -> bool:
    """The rows that need a real engine, with the consumers that are real: `engine` is where it was set up."""
    chosen = [scenario for scenario in RELAY_SCENARIOS if _chosen(scenario.name, words)]
    if engine is None:
        if chosen:
            sys.stderr.write(f"interop: {len(chosen)} rows with a real vLLM engine are left out: --engine DIR\n")
        return True
    home = EngineHome(engine / "venv/bin/python", engine / "model")
    real = [kind for kind in asked if kind.real]
    return all([report(scenario.name, partial(play_relay, scenario, home, real)) for scenario in chosen])


def report(name: str, played: Callable[[Path], Iterator[Line]]) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvevents-interop-") as directory:
        lines = list(played(Path(directory)))
    for line in lines:
        sys.stdout.write(json.dumps(line._asdict()) + "\n")
    sys.stdout.flush()
    sys.stderr.write(f"interop: {name}: {time.monotonic() - started:.1f} s\n")
    return all(line.ok for line in lines)


def _chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
