#!/usr/bin/env python3
"""The differential test: request lives through vLLM's own offload scheduler and through ours.

    ORACLE=DIR make oracle                      DIR: a virtual environment as made by setup_oracle.sh
    python tools/oracle.py DIR [--cases N] [--seed S] [--record]

Directed cases, N random ones (default 600; a third of them of one full-attention group) and N/2 that hypothesis
makes. Progress is on stderr, stdout is one JSON line. Exit 1 if a difference is not argued in docs/differences.md;
then a small script that shows it is printed to stderr.
--record writes tests/oracle/recorded/ anew instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from oracle.ask import Oracle
from oracle.cases import directed
from oracle.compare import KINDS, Verdict, compare
from oracle.generated import generate
from oracle.hybrid import hybrid
from oracle.lives import mixed_script, random_script
from oracle.our_side import play
from oracle.recorded import record
from oracle.script import Answer, Script, shrink

PROGRESS_EVERY = 50


def judge(script: Script, answers: list[Answer]) -> Verdict:
    """Both sides of one script. What our side raises is a difference that nothing argues."""
    try:
        return compare(script, answers, play(script, answers))
    except Exception as error:  # noqa: BLE001 - reported with its script
        return Verdict(0, Counter(), [f"ours raised {type(error).__name__}: {error}"])


def ask(oracle: Oracle, script: Script) -> Verdict:
    return judge(script, oracle.answer(script))


def verdicts(oracle: Oracle, scripts: list[Script]) -> Iterator[tuple[Script, Verdict]]:
    for number, script in enumerate(scripts, 1):
        yield script, ask(oracle, script)
        if number % PROGRESS_EVERY == 0 or number == len(scripts):
            sys.stderr.write(f"oracle: {number}/{len(scripts)} cases\n")


def report(oracle: Oracle, script: Script, verdict: Verdict) -> None:
    """The failure, and a small script that shows one."""
    sys.stderr.write(f"oracle: {script['name']}: {verdict.unexplained[0]}\n")
    small = shrink(script, lambda candidate: bool(ask(oracle, candidate).unexplained))
    sys.stderr.write(f"oracle: a small script: {ask(oracle, small).unexplained}\n{json.dumps(small)}\n")


def run(oracle: Oracle, scripts: list[Script]) -> int:
    argued: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    compared, failed = 0, []
    for script, verdict in verdicts(oracle, scripts):
        compared += verdict.compared
        argued.update(verdict.argued)
        if verdict.unexplained:
            failed.append((script, verdict))
    unexplained = sum(len(verdict.unexplained) for _, verdict in failed)
    if failed:
        report(oracle, *failed[0])
    totals = {"cases": len(scripts), "compared_blocks": compared, "argued": argued, "unexplained": unexplained}
    sys.stdout.write(json.dumps(totals) + "\n")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if not (options.oracle / "bin/python").exists():
        parser.error(f"{options.oracle} is no virtual environment: make one with setup_oracle.sh")
    with Oracle(options.oracle) as oracle:
        return record(oracle) if options.record else run(oracle, scripts_of(options.seed, options.cases))


def scripts_of(seed: int, cases: int) -> list[Script]:
    make = (random_script, mixed_script, mixed_script)
    drawn = [make[number % 3](number) for number in range(seed, seed + cases)]
    return [*directed(), *hybrid(), *drawn, *generate(cases // 2, seed)]


if __name__ == "__main__":
    sys.exit(main())
