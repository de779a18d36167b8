"""`kvevents doctor`: what could keep a sidecar from working here, each with its remedy.

0    no problem; there may be warnings
1    a problem
2    bad usage
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvevents_service.cli.doctor_machine import Machine, check_machine
from kvevents_service.cli.doctor_peers import check_ports, check_sidecars, check_socket, check_streams, listen
from kvevents_service.cli.doctor_secrets import check_secrets
from kvevents_service.cli.findings import OK, PROBLEM, WARNING, Finding, ok, problem
from kvevents_service.cli.sidecar_state import DEFAULT_URL, State, state_of
from kvevents_service.cli.terminal import chat, discard_stdout, wants_color, write
from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError, SidecarGone
from kvevents_service.settings import CONFIG_VARIABLE, load_settings
from kvevents_service.version import VERSION

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2
NEAR_S = 0.5
COLORS = {OK: "32", WARNING: "33", PROBLEM: "31"}


@click.command(
    short_help="Find what is wrong, and what to do.",
    epilog="Exit codes: 0 no problem, 1 a problem, 2 bad usage, 130 interrupted.",
)
@click.argument("endpoints", metavar="[ENDPOINT]...", nargs=-1)
@click.option(
    "--config", type=click.Path(path_type=Path), envvar=CONFIG_VARIABLE, help="The file that `serve` would read."
)
@click.option("--admin", "urls", multiple=True, metavar="URL", help="A running sidecar's admin URL; several times.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="S",
    help="Listen to each ENDPOINT so long.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a finding.")
@click.option("--color", default="auto", type=click.Choice(["auto", "always", "never"]), help="[default: auto]")
def doctor(
    endpoints: tuple[str, ...], config: Path | None, urls: tuple[str, ...], wait: float, as_json: bool, color: str
) -> int:
    """Look at this machine, the settings and what runs, and say what is wrong and what to do about it.

    The settings are those that `serve` would have here. ENDPOINTs are event endpoints that routers read: they must
    be there, whole, and of the block size that the sidecars given with --admin store. Without --admin the one of
    this machine is asked, if it is there.

    \b
    kvevents doctor
    kvevents doctor --config kvevents.toml --json
    kvevents doctor --admin http://127.0.0.1:9470 tcp://127.0.0.1:5557 tcp://10.0.0.8:5557
    """
    paint, worst = wants_color(color), EXIT_OK
    try:
        for finding in findings(config, urls, endpoints, wait):
            write(json.dumps(finding._asdict()) if as_json else line(finding, paint))
            worst = max(worst, EXIT_PROBLEM if finding.level == PROBLEM else EXIT_OK)
    except ConfigError as error:
        chat(f"kvevents doctor: {error}")
        return EXIT_USAGE
    except BrokenPipeError:
        discard_stdout()
        return EXIT_OK
    return worst


def findings(
    config: Path | None, urls: Sequence[str], endpoints: Sequence[str], wait_s: float
) -> Iterator[Finding]:
    """Everything, in the order it is looked at."""
    running: list[State] = []
    for found in check_sidecars(urls or _near(), VERSION):
        if isinstance(found, Finding):
            yield found
        else:
            running.append(found)
    settings = _settings(config)
    if isinstance(settings, Finding):
        yield settings
    else:
        yield ok("settings", f"they work{f', with those of {config}' if config else ''}")
        yield from check_machine(settings, Machine())
        yield from check_secrets(settings)
        yield from check_ports(settings, running)
        yield from check_socket(settings.engine_socket, running)
    if endpoints:
        yield from check_streams(asyncio.run(listen(endpoints, wait_s)), running)


def _near() -> list[str]:
    try:
        state_of(DEFAULT_URL, NEAR_S)
    except SidecarGone:
        return []
    return [DEFAULT_URL]


def _settings(config: Path | None) -> ServeConfig | Finding:
    try:
        return load_settings(config, {}, os.environ).config
    except ConfigError as error:
        return problem("settings", str(error), "kvevents serve --print-config says what is in effect")


def line(finding: Finding, paint: bool) -> str:
    level = f"{finding.level:<8}"
    shown = f"\x1b[{COLORS[finding.level]}m{level}\x1b[0m" if paint else level
    remedy = f"\n{'':<9}-> {finding.remedy}" if finding.remedy else ""
    return f"{shown} {finding.check}: {finding.what}{remedy}"
