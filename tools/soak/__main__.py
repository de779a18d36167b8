"""`python -m tools.soak`: progress on stderr, one JSON line on stdout, 0 if all was as it must be."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path

import click

from tools.soak.run import Plan, Soak

DEFAULT = Plan()


def say(text: str) -> None:
    click.echo(f"soak: {text}", err=True)


@click.command()
@click.option("--seconds", default=DEFAULT.seconds, show_default=True, help="Of traffic.")
@click.option("--engines", default=DEFAULT.engines, show_default=True)
@click.option("--stay", default=DEFAULT.stay, show_default=True, help="Readers that stay.")
@click.option("--churn", default=DEFAULT.churn, show_default=True, help="Readers that come and go.")
@click.option("--seed", default=DEFAULT.seed, show_default=True)
def main(seconds: float, engines: int, stay: int, churn: int, seed: int) -> None:
    """Run a sidecar under traffic and check at the end that nothing was lost, leaked or wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    plan = Plan(seconds, engines, stay, churn, seed=seed)
    with tempfile.TemporaryDirectory(prefix="kvevents-soak-") as directory:
        report = Soak(plan, Path(directory), say).run()
    for fault in report["faults"]:
        say(f"FAULT {fault}")
    click.echo(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
