"""What a sidecar's admin endpoint says of it (`/state`), as far as the commands look at it."""

from __future__ import annotations

from http.client import HTTPException
from typing import Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import msgspec

from kvevents_service.errors import ConfigError, SidecarGone

DEFAULT_URL: Final = "http://127.0.0.1:9470"
MAX_BYTES: Final = 16 * 1024 * 1024
_opener: Final = build_opener(ProxyHandler({}))
"""A sidecar is near: no proxy knows it better than we do."""


class Group(msgspec.Struct, frozen=True):
    index: int
    kind: str
    block_size: int
    main: bool = False


class Tier(msgspec.Struct, frozen=True):
    medium: str
    capacity_blocks: int
    block_bytes: int
    blocks: dict[str, int]
    groups: list[Group]
    stats: dict[str, int]


class Output(msgspec.Struct, frozen=True):
    pub: str
    dialect: str
    topic: str = ""
    replay: str | None = None
    snapshot: str | None = None
    subscribers: int = 0
    batches: int = 0
    refused: int = 0


class Copies(msgspec.Struct, frozen=True):
    direction: str
    medium: str
    bytes: int
    failed: int
    pending: int


class Told(msgspec.Struct, frozen=True):
    type: str
    medium: str
    events: int
    blocks: int


class Followed(msgspec.Struct, frozen=True):
    """A relayed source."""

    name: str
    dp_rank: int
    state: str
    resident: dict[str, int]
    counts: dict[str, int]
    lag_s: float | None = None
    age_s: float | None = None


class OnNats(msgspec.Struct, frozen=True):
    subject: str
    nats_connected: int = 0
    nats_batches_sent: int = 0
    nats_batches_waiting: int = 0
    nats_batches_dropped: int = 0


class Journal(msgspec.Struct, frozen=True):
    dp_rank: int
    next_seq: int


class Connected(msgspec.Struct, frozen=True):
    engine_id: str


class State(msgspec.Struct, frozen=True):
    """A newer sidecar may say more."""

    version: str
    pid: int
    boot_id: str
    started_at: float
    now: float
    draining: bool
    engine_socket: str
    outputs: list[Output]
    tiers: list[Tier]
    engines: list[Connected]
    copies: list[Copies]
    oldest_copy_s: float
    events: list[Told]
    errors: dict[str, int]
    service: str = "serve"
    sources: list[Followed] = []
    nats: list[OnNats] = []
    journals: list[Journal] = []


class Readiness(msgspec.Struct, frozen=True):
    """`/readyz`."""

    ready: bool
    failed: str | None = None
    why: str | None = None


_Kind = TypeVar("_Kind", State, Readiness)


def state_of(url: str, wait_s: float) -> State:
    """SidecarGone if nobody answers there in time, or no sidecar does. ConfigError for what is no URL."""
    return _decoded(url, "/state", State, wait_s)


def readiness_of(url: str, wait_s: float) -> Readiness:
    """As `state_of`."""
    return _decoded(url, "/readyz", Readiness, wait_s)


def _decoded(url: str, path: str, kind: type[_Kind], wait_s: float) -> _Kind:
    try:
        return msgspec.json.decode(_get(url, path, wait_s), type=kind)
    except msgspec.MsgspecError as error:
        raise SidecarGone(f"what answers at {url} is no sidecar ({error})") from error


def _get(url: str, path: str, wait_s: float) -> bytes:
    if not url.startswith("http://"):
        raise ConfigError("url", f"the admin URL of a sidecar, as {DEFAULT_URL}, not {url}")
    try:
        with _opener.open(url.rstrip("/") + path, timeout=wait_s) as answer:
            return bytes(answer.read(MAX_BYTES))
    except HTTPError as error:  # a sidecar that is not ready says why
        return bytes(error.read(MAX_BYTES))
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise SidecarGone(f"no answer from {url} ({getattr(reason, 'strerror', None) or reason})") from error
