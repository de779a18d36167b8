"""Settings of `kvevents serve`, checked before anything starts. `settings` says where they come from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvevents_service.errors import ConfigError, expect
from kvevents_service.nats_config import NatsConfig
from kvevents_service.sockets import is_local, overlap
from kvevents_service.source_config import SourceConfig
from kvevents_service.topics import filled_in
from kvevents_service.wire.dialects import DIALECTS

DEFAULT_HOST_BYTES = 1 << 30
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
ADMIN_AUTO, ADMIN_OFF = "auto", "off"
ADMIN_DEFAULT = "127.0.0.1:9470"
SCHEMES = ("tcp://", "ipc://")
_SNAPSHOT_DIALECTS = " or ".join(name for name, dialect in DIALECTS.items() if dialect.publisher_id)
MAX_INT32 = (1 << 31) - 1
MAX_COPY_THREADS = 64
MAX_TOPIC_BYTES = 512
"""A subscription is at most 1 KiB."""
MIN_HEARTBEAT_S = 0.01
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*", re.ASCII)


def default_engine_socket() -> str:
    """$XDG_RUNTIME_DIR/kvevents/engine.sock, or one under /tmp with the user's id."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base, "kvevents") if base else Path(f"/tmp/kvevents-{os.getuid()}")
    return str(directory / "engine.sock")


class TierSettings(NamedTuple):
    """One tier of a sidecar. `prefix` begins the names of its settings, as in `host_bytes`."""

    prefix: str
    size_bytes: int
    max_blocks: int | None = None
    directory: str | None = None
    page_cache: bool = False
    keep: bool = False


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of `[[outputs]]`: endpoints to bind, and for whom. Names in {braces} of `topic`: see `topics`."""

    pub: str
    replay: str | None = None
    snapshot: str | None = None
    dialect: str = "vllm"
    topic: str = ""
    dp_rank: int = 0
    curve_secret_file: str | None = None
    curve_allowed_keys_file: str | None = None
    redact_tokens: bool = False
    hash_salt_file: str | None = None

    def __post_init__(self) -> None:
        expect(self.dialect in DIALECTS, "dialect", f"one of {', '.join(DIALECTS)}")
        self._check_secrets()
        expect(0 <= self.dp_rank <= MAX_INT32, "dp_rank", f"a whole number from 0 to {MAX_INT32}")
        takes_id = self.snapshot is None or DIALECTS[self.dialect].publisher_id
        expect(takes_id, "snapshot", f"dialect {_SNAPSHOT_DIALECTS}, not {self.dialect}, or no snapshot endpoint")

    def _check_secrets(self) -> None:
        for setting in ("curve_secret_file", "curve_allowed_keys_file", "hash_salt_file"):
            path = getattr(self, setting)
            expect(path is None or _is_path(path), setting, "a file")
        secret, allowed = self.curve_secret_file is not None, self.curve_allowed_keys_file is not None
        expect(allowed or not secret, "curve_allowed_keys_file", "a file, as curve_secret_file is set")
        expect(secret or not allowed, "curve_secret_file", "a file, as curve_allowed_keys_file is set")
        finds_by, name = DIALECTS[self.dialect].finds_by, self.dialect
        found = finds_by != "token_ids" or not self.redact_tokens
        expect(found, "redact_tokens", f"false with dialect {name}: its readers find prompts by token ids")
        found = finds_by != "block_hashes" or self.hash_salt_file is None
        expect(found, "hash_salt_file", f"nothing with dialect {name}: its readers compute the engine's hashes")

    @property
    def encrypted(self) -> bool:
        """Whether only readers with an allowed key can connect."""
        return self.curve_secret_file is not None

    def endpoints(self) -> dict[str, str]:
        """What is bound, by the name of its setting."""
        named = {"pub": self.pub, "replay": self.replay, "snapshot": self.snapshot}
        return {setting: endpoint for setting, endpoint in named.items() if endpoint is not None}


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sidecar is told. Every field is a key of the TOML file; the commonest are flags, too.

    `host_bytes` is the size of the CPU tier (1 GiB if nothing is said). With `disk_path`, a directory, and
    `disk_bytes` the tier is a file there instead; with `host_bytes` besides, there are both, the disk behind the
    host's memory. `host_blocks` and `disk_blocks` cap a tier in blocks.
    `disk_keep`: the file stays when the sidecar ends, and its blocks are found again by the next one.
    Copies to and from the file go around the page cache where the file system can, unless `disk_page_cache`.
    `copy_threads` copy in each direction; if nothing is said 2, or 1 on a machine of fewer than 4 cores.
    `host_hugetlb` takes the tier's memory from the huge pages that the system has set aside. `host_prefault` takes
    all of that memory when the first engine comes, in the background; else it is taken when it is first used.
    `pub`, `replay` and `snapshot` are ZeroMQ endpoints to bind; port 0 takes a free one. Addresses that other
    machines can reach need `allow_remote`: events carry prompt tokens.
    `pub` to `hash_salt_file` describe one output; `outputs` stand in their place. `labels` fill in topics.
    `requests_per_s` and `answer_bytes_per_s` bound what each host may ask of replay and snapshot endpoints.
    `curve_secret_file` and `curve_allowed_keys_file`: see `curve`. `redact_tokens`: stores have no token ids;
    `hash_salt_file`: block hashes are mapped one way. See docs/security.md.
    `nats` are outputs on NATS JetStream, besides: see `nats_config`.
    `sources` are engines' own streams to relay, one a rank: see `source_config`.
    `admin` is HOST:PORT for metrics and probes; "auto" takes 127.0.0.1:9470, or any free port where that is taken.
    `admin_hosts` are names by which it may be asked for, besides localhost and addresses; on an address that other
    machines reach any name will do if none is said.
    """

    engine_socket: str = msgspec.field(default_factory=default_engine_socket)
    host_bytes: int | None = None
    host_blocks: int | None = None
    host_hugetlb: bool = False
    host_prefault: bool = True
    copy_threads: int | None = None
    disk_path: str | None = None
    disk_bytes: int | None = None
    disk_blocks: int | None = None
    disk_page_cache: bool = False
    disk_keep: bool = False
    pub: str = "tcp://127.0.0.1:5557"
    replay: str | None = "tcp://127.0.0.1:5558"
    snapshot: str | None = None
    dialect: str = "vllm"
    topic: str = ""
    dp_rank: int = 0
    curve_secret_file: str | None = None
    curve_allowed_keys_file: str | None = None
    redact_tokens: bool = False
    hash_salt_file: str | None = None
    outputs: tuple[OutputConfig, ...] = ()
    nats: tuple[NatsConfig, ...] = ()
    sources: tuple[SourceConfig, ...] = ()
    labels: dict[str, str] = {}
    heartbeat_s: float = 2.0
    state_dir: str | None = None
    allow_remote: bool = False
    retained_batches: int = 10_000
    retained_bytes: int = 256 * 1024 * 1024
    send_high_water_mark: int = 2_000
    requests_per_s: float = 100.0
    answer_bytes_per_s: float = 268_435_456.0
    stop_s: float = 10.0
    admin: str = ADMIN_AUTO
    admin_hosts: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        self._check_tier()
        threads = self.copy_threads
        expect(threads is None or 0 < threads <= MAX_COPY_THREADS, "copy_threads", f"1 to {MAX_COPY_THREADS}")
        for setting in ("retained_batches", "retained_bytes", "send_high_water_mark"):
            expect(getattr(self, setting) > 0, setting, "a positive whole number")
        for setting in ("requests_per_s", "answer_bytes_per_s"):
            expect(0 <= getattr(self, setting) < float("inf"), setting, "a number; 0 is no limit")
        beats = self.heartbeat_s == 0 or MIN_HEARTBEAT_S <= self.heartbeat_s <= 3600
        expect(beats, "heartbeat_s", f"seconds from {MIN_HEARTBEAT_S} to 3600; 0 is off")
        expect(self.send_high_water_mark <= MAX_INT32, "send_high_water_mark", f"at most {MAX_INT32}")
        expect(0 < self.stop_s <= 3600, "stop_s", "seconds between 0 and 3600")
        expect(self.log_level in LOG_LEVELS, "log_level", f"one of {', '.join(LOG_LEVELS)}")
        expect(self.log_format in LOG_FORMATS, "log_format", f"one of {', '.join(LOG_FORMATS)}")
        self._check_admin()
        expect(_is_path(self.engine_socket), "engine_socket", "a path")
        expect(len(os.fsencode(self.engine_socket)) < 108, "engine_socket", "a path of at most 107 bytes")
        expect(self.state_dir is None or _is_path(self.state_dir), "state_dir", "a directory")
        for place, output in self._placed_outputs():
            topic_bytes = len(output.topic.encode(errors="replace"))
            fits = _is_text(output.topic) and topic_bytes <= MAX_TOPIC_BYTES
            expect(fits, f"{place}topic", f"at most {MAX_TOPIC_BYTES} bytes of UTF-8")
        for name, endpoint, output in self._named_endpoints():
            self._check_endpoint(name, endpoint, open_to_all=not output.encrypted)
        self._check_overlaps()
        self._check_nats()
        self.ranked_sources()

    def ranked_sources(self) -> dict[int, list[SourceConfig]]:
        """By rank, ranges expanded. One stream cannot be two sources: its blocks would be counted twice."""
        found: dict[int, list[SourceConfig]] = {}
        places: dict[tuple[str, str, int], int] = {}
        for number, table in enumerate(self.sources):
            for rank, source in table.expanded():
                first = places.setdefault((source.stream, source.topic, rank), number)
                expected = f"another stream than that of sources[{first}], which is of rank {rank} too"
                expect(first == number, f"sources[{number}].endpoint", expected)
                found.setdefault(rank, []).append(source)
        return found

    @property
    def event_outputs(self) -> list[OutputConfig]:
        """Every output, its topic filled in."""
        return [output for _, output in self._placed_outputs()]

    @property
    def nats_outputs(self) -> list[NatsConfig]:
        """Every output on NATS, its subject filled in."""
        return [output for _, output in self._placed_nats()]

    def _placed_nats(self) -> Iterator[tuple[str, NatsConfig]]:
        models = dict([("model", source.model) for source in self.sources if source.model])
        for number, table in enumerate(self.nats):
            try:
                yield f"nats[{number}].", table.placed(models | self.labels, os.environ)
            except ConfigError as error:
                raise ConfigError(f"nats[{number}].{error.setting}", error.expected) from error

    def _check_nats(self) -> None:
        """Two on one subject would be two streams that readers take for one."""
        taken: set[str] = set()
        for place, output in self._placed_nats():
            local = self.allow_remote or output.local
            expected = "a loopback address, tls://, or --allow-remote: events carry prompt tokens"
            expect(local, f"{place}servers", expected)
            expect(output.subject not in taken, f"{place}subject", f"another than {output.subject}, which is taken")
            taken.add(output.subject)

    def _placed_outputs(self) -> Iterator[tuple[str, OutputConfig]]:
        """Every output, its topic filled in, with what stands before the names of its settings."""
        one = OutputConfig(**{name: getattr(self, name) for name in OutputConfig.__struct_fields__})
        for number, output in enumerate(self.outputs or (one,)):
            place = f"outputs[{number}]." if self.outputs else ""
            try:
                topic = filled_in(output.topic, self.labels, os.environ)
            except ConfigError as error:
                raise ConfigError(f"{place}{error.setting}", error.expected) from error
            yield place, msgspec.structs.replace(output, topic=topic)

    def _check_overlaps(self) -> None:
        taken: list[tuple[str, str]] = []
        for name, endpoint, _ in self._named_endpoints():
            for other, bound in taken:
                expect(not overlap(endpoint, bound), name, f"an endpoint other than {other}'s {bound}")
            taken.append((name, endpoint))

    def _named_endpoints(self) -> Iterator[tuple[str, str, OutputConfig]]:
        """What is bound, by the name of its setting in the file, and the output it belongs to."""
        for place, output in self._placed_outputs():
            for setting, endpoint in output.endpoints().items():
                yield f"{place}{setting}", endpoint, output

    def _check_tier(self) -> None:
        disk = self.disk_path is not None
        for setting in ("disk_bytes", "disk_blocks"):
            expect(disk or getattr(self, setting) is None, "disk_path", f"a directory, as {setting} is set")
        for setting in ("disk_page_cache", "disk_keep"):
            expect(disk or not getattr(self, setting), "disk_path", f"a directory, as {setting} is set")
        if self.disk_path is not None:
            expect(_is_path(self.disk_path), "disk_path", "a directory")
            expect(self.disk_bytes is not None, "disk_bytes", "the size of the tier, as disk_path is set")
            expected = "the size of a tier in front of the disk, as host_blocks is set"
            expect(bool(self.host_bytes) or self.host_blocks is None, "host_bytes", expected)
        for setting in ("disk_bytes", "disk_blocks", "host_blocks", "host_bytes"):
            value, least = getattr(self, setting), 0 if disk and setting == "host_bytes" else 1
            expect(value is None or value >= least, setting, "a positive whole number")

    @property
    def tiers(self) -> tuple[TierSettings, ...]:
        """The tiers that these settings ask for, the fastest first."""
        host = TierSettings("host", self.host_bytes or DEFAULT_HOST_BYTES, self.host_blocks)
        if self.disk_path is None:
            return (host,)
        limits = self.disk_bytes or 0, self.disk_blocks, self.disk_path
        disk = TierSettings("disk", *limits, page_cache=self.disk_page_cache, keep=self.disk_keep)
        return (host, disk) if self.host_bytes else (disk,)

    def _check_admin(self) -> None:
        for number, name in enumerate(self.admin_hosts):
            expect(
                _HOST_NAME.fullmatch(name) is not None, f"admin_hosts[{number}]", "a host's name, without a port"
            )
        if self.admin in (ADMIN_AUTO, ADMIN_OFF):
            return
        expect(_is_text(self.admin) and _is_path(self.admin), "admin", "HOST:PORT, auto or off")
        _check_address("admin", self.admin)
        local = self.allow_remote or is_local(self.admin)
        expect(local, "admin", "a loopback address, or --allow-remote: it shows what the sidecar does")

    def _check_endpoint(self, setting: str, endpoint: str, *, open_to_all: bool) -> None:
        expect(endpoint.startswith(SCHEMES), setting, f"an endpoint that starts with {' or '.join(SCHEMES)}")
        expect(_is_text(endpoint) and _is_path(endpoint), setting, "an endpoint in UTF-8, without NUL")
        if endpoint.startswith("tcp://"):
            _check_address(setting, endpoint.removeprefix("tcp://"))
        kept = self.allow_remote or not open_to_all or is_local(endpoint)
        expected = "a loopback address, CURVE keys, or --allow-remote: events carry prompt tokens"
        expect(kept, setting, expected)


def _check_address(setting: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    expect(digits and int(port) < 65536, setting, "a port from 0 to 65535 at the end")
    expect(host != "" and (":" not in host or host[0] == "["), setting, "a host; IPv6 in [brackets]")


def _is_path(text: str) -> bool:
    return text != "" and "\0" not in text


def _is_text(text: str) -> bool:
    """False for what came from an argument that is not UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
