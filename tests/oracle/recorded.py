"""The recorded cases: scripts with vLLM's answers, so that they can be judged without vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from oracle.ask import Oracle
from oracle.cases import directed, random_script
from oracle.script import Answer, Script

FOLDER = Path(__file__).with_name("recorded")
DIRECTED = (
    "everything",
    "images across blocks",
    "same tokens, other adapters",
    "the same prompt at once",
    "copies end in reverse",
    "adapter with a new number",
    "an id used again and ended too early",
    "reset while it loads",
    "a hit is loaded",
    "fewer tokens are accepted",
    "preempted, then another takes its blocks",
    "reset while a store is pending",
    "reset with running requests",
    "the tier is full",
)
SEEDS = (1, 2, 3)


def record(oracle: Oracle) -> int:
    """Ask vLLM again and write every file anew."""
    chosen = [script for script in directed() if script["name"] in DIRECTED]
    scripts = [*chosen, *map(random_script, SEEDS)]
    for script in scripts:
        answers = oracle.answer(script)
        path = FOLDER / f"{script['name'].replace(',', '').replace(' ', '-')}.json"
        path.write_text(json.dumps({"script": script, "vllm": answers}, separators=(",", ":")) + "\n")
        sys.stderr.write(f"oracle: {path.name} {path.stat().st_size} bytes\n")
    return 0


def recorded() -> Iterator[tuple[Script, list[Answer]]]:
    """Every recorded script with vLLM's answers."""
    for path in sorted(FOLDER.glob("*.json")):
        case = json.loads(path.read_text())
        yield case["script"], case["vllm"]
