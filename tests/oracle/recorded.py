"""The recorded cases: scripts with vLLM's answers, so that they can be judged without vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from oracle.ask import Oracle
from oracle.cases import directed
from oracle.compare import KINDS, compare
from oracle.hybrid import hybrid
from oracle.lives import mixed_script
from oracle.our_side import play
from oracle.script import Answer, Script, shrink

FOLDER = Path(__file__).with_name("recorded")
DIRECTED = (
    "everything",
    "same tokens, other adapters",
    "the same prompt at once",
    "adapter with a new number",
    "an id used again and ended too early",
    "reset while it loads",
    "a hit is loaded",
    "preempted, then another takes its blocks",
    "reset when idle",
    "the tier is full",
    "a tier of one block",
    "sinks",
    "mla window",
    "wide full",
    "a prompt's tail",
    "all kinds",
    "dcp groups",
    "the tail of a window at the end",
    "a window's block is used again",
    "a hit in the middle of a chunk",
    "fewer tokens than a state hit",
    "lazy window",
    "four ranks",
)
MAX_SEEDS = 2000


def record(oracle: Oracle) -> int:
    """Ask vLLM again and write every file anew, with a small script for each kind that no chosen one shows."""
    for path in FOLDER.glob("*.json"):
        path.unlink()
    scripts = [script for script in (*directed(), *hybrid()) if script["name"] in DIRECTED]
    missing = set(KINDS).difference(*(argued(oracle, script) for script in scripts))
    scripts += showing(oracle, missing)
    for script in scripts:
        write(script, oracle.answer(script))
    return 0


def write(script: Script, answers: list[Answer]) -> None:
    plain = "".join(letter for letter in script["name"] if letter.isalnum() or letter == " ")
    path = FOLDER / f"{plain.replace(' ', '-')}.json"
    path.write_text(json.dumps({"script": script, "vllm": answers}, separators=(",", ":")) + "\n")
    sys.stderr.write(f"oracle: {path.name} {path.stat().st_size} bytes\n")


def argued(oracle: Oracle, script: Script) -> set[str]:
    """The kinds of difference that a script shows, if it shows no other."""
    answers = oracle.answer(script)
    verdict = compare(script, answers, play(script, answers))
    return set() if verdict.unexplained else set(verdict.argued)


def showing(oracle: Oracle, missing: set[str]) -> Iterator[Script]:
    """For each kind of difference the smallest part of a random script that still shows it."""
    for seed in range(MAX_SEEDS if missing else 0):
        script = mixed_script(seed)
        for kind in missing & argued(oracle, script):
            small = shrink(script, lambda part, kind=kind: kind in argued(oracle, part))
            missing -= argued(oracle, small)
            yield {**small, "name": kind.replace("_", " ")}
            sys.stderr.write(f"oracle: seed {seed} shows {kind}, still to be shown: {sorted(missing)}\n")
        if not missing:
            return


def recorded() -> Iterator[tuple[Script, list[Answer]]]:
    """Every recorded script with vLLM's answers."""
    for path in sorted(FOLDER.glob("*.json")):
        case = json.loads(path.read_text())
        yield case["script"], case["vllm"]
