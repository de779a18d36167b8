"""`make interop`: real routers, unmodified, subscribed to a running sidecar.

    python tools/interop DIR [--large] [--consumer NAME]... [--scenario WORD]...

DIR is where setup.sh put the programs. Prints one JSON line per consumer and scenario.
Exit code 1 if one is not ok.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import stand_ins
from consumer import Kind
from dynamo import Dynamo
from prefix_index import Ours
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
    wrong: dict[str, str] = {}
    points = 0
    try:
        for points, found in enumerate(scenario.play(stage), 1):
            for name, what in found.items():
                if what:
                    wrong.setdefault(name, f"at point {points}: {what}")
    except (OSError, RuntimeError, KvEventsError) as error:
        wrong |= {kind.name: f"the scenario broke off: {error!r}" for kind in asked if kind.name not in wrong}
    finally:
        stage.close()
    wrong = stage.failed | wrong
    for kind in asked:
        detail = wrong.get(kind.name, f"{len(stage.prompts)} prompts right at {points} points")
        yield Line(kind.name, kind.real, scenario.name, kind.name not in wrong, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--consumer", action="append", default=[], help="only those whose name has this in it")
    parser.add_argument("--scenario", action="append", default=[], help="only those whose name has this in it")
    parser.add_argument("--large", action="store_true", help="instead: 300,000 blocks and a million, for the real")
    options = parser.parse_args()
    asked = [kind for kind in kinds(options.directory.resolve()) if _chosen(kind.name, options.consumer)]
    if options.large:
        asked = [kind for kind in asked if kind.real]
    all_ok = True
    for scenario in LARGE_SCENARIOS if options.large else SCENARIOS:
        if _chosen(scenario.name, options.scenario):
            all_ok &= report(scenario, asked)
    return 0 if all_ok else 1


def report(scenario: Scenario, asked: Sequence[Kind]) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvevents-interop-") as directory:
        lines = list(play(scenario, asked, Path(directory)))
    for line in lines:
        sys.stdout.write(json.dumps(line._asdict()) + "\n")
    sys.stdout.flush()
    sys.stderr.write(f"interop: {scenario.name}: {time.monotonic() - started:.1f} s\n")
    return all(line.ok for line in lines)


def _chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
