"""`kvevents serve`: the sidecar as a process. One ready line on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from kvevents_service.config import LOG_LEVELS, ServeConfig, load_config
from kvevents_service.errors import ConfigError

EXIT_CONFIG = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GC_THRESHOLD = 50_000
"""Blocks make no garbage cycles; a rarer collector keeps its pauses out of lookups."""


@click.command(
    short_help="Run the sidecar.",
    epilog="Exit codes: 0 drained, 1 failed, 2 bad settings, 3 stopped before it was drained.",
)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with the settings below.")
@click.option(
    "--engine-socket", metavar="PATH", help="Unix domain socket for engines. [default: see the ready line]"
)
@click.option("--host-bytes", type=int, metavar="N", help="Size of the CPU tier in bytes. [default: 1 GiB]")
@click.option("--disk-path", metavar="D", help="Keep blocks in a file there: instead, or behind --host-bytes.")
@click.option("--disk-bytes", type=int, metavar="N", help="Size of the disk tier in bytes.")
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
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    help="What is said on stderr. [default: info]",
)
def serve(config: Path | None, **overrides: Any) -> int:
    """Run the offload sidecar until SIGTERM or SIGINT; a second signal forces.

    \b
    kvevents serve --engine-socket /run/kvevents/engine.sock --host-bytes 8589934592
    """
    try:
        settings = load_config(config, overrides)
        logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr, format=LOG_FORMAT)
        return _run(settings)
    except ConfigError as error:
        click.echo(f"kvevents serve: {error}", err=True)
        return EXIT_CONFIG


def _run(config: ServeConfig) -> int:
    try:
        import torch
    except ImportError:
        raise ConfigError("torch", "to be installed: pip install 'kvevents-service[offload]'") from None
    import uvloop

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.tier.directory is None and config.tier.size_bytes > memory:
        raise ConfigError("host_bytes", f"at most {memory}, the memory of this machine")

    from kvevents_service.service.app import Ready, serve

    torch.set_num_threads(1)  # copies are bound by memory; the other cores are the engine's
    gc.set_threshold(GC_THRESHOLD)

    def announce(ready: Ready) -> None:
        click.echo(msgspec.json.encode(ready).decode())
        sys.stdout.flush()

    logging.getLogger("kvevents_service").info("settings: %s", config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, announce))
