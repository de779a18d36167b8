"""The event plane: one journal, its publisher, any number of outputs, and what brings late readers up to date."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Coroutine
from typing import NamedTuple

import msgspec
import zmq

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.core.allowance import Allowance, AllowanceLimits
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, JournalLimits
from kvevents_service.core.privacy import MIN_SALT_BYTES, Privacy, key_of
from kvevents_service.core.replay import Recovery
from kvevents_service.core.telling import Teller
from kvevents_service.curve import AllowedKeys, ServerKeys, salt, secret_key
from kvevents_service.errors import expect
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.gate import Gate
from kvevents_service.service.nats_broker import Credentials, check_installed, credentials
from kvevents_service.service.nats_output import NatsOutput
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.renderer import Renderer
from kvevents_service.service.replayer import Replayer
from kvevents_service.service.snapshot_endpoint import SnapshotEndpoint
from kvevents_service.sockets import SHARED_BYTES, bind
from kvevents_service.wire.dialects import DIALECTS

MAX_REQUEST_BYTES = 1024
ANSWER_HIGH_WATER_MARK = 512
"""Messages queued for one client; its cursor waits for room."""
SUBSCRIPTION_BYTES = 4096
"""Of subscriptions that wait in the kernel for each reader, about."""
SNAPSHOT_HEARTBEAT_S = 5.0
"""Readers of a snapshot endpoint are promised a batch so often."""

Context = zmq.Context[zmq.Socket[bytes]]


class BoundOutput(msgspec.Struct, frozen=True):
    """Where one output can be reached, ports resolved and its topic filled in."""

    pub: str
    replay: str | None
    snapshot: str | None
    dialect: str
    topic: str
    dp_rank: int


class EventPlane(NamedTuple):
    """What `kvevents serve` runs for its readers."""

    outputs: list[Output]
    nats: list[NatsOutput]
    publisher: Publisher
    renderer: Renderer
    replayers: list[Replayer]
    snapshot_endpoints: list[SnapshotEndpoint]
    bound: list[BoundOutput]
    gate: Gate
    allowance: Allowance

    @property
    def _answering(self) -> list[Replayer | SnapshotEndpoint]:
        return [*self.replayers, *self.snapshot_endpoints]

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        answering = [part.run() for part in self._answering]
        nats = [output.run(self.renderer) for output in self.nats]
        return [self.publisher.run(), self.renderer.run(), self.gate.run(), *answering, *nats]

    async def flush(self) -> None:
        """Send what is pending, and see it off to the brokers that are there."""
        self.publisher.send_pending()
        await asyncio.gather(*(output.flush() for output in self.nats))

    def stats(self) -> dict[str, int]:
        """Counters of everything beside the publisher, summed over outputs."""
        total: Counter[str] = Counter()
        for part in (*self._answering, *self.nats):
            total.update(part.stats())
        return {
            **self.renderer.stats(), **total, **self.gate.stats(), "requests_over_allowance": self.allowance.refused
        }  # fmt: skip


class _Binder:
    """Opens the sockets of every output."""

    def __init__(self, context: Context, config: ServeConfig) -> None:
        self.publisher_id = uuid.uuid4().bytes
        self.outputs: list[Output] = []
        self.encodings: list[Encoding] = []
        self.bound: list[BoundOutput] = []
        self.answering: list[tuple[Output, zmq.Socket[bytes] | None, zmq.Socket[bytes] | None]] = []
        self.gate = Gate(context)
        self._context = context
        self._config = config
        for output in config.event_outputs:
            self._open(output)

    def _open(self, config: OutputConfig) -> None:
        pub = self._context.socket(zmq.PUB)
        pub.setsockopt(zmq.SNDHWM, self._config.send_high_water_mark)
        pub.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # of a subscription: what a peer may send us
        pub.setsockopt(zmq.RCVHWM, 1)  # a send takes in all subscriptions that are there before it goes on
        pub.setsockopt(zmq.RCVBUF, SUBSCRIPTION_BYTES)
        keys = server_keys(config)
        endpoint = self._bind(pub, config.pub, "pub", keys)
        replay, replay_endpoint = self._router(config.replay, "replay", keys)
        snapshot, snapshot_endpoint = self._router(config.snapshot, "snapshot", keys)
        dialect = DIALECTS[config.dialect]
        sender = self.publisher_id if config.snapshot else None
        encoding = self._encoding(config, sender)
        output = Output(pub, topic=config.topic, encoding=encoding, exact=dialect.contiguous_from_request)
        self.outputs.append(output)
        self.answering.append((output, replay, snapshot))
        self.bound.append(
            BoundOutput(endpoint, replay_endpoint, snapshot_endpoint, config.dialect, config.topic, config.dp_rank)
        )

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, setting: str, keys: ServerKeys | None) -> str:
        if keys is not None:
            self.gate.guard(socket, keys, f"{setting} {endpoint}")
        return bind(socket, endpoint, setting)

    def _router(
        self, endpoint: str | None, setting: str, keys: ServerKeys | None
    ) -> tuple[zmq.Socket[bytes] | None, str | None]:
        if endpoint is None:
            return None, None
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, ANSWER_HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.copy_threshold = SHARED_BYTES
        return socket, self._bind(socket, endpoint, setting, keys)

    def nats(self, config: NatsConfig, known: Credentials, first: int) -> NatsOutput:
        """An output that connects when it runs. first: the journal's first number."""
        return NatsOutput(
            config, known, publisher_id=self.publisher_id.hex(), first=first, clock=time.monotonic,
            encoding=self._encoding(config, None),
        )  # fmt: skip

    def _encoding(self, config: OutputConfig | NatsConfig, sender: bytes | None) -> int:
        """The place of the output's encoding; outputs that write the same bytes share it."""
        encoding = Encoding(config.dialect, config.dp_rank, sender, privacy(config))
        keys = [known.key for known in self.encodings]
        if encoding.key not in keys:
            self.encodings.append(encoding)
            return len(keys)
        return keys.index(encoding.key)


def server_keys(config: OutputConfig) -> ServerKeys | None:
    """Read the keys of an output. ConfigError for a file that cannot be used."""
    if config.curve_secret_file is None or config.curve_allowed_keys_file is None:
        return None
    allowed = AllowedKeys(config.curve_allowed_keys_file, "curve_allowed_keys_file")
    secret = secret_key(config.curve_secret_file, "curve_secret_file")
    expect(
        secret not in allowed,
        "curve_allowed_keys_file",
        "public keys: the secret one of curve_secret_file is there",
    )
    return ServerKeys(secret, allowed)


def privacy(config: OutputConfig | NatsConfig) -> Privacy:
    """What an output keeps back. ConfigError for a salt that cannot be used."""
    path = config.hash_salt_file
    key = None if path is None else key_of(salt(path, "hash_salt_file", MIN_SALT_BYTES))
    return Privacy(config.redact_tokens, key)


def bind_events(context: Context, config: ServeConfig, numbers: SequenceStore | None) -> EventPlane:
    """Every endpoint bound, nothing running. ConfigError names the one that cannot be."""
    brokers = _credentials(config)
    binder = _Binder(context, config)
    limits = JournalLimits(retained_batches=config.retained_batches, retained_bytes=config.retained_bytes)
    journal = Journal(limits, numbers.first_seq if numbers else 0)
    nats = [binder.nats(output, known, journal.next_seq) for output, known in brokers]
    publisher = Publisher(
        journal, [*binder.outputs, *nats], encodings=binder.encodings, numbers=numbers, wall_clock=time.time,
        heartbeat_s=_heartbeat_s(config),
    )  # fmt: skip
    recovery = Recovery(journal, binder.encodings, clock=time.monotonic, wall_clock=time.time)
    teller = Teller(recovery, clock=time.monotonic, wall_clock=time.time)
    renderer = Renderer(recovery, teller, publisher)
    allowance = Allowance(AllowanceLimits(config.requests_per_s, config.answer_bytes_per_s))
    replayers, endpoints = [], []
    for output, replay, snapshot in binder.answering:
        if replay is not None:
            replayers.append(Replayer(replay, output, renderer, clock=time.monotonic, allowance=allowance))
        if snapshot is not None:
            endpoints.append(
                SnapshotEndpoint(
                    snapshot,
                    output,
                    renderer,
                    publisher_id=binder.publisher_id,
                    clock=time.monotonic,
                    allowance=allowance,
                )
            )
    plane = EventPlane(
        binder.outputs, nats, publisher, renderer, replayers, endpoints, binder.bound, binder.gate, allowance
    )
    publisher.more_stats = plane.stats
    return plane


def _credentials(config: ServeConfig) -> list[tuple[NatsConfig, Credentials]]:
    """Every output on NATS. ConfigError for files that cannot be used, and without nats-py."""
    if config.nats:
        check_installed()
    return [(output, credentials(output)) for output in config.nats_outputs]


def _heartbeat_s(config: ServeConfig) -> float:
    """All outputs are idle at the same time: they send the same batches."""
    if not any(output.snapshot for output in config.event_outputs):
        return config.heartbeat_s
    return min(config.heartbeat_s or SNAPSHOT_HEARTBEAT_S, SNAPSHOT_HEARTBEAT_S)
