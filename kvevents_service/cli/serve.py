"""`kvevents serve`: the sidecar as a process. One ready line on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from kvevents_service.cli.options import SIZE
from kvevents_service.cli.tuning import tune_process
from kvevents_service.config import LOG_FORMATS, LOG_LEVELS, ServeConfig, TierSettings
from kvevents_service.errors import ConfigError, not_installed
from kvevents_service.service.logs import LOGGER, configure
from kvevents_service.settings import CONFIG_VARIABLE, Loaded, load_settings
from kvevents_service.sizes import size_text
from kvevents_service.version import VERSION

EXIT_CONFIG = 2


@click.command(
    short_help="Run the sidecar.",
    epilog="Exit codes: 0 drained, 1 failed, 2 bad settings, 3 stopped before it was drained.",
)
@click.option(
    "--config", type=click.Path(path_type=Path), envvar=CONFIG_VARIABLE, help="TOML file with the settings below."
)
@click.option(
    "--engine-socket", metavar="PATH", help="Unix domain socket for engines. [default: see the ready line]"
)
@click.option("--host-bytes", type=SIZE, metavar="N", help="Size of the CPU tier, as 8GiB. [default: 1 GiB]")
@click.option("--disk-path", metavar="D", help="Keep blocks in a file there: instead, or behind --host-bytes.")
@click.option("--disk-bytes", type=SIZE, metavar="N", help="Size of the disk tier.")
@click.option("--disk-keep", is_flag=True, default=None, help="Its file stays: blocks are there after a restart.")
@click.option("--pub", metavar="E", help="Event endpoint. [default: tcp://127.0.0.1:5557]")
@click.option("--replay", metavar="E", help="Replay endpoint. [default: tcp://127.0.0.1:5558]")
@click.option("--snapshot", metavar="E", help="Snapshot endpoint, with dialect vllm. [default: none]")
@click.option("--dialect", metavar="NAME", help="What the readers of --pub take. [default: vllm]")
@click.option("--topic", metavar="T", help="Topic of every message, as kv@{pod}@{model}. [default: empty]")
@click.option("--dp-rank", type=int, metavar="N", help="Data parallel rank in every batch. [default: 0]")
@click.option("--curve-secret-file", metavar="F", help="Encrypt events with the key in F (kvevents keygen).")
@click.option("--curve-allowed-keys-file", metavar="F", help="With it: public keys that may connect, one a line.")
@click.option("--redact-tokens", is_flag=True, default=None, help="Send no token ids; not every dialect can.")
@click.option("--hash-salt-file", metavar="F", help="Map block hashes one way, with the random bytes in F.")
@click.option("--state-dir", metavar="D", help="Keep event numbers here, so that they never go back.")
@click.option("--allow-remote", is_flag=True, default=None, help="Allow addresses other machines can reach.")
@click.option(
    "--admin", metavar="A", help="HOST:PORT of metrics, probes and the live page, or off. [default: auto]"
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="What is said on stderr. [default: info]")
@click.option("--log-format", type=click.Choice(LOG_FORMATS), help="Lines of text or JSON. [default: text]")
@click.option("--print-config", is_flag=True, help="Print the settings in effect, and where each was said.")
def serve(config: Path | None, print_config: bool, **flags: Any) -> int:
    """Run the offload sidecar until SIGTERM or SIGINT; a second signal forces.

    \b
    kvevents serve --engine-socket /run/kvevents/engine.sock --host-bytes 8GiB
    kvevents serve --config kvevents.toml --log-format json
    KVEVENTS_HOST_BYTES=8GiB kvevents serve --print-config

    A setting is taken from its flag, else from the environment (KVEVENTS_HOST_BYTES), else from the file.
    """
    try:
        loaded = load_settings(config, flags, os.environ)
        if print_config:
            _print(loaded)
            return 0
        configure(loaded.config.log_level, loaded.config.log_format, sys.stderr)
        return _run(loaded.config)
    except ConfigError as error:
        click.echo(f"kvevents serve: {error}", err=True)
        return EXIT_CONFIG


def _print(loaded: Loaded) -> None:
    try:
        from kvevents_service.cli.print_config import effective_toml
    except ImportError:
        raise not_installed("tomli-w", "offload") from None
    click.echo(effective_toml(loaded), nl=False)


def _run(config: ServeConfig) -> int:
    try:
        import torch
        import uvloop

        from kvevents_service.service.app import Ready, serve
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "a package", "offload") from error

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if any(tier.directory is None and tier.size_bytes > memory for tier in config.tiers):
        raise ConfigError("host_bytes", f"at most {memory}, the memory of this machine")

    torch.set_num_threads(1)  # copies are bound by memory; the other cores are the engine's
    tune_process()

    def announce(ready: Ready) -> None:
        click.echo(msgspec.json.encode(ready).decode())
        sys.stdout.flush()

    _say_what_runs(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, announce))


def _say_what_runs(config: ServeConfig) -> None:
    """The first line of the log."""
    tiers = " and ".join(map(_tier_text, config.tiers))
    outputs = ", ".join(f"{output.dialect} on {output.pub}" for output in config.event_outputs)
    logging.getLogger(LOGGER).info(
        "kvevents %s, pid %d: %s, events as %s, engines at %s",
        *(VERSION, os.getpid(), tiers, outputs, config.engine_socket),
        extra={"fields": {"settings": msgspec.to_builtins(config)}},
    )


def _tier_text(tier: TierSettings) -> str:
    where = f" in {tier.directory}" if tier.directory else ""
    return f"{tier.prefix} tier of {size_text(tier.size_bytes)}{where}"
