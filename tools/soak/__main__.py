"""`python -m tools.soak`: progress and a verdict on stderr, one JSON line on stdout, 0 if all was as it must be."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tools.soak.run import Plan, Soak

DEFAULT = Plan()
CLEAR = "\r\x1b[K"
QUIET_EVERY_S = 30.0
"""Progress that nobody looks at."""


class Progress:
    """One line, written over again and again on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._due = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._live:
            click.echo(f"{CLEAR}soak: {text}", err=True, nl=False)
        elif now >= self._due:
            self._due = now + QUIET_EVERY_S
            click.echo(f"soak: {text}", err=True)

    def end(self, text: str) -> None:
        """In a line of its own."""
        click.echo(f"{CLEAR if self._live else ''}soak: {text}", err=True)


def verdict(report: dict[str, Any]) -> str:
    """One line."""
    lag = f"lag p99 <= {report['lag_p99_ms']:g} ms"
    lag += "" if report["lag_judged"] else " (not judged: the machine is too busy)"
    figures = (
        f"{report['blocks_offered_per_s']:,} of {report['blocks_per_s_asked']:,.0f} blocks/s for "
        f"{report['seconds']:.0f} s, {report['compared']} folds, {report['subscriber_holes']} holes, {lag}"
    )
    return f"OK: {figures}" if report["ok"] else f"FAILED, {len(report['faults'])} faults: {figures}"


@click.command()
@click.option("--seconds", default=DEFAULT.seconds, show_default=True, help="Of traffic.")
@click.option("--rate", default=DEFAULT.blocks_per_s, show_default=True, help="Blocks a second to offer.")
@click.option("--engines", default=DEFAULT.engines, show_default=True)
@click.option("--stay", default=DEFAULT.stay, show_default=True, help="Readers that stay.")
@click.option("--churn", default=DEFAULT.churn, show_default=True, help="Readers that come and go.")
@click.option("--seed", default=DEFAULT.seed, show_default=True)
def main(seconds: float, rate: float, engines: int, stay: int, churn: int, seed: int) -> None:
    """Run a sidecar under traffic and check at the end that nothing was lost, leaked or wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    plan, progress = Plan(seconds, rate, engines, stay, churn, seed=seed), Progress()
    with tempfile.TemporaryDirectory(prefix="kvevents-soak-") as directory:
        report = Soak(plan, Path(directory), progress).run()
    for fault in report["faults"]:
        progress.end(f"FAULT {fault}")
    progress.end(verdict(report))
    click.echo(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
