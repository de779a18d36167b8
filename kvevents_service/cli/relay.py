"""`kvevents relay`: an engine's own stream, recovered. One ready line on stdout, all else on stderr."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from kvevents_service.cli.tuning import tune_process
from kvevents_service.config import LOG_LEVELS, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.logs import configure
from kvevents_service.settings import load_settings
from kvevents_service.source_config import ENGINES

EXIT_CONFIG = 2
_OF_SOURCE = (
    *("endpoint", "from_replay", "from_topic", "dp_rank", "engine", "model", "block_size", "stale_after"),
    *("record", "redact", "input", "speed"),
)


@click.command(
    short_help="Make an engine's own stream complete.",
    epilog="Exit codes: 0 drained, 1 failed, 2 bad settings, 3 stopped before it was drained.",
)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with [[sources]] and [[outputs]].")
@click.option("--from", "endpoint", metavar="E", help="Where the engine publishes; it need not be there yet.")
@click.option(
    "--from-replay", metavar="E", help="Its replay endpoint: holes are filled, and what was before is told."
)
@click.option("--from-topic", metavar="T", help="Its topic. [default: the first that comes]")
@click.option("--dp-rank", metavar="N", help="Whose events they are; 0-3 is four ranks, a port each. [default: 0]")
@click.option("--engine", type=click.Choice(ENGINES), help="For people. [default: vllm]")
@click.option("--model", metavar="M", help="For people.")
@click.option("--block-size", type=int, metavar="N", help="Tokens of a block, where hashes inside blocks come too.")
@click.option("--stale-after", type=float, metavar="S", help="Seconds of silence after which it is gone.")
@click.option("--record", metavar="FILE", help="Keep the engine's raw messages in a new file.")
@click.option("--redact", is_flag=True, default=None, help="Leave tokens and extra keys out of it.")
@click.option("--input", metavar="FILE", help="Relay such a recording instead of an engine.")
@click.option("--speed", type=float, metavar="X", help="So many times as fast. [default: 1]")
@click.option("--pub", metavar="E", help="Event endpoint to bind.")
@click.option("--replay", metavar="E", help="Replay endpoint to bind.")
@click.option("--snapshot", metavar="E", help="Snapshot endpoint to bind, with dialect vllm. [default: none]")
@click.option("--dialect", metavar="NAME", help="What the readers of --pub take. [default: vllm]")
@click.option("--topic", metavar="T", help="Topic of every message, as kv@{pod}@{model}. [default: empty]")
@click.option("--state-dir", metavar="D", help="Keep event numbers here, so that they never go back.")
@click.option("--allow-remote", is_flag=True, default=None, help="Bind addresses other machines can reach.")
@click.option(
    "--admin", metavar="A", help="HOST:PORT of metrics, probes and the live page, or off. [default: auto]"
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="What is said on stderr. [default: info]")
def relay(config: Path | None, **flags: Any) -> int:
    """Follow an engine's own KV events and say them again: whole, in order, and for readers that come late.

    \b
    kvevents relay --from tcp://127.0.0.1:5557 --from-replay tcp://127.0.0.1:5558 \\
                   --pub tcp://127.0.0.1:5657 --replay tcp://127.0.0.1:5658 --state-dir /var/lib/kvevents
    """
    try:
        settings = load_settings(config, overrides(**flags), os.environ).config
        if config is None and (flags["pub"] is None or flags["replay"] is None):
            raise ConfigError("pub and replay", "to be said: the engine has the usual ports")
        configure(settings.log_level, settings.log_format, sys.stderr)
        return _run(settings)
    except ConfigError as error:
        click.echo(f"kvevents relay: {error}", err=True)
        return EXIT_CONFIG


def overrides(**flags: Any) -> dict[str, Any]:
    """Settings as `load_settings` takes them: the flags of a source are one table of `sources`."""
    own = {name: flags.pop(name) for name in _OF_SOURCE}
    source = {
        "endpoint": own["endpoint"],
        "replay": own["from_replay"],
        "topic": own["from_topic"],
        "dp_rank": _rank(own["dp_rank"]),
        "engine": own["engine"],
        "model": own["model"],
        "block_size": own["block_size"],
        "stale_after_s": own["stale_after"],
        "record": own["record"],
        "redact": own["redact"],
        "input": own["input"],
        "speed": own["speed"],
    }
    said = {name: value for name, value in source.items() if value is not None}
    if said and not {"endpoint", "input"} & said.keys():
        raise ConfigError("from", "an endpoint, as other settings of a source are given")
    return flags | {"sources": [said] if said else None}


def _rank(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def _run(config: ServeConfig) -> int:
    from kvevents_service.service.relay_app import RelayReady, relay

    tune_process()

    def announce(ready: RelayReady) -> None:
        click.echo(msgspec.json.encode(ready).decode())
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(relay(config, announce))
