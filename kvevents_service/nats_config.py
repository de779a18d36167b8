"""Settings of an output on NATS JetStream. One table of `[[nats]]`: nothing is bound, a broker is connected to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvevents_service.errors import ConfigError, expect
from kvevents_service.sockets import is_local
from kvevents_service.topics import filled_in
from kvevents_service.wire.dialects import DIALECTS

SCHEMES: Final = ("nats://", "tls://")
MAX_SUBJECT_BYTES: Final = 512
MAX_RANK: Final = (1 << 31) - 1
_SERVER: Final = re.compile(r"(nats|tls)://([^\s/@:\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?", re.ASCII)
_STREAM: Final = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)
_RESERVED: Final = re.compile(r"[.*>%\s\x00-\x20\x7f]")
"""What has a meaning in a subject, and the % that stands for it in a value."""


class NatsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A broker, and what is put there.

    servers: nats:// or tls:// HOST:PORT of one cluster; each try takes one of them.
    subject: of every batch of this publisher and of no other, as "kv.{model}.{pod}.{dp_rank}". Names in braces are
        those of a topic, and dp_rank; a value is one token, with "." and what else is reserved as %2E.
    stream: its name. One that is missing is made, for all subjects with the same first token, with these bounds:
        max_messages of each subject, max_bytes of the whole stream, max_age_s. One that is there stays as it is.
    snapshot_s: so often, at most, the state is put into the object store bucket <stream>_snapshots.
    queue_messages, queue_bytes: what waits for the broker here; more than that is dropped.
    credentials_file: a .creds file. password_file: one line, USER:PASSWORD or a token. ca_file: PEM, for tls://.
    dialect, dp_rank, redact_tokens, hash_salt_file: as of any output.
    """

    servers: tuple[str, ...]
    subject: str
    stream: str = "KVEVENTS"
    dialect: str = "vllm"
    dp_rank: int = 0
    max_messages: int = 100_000
    max_bytes: int = 1 << 30
    max_age_s: float = 3600.0
    snapshot_s: float = 60.0
    queue_messages: int = 2_000
    queue_bytes: int = 1 << 26
    credentials_file: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    redact_tokens: bool = False
    hash_salt_file: str | None = None

    def __post_init__(self) -> None:
        expect(self.servers != (), "servers", "at least one")
        for server in self.servers:
            expect(_SERVER.fullmatch(server) is not None, "servers", "nats://HOST:PORT or tls://HOST:PORT")
        expect(_STREAM.fullmatch(self.stream) is not None, "stream", "letters, digits, _ and -")
        expect(self.dialect in DIALECTS, "dialect", f"one of {', '.join(DIALECTS)}")
        expect(0 <= self.dp_rank <= MAX_RANK, "dp_rank", f"a whole number from 0 to {MAX_RANK}")
        for setting in ("max_messages", "max_bytes", "queue_messages", "queue_bytes"):
            expect(getattr(self, setting) > 0, setting, "a positive whole number")
        expect(1 <= self.max_age_s < float("inf"), "max_age_s", "at least 1 second")
        fits = 0 < self.snapshot_s <= self.max_age_s / 2
        expect(fits, "snapshot_s", f"seconds, at most {self.max_age_s / 2:g}, half of max_age_s")
        self._check_files()

    def _check_files(self) -> None:
        for setting in ("credentials_file", "password_file", "ca_file", "hash_salt_file"):
            path = getattr(self, setting)
            expect(path is None or (path != "" and "\0" not in path), setting, "a file")
        both = self.credentials_file is not None and self.password_file is not None
        expect(not both, "password_file", "nothing, as credentials_file is set")
        expect(self.ca_file is None or self.encrypted, "servers", "tls://, as ca_file is set")
        finds_by = DIALECTS[self.dialect].finds_by
        found = finds_by != "token_ids" or not self.redact_tokens
        expect(found, "redact_tokens", f"false with dialect {self.dialect}: its readers find prompts by token ids")
        found = finds_by != "block_hashes" or self.hash_salt_file is None
        expected = f"nothing with dialect {self.dialect}: its readers compute the engine's hashes"
        expect(found, "hash_salt_file", expected)

    @property
    def encrypted(self) -> bool:
        """On the way to the broker, whichever server it is."""
        return all(server.startswith("tls://") for server in self.servers)

    @property
    def local(self) -> bool:
        """Nothing leaves this machine in the clear."""
        return all(server.startswith("tls://") or is_local(_address(server)) for server in self.servers)

    def placed(self, labels: Mapping[str, str], environ: Mapping[str, str]) -> NatsConfig:
        """With its subject filled in. ConfigError if that cannot be one."""
        rank = {"dp_rank": str(self.dp_rank)}
        values = {name: _token(value) for name, value in {**labels, **rank}.items()}
        try:
            subject = filled_in(self.subject, values, _Tokens(environ))
        except ConfigError as error:
            raise ConfigError(error.setting.replace("topic", "subject"), error.expected) from error
        check_subject(subject)
        return msgspec.structs.replace(self, subject=subject)


class _Tokens(dict[str, str]):
    """Variables as tokens of a subject."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__({name: _token(value) for name, value in environ.items()})


def check_subject(subject: str) -> None:
    """ConfigError unless it names one subject, for people and JetStream alike."""
    tokens = subject.split(".")
    fits = 0 < len(subject.encode(errors="replace")) <= MAX_SUBJECT_BYTES
    expect(fits and all(tokens), "subject", f"tokens with a . between, at most {MAX_SUBJECT_BYTES} bytes")
    good = subject.isprintable() and not any(letter in subject for letter in "*> ")
    expect(good, "subject", "no *, > or space: a subject to publish to")
    expect(subject[0] not in "$_", "subject", "a first letter other than $ and _, which are the broker's")


def _token(value: str) -> str:
    return _RESERVED.sub(lambda found: f"%{ord(found[0]):02X}", value)


def _address(server: str) -> str:
    address = server.partition("://")[2]
    return address if re.search(r":\d+$", address) else f"{address}:4222"
