"""Settings of `kvevents serve`: a TOML file, overridden by flags, checked before anything starts."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvevents_service.errors import ConfigError
from kvevents_service.sockets import is_local, overlap
from kvevents_service.source_config import SourceConfig
from kvevents_service.topics import filled_in
from kvevents_service.wire.dialects import DIALECTS

DEFAULT_HOST_BYTES = 1 << 30
LOG_LEVELS = ("debug", "info", "warning", "error")
SCHEMES = ("tcp://", "ipc://")
_SNAPSHOT_DIALECTS = " or ".join(name for name, dialect in DIALECTS.items() if dialect.publisher_id)
MAX_INT32 = (1 << 31) - 1
MAX_TOPIC_BYTES = 512
"""A subscription is at most 1 KiB."""
MIN_HEARTBEAT_S = 0.01


def default_engine_socket() -> str:
    """$XDG_RUNTIME_DIR/kvevents/engine.sock, or one under /tmp with the user's id."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base, "kvevents") if base else Path(f"/tmp/kvevents-{os.getuid()}")
    return str(directory / "engine.sock")


class TierSettings(NamedTuple):
    """The one tier of a sidecar. `prefix` begins the names of its settings, as in `host_bytes`."""

    prefix: str
    size_bytes: int
    max_blocks: int | None = None
    directory: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of `[[outputs]]`: endpoints to bind, and for whom. Names in {braces} of `topic`: see `topics`."""

    pub: str
    replay: str | None = None
    snapshot: str | None = None
    dialect: str = "vllm"
    topic: str = ""
    dp_rank: int = 0

    def __post_init__(self) -> None:
        _expect(self.dialect in DIALECTS, "dialect", f"one of {', '.join(DIALECTS)}")
        _expect(0 <= self.dp_rank <= MAX_INT32, "dp_rank", f"a whole number from 0 to {MAX_INT32}")
        takes_id = self.snapshot is None or DIALECTS[self.dialect].publisher_id
        _expect(takes_id, "snapshot", f"dialect {_SNAPSHOT_DIALECTS}, not {self.dialect}, or no snapshot endpoint")

    def endpoints(self) -> dict[str, str]:
        """What is bound, by the name of its setting."""
        named = {"pub": self.pub, "replay": self.replay, "snapshot": self.snapshot}
        return {setting: endpoint for setting, endpoint in named.items() if endpoint is not None}


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sidecar is told. Every field is a key of the TOML file; the commonest are flags, too.

    `host_bytes` is the size of the CPU tier (1 GiB if nothing is said). With `disk_path`, a directory, and
    `disk_bytes` the tier is a file there instead. `host_blocks` and `disk_blocks` cap the tier in blocks.
    `pub`, `replay` and `snapshot` are ZeroMQ endpoints to bind; port 0 takes a free one. Addresses that other
    machines can reach need `allow_remote`: events carry prompt tokens.
    `pub` to `dp_rank` describe one output; `outputs` stand in their place. `labels` fill in topics.
    `sources` are engines' own streams to relay, one a rank: see `source_config`.
    """

    engine_socket: str = msgspec.field(default_factory=default_engine_socket)
    host_bytes: int | None = None
    host_blocks: int | None = None
    disk_path: str | None = None
    disk_bytes: int | None = None
    disk_blocks: int | None = None
    pub: str = "tcp://127.0.0.1:5557"
    replay: str | None = "tcp://127.0.0.1:5558"
    snapshot: str | None = None
    dialect: str = "vllm"
    topic: str = ""
    dp_rank: int = 0
    outputs: tuple[OutputConfig, ...] = ()
    sources: tuple[SourceConfig, ...] = ()
    labels: dict[str, str] = {}
    heartbeat_s: float = 2.0
    state_dir: str | None = None
    allow_remote: bool = False
    retained_batches: int = 10_000
    retained_bytes: int = 256 * 1024 * 1024
    send_high_water_mark: int = 2_000
    stop_s: float = 10.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        self._check_tier()
        for setting in ("retained_batches", "retained_bytes", "send_high_water_mark"):
            _expect(getattr(self, setting) > 0, setting, "a positive whole number")
        beats = self.heartbeat_s == 0 or MIN_HEARTBEAT_S <= self.heartbeat_s <= 3600
        _expect(beats, "heartbeat_s", f"seconds from {MIN_HEARTBEAT_S} to 3600; 0 is off")
        _expect(self.send_high_water_mark <= MAX_INT32, "send_high_water_mark", f"at most {MAX_INT32}")
        _expect(0 < self.stop_s <= 3600, "stop_s", "seconds between 0 and 3600")
        _expect(self.log_level in LOG_LEVELS, "log_level", f"one of {', '.join(LOG_LEVELS)}")
        _expect(_is_path(self.engine_socket), "engine_socket", "a path")
        _expect(len(os.fsencode(self.engine_socket)) < 108, "engine_socket", "a path of at most 107 bytes")
        _expect(self.state_dir is None or _is_path(self.state_dir), "state_dir", "a directory")
        for output in self.event_outputs:
            topic_bytes = len(output.topic.encode(errors="replace"))
            fits = _is_text(output.topic) and topic_bytes <= MAX_TOPIC_BYTES
            _expect(fits, "topic", f"at most {MAX_TOPIC_BYTES} bytes of UTF-8")
        for name, endpoint in self._named_endpoints():
            self._check_endpoint(name, endpoint)
        self._check_overlaps()
        self.ranked_sources()

    def ranked_sources(self) -> dict[int, SourceConfig]:
        """By rank, ranges expanded. Two of one rank would be two caches that readers take for one."""
        found: dict[int, SourceConfig] = {}
        for number, table in enumerate(self.sources):
            for rank, source in table.expanded():
                _expect(
                    rank not in found, f"sources[{number}].dp_rank", f"another rank than {rank}, which is taken"
                )
                found[rank] = source
        return found

    @property
    def event_outputs(self) -> list[OutputConfig]:
        """Every output, its topic filled in."""
        one = OutputConfig(self.pub, self.replay, self.snapshot, self.dialect, self.topic, self.dp_rank)
        return [
            msgspec.structs.replace(output, topic=filled_in(output.topic, self.labels, os.environ))
            for output in self.outputs or (one,)
        ]

    def _check_overlaps(self) -> None:
        taken: list[tuple[str, str]] = []
        for name, endpoint in self._named_endpoints():
            for other, bound in taken:
                _expect(not overlap(endpoint, bound), name, f"an endpoint other than {other}'s {bound}")
            taken.append((name, endpoint))

    def _named_endpoints(self) -> Iterator[tuple[str, str]]:
        """What is bound, by the name of its setting in the file."""
        for number, output in enumerate(self.event_outputs):
            for setting, endpoint in output.endpoints().items():
                yield f"outputs[{number}].{setting}" if self.outputs else setting, endpoint

    def _check_tier(self) -> None:
        disk, alone = self.disk_path is not None, "beside a disk tier: one tier at a time for now"
        for setting in ("disk_bytes", "disk_blocks"):
            _expect(disk or getattr(self, setting) is None, "disk_path", f"a directory, as {setting} is set")
        if self.disk_path is not None:
            _expect(_is_path(self.disk_path), "disk_path", "a directory")
            _expect(self.disk_bytes is not None, "disk_bytes", "the size of the tier, as disk_path is set")
            _expect(not self.host_bytes, "host_bytes", f"0 or nothing {alone}")
            _expect(self.host_blocks is None, "host_blocks", f"nothing {alone}")
        for setting in ("disk_bytes", "disk_blocks", "host_blocks", *(() if disk else ("host_bytes",))):
            value = getattr(self, setting)
            _expect(value is None or value > 0, setting, "a positive whole number")

    @property
    def tier(self) -> TierSettings:
        """The tier that these settings ask for."""
        if self.disk_path is not None:
            return TierSettings("disk", self.disk_bytes or 0, self.disk_blocks, self.disk_path)
        return TierSettings("host", self.host_bytes or DEFAULT_HOST_BYTES, self.host_blocks)

    def _check_endpoint(self, setting: str, endpoint: str) -> None:
        _expect(endpoint.startswith(SCHEMES), setting, f"an endpoint that starts with {' or '.join(SCHEMES)}")
        _expect(_is_text(endpoint) and _is_path(endpoint), setting, "an endpoint in UTF-8, without NUL")
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            digits = port.isascii() and port.isdigit() and len(port) <= 5
            _expect(digits and int(port) < 65536, setting, "a port from 0 to 65535 at the end")
            _expect(host != "" and (":" not in host or host[0] == "["), setting, "a host; IPv6 in [brackets]")
        local = self.allow_remote or is_local(endpoint)
        _expect(local, setting, "a loopback address, or --allow-remote: events carry prompt tokens")


def _expect(good: bool, setting: str, expected: str) -> None:
    if not good:
        raise ConfigError(setting, expected)


def _is_path(text: str) -> bool:
    return text != "" and "\0" not in text


def _is_text(text: str) -> bool:
    """False for what came from an argument that is not UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def load_config(path: Path | None, overrides: dict[str, Any]) -> ServeConfig:
    """The file's settings with the overrides that are not None. ConfigError names the first bad setting."""
    settings = _read(path) if path is not None else {}
    settings |= {key: value for key, value in overrides.items() if value is not None}
    both = [key for key in OutputConfig.__struct_fields__ if key in settings and "outputs" in settings]
    _expect(not both, ", ".join(both), "to stand in each of [[outputs]], or there to be no [[outputs]]")
    for name, table in (("outputs", OutputConfig), ("sources", SourceConfig)):
        _check_tables(name, settings.get(name), table)
    try:
        return msgspec.convert(settings, ServeConfig)
    except msgspec.ValidationError as error:
        named = re.search(r"at `\$\.([^`]+)`", str(error))
        setting = named[1] if named else str(path or "flags")
        raise ConfigError(setting, f"a known setting of the right type ({error})") from error


def _check_tables(name: str, tables: Any, kind: type[msgspec.Struct]) -> None:
    """Say which table a bad value is in. What is of a wrong type or unknown is left to the whole conversion."""
    for number, table in enumerate(tables if isinstance(tables, list | tuple) else ()):
        try:
            msgspec.convert(table, kind)
        except msgspec.ValidationError:
            continue
        except ConfigError as error:
            raise ConfigError(f"{name}[{number}].{error.setting}", error.expected) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"a readable file, not {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"TOML in {path} ({error})") from error
