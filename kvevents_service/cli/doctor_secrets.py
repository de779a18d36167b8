"""Whether the files that outputs take keys, salts and passwords from can be used, as `serve` would use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kvevents_service.cli.findings import Finding, ok, problem, warning
from kvevents_service.cli.render import plural
from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.errors import ConfigError, install
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.event_plane import privacy, server_keys
from kvevents_service.service.nats_broker import check_installed, credentials


def check_secrets(config: ServeConfig) -> Iterator[Finding]:
    """Of every output."""
    for output in config.event_outputs:
        yield from _tried("keys", partial(_keys, output))
        yield from _tried("salt", partial(_salt, output))
    for broker in config.nats_outputs:
        yield from _tried("nats", partial(_broker, broker))
        yield from _tried("salt", partial(_salt, broker))


def _tried(check: str, look: Callable[[], Finding | None]) -> Iterator[Finding]:
    try:
        found = look()
    except ConfigError as error:
        found = problem(check, str(error), "see docs/security.md; `kvevents keygen` makes keys")
    if found is not None:
        yield found


def _keys(output: OutputConfig) -> Finding | None:
    keys = server_keys(output)
    if keys is None:
        return None
    if not keys.allowed:
        remedy = "kvevents keygen on the router, its line into the file"
        return warning("keys", f"nobody can connect to {output.pub}: no key is in {keys.allowed.path}", remedy)
    return ok("keys", f"{plural(len(keys.allowed), 'key')} may connect to {output.pub}")


def _salt(output: OutputConfig | NatsConfig) -> Finding | None:
    key = privacy(output).hash_key
    return None if key is None else ok("salt", f"hashes are mapped with {output.hash_salt_file}")


def _broker(broker: NatsConfig) -> Finding:
    try:
        check_installed()
    except ConfigError:
        return problem("nats", f"nats-py is not installed: nothing can go to {broker.subject}", install("nats"))
    credentials(broker)
    return ok("nats", f"{broker.subject} goes to {', '.join(broker.servers)}")
