"""`python -m tools.fuzz`: progress on stderr, one JSON line on stdout, 0 if all was as it must be."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

import click

from tools.fuzz.run import Fuzz, Plan

DEFAULT = Plan()


def say(text: str) -> None:
    click.echo(f"fuzz: {text}", err=True)


@click.command()
@click.option("--inputs", default=DEFAULT.inputs, show_default=True)
@click.option("--seed", default=DEFAULT.seed, show_default=True)
@click.option("--seconds", default=DEFAULT.seconds, show_default=True, help="It ends by then, with fewer inputs.")
def main(inputs: int, seed: int, seconds: float) -> None:
    """Give a sidecar bad input on every socket, beside an engine and a reader that must stay right."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="kvevents-fuzz-") as directory:
        report = asyncio.run(Fuzz(Plan(inputs, seed, seconds), Path(directory), say).run())
    for fault in report["faults"]:
        say(f"FAULT {fault[:2000]}")
    click.echo(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
