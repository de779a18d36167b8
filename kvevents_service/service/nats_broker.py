"""One connection to NATS JetStream (nats-py, the extra `nats`): a stream for batches, a bucket for snapshots.

It does not reconnect by itself. The client would send what it held back meanwhile after what is sent again; with a
connection for each try, the broker has seen a prefix of what was sent.
"""

from __future__ import annotations

import asyncio
import io
import logging
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvevents_service.curve import read_file
from kvevents_service.errors import ConfigError
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.nats_queue import Waiting

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

CONNECT_S: Final = 3.0
ACK_S: Final = 5.0
CLOSE_S: Final = 1.0
HEADER_BYTES: Final = 1024
"""Room for headers within the broker's largest message."""
MIN_DUPLICATE_WINDOW_S: Final = 120.0
NO_STREAM_MADE: Final = 10058
"""JetStream's code for a name that another has taken meanwhile."""

SEQ, PUBLISHER, DIALECT, UPTO, FROM = "Kv-Seq", "Kv-Publisher", "Kv-Dialect", "Kv-Upto", "Kv-From-Stream-Seq"


class BrokerGone(Exception):
    """The broker cannot be reached, or does not answer. Nothing is lost yet."""


class Credentials(NamedTuple):
    """How `nats.connect` is told who we are."""

    options: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<Credentials {', '.join(self.options) or 'none'}>"


def check_installed() -> None:
    """ConfigError names what to install."""
    try:
        import nats
    except ImportError:
        raise ConfigError("nats", "nats-py to be installed: pip install 'kvevents-service[nats]'") from None
    del nats


def credentials(config: NatsConfig) -> Credentials:
    """Read the files of an output. ConfigError for one that cannot be used, or that others may read."""
    options: dict[str, Any] = {}
    if config.credentials_file is not None:
        read_file(config.credentials_file, "credentials_file", private=True)
        options["user_credentials"] = config.credentials_file
    if config.password_file is not None:
        options |= _password(config.password_file)
    if config.encrypted:
        options["tls"] = _tls(config.ca_file)
    return Credentials(options)


def _password(path: str) -> dict[str, str]:
    text = read_file(path, "password_file", private=True).decode(errors="replace").strip()
    if not text or len(text.splitlines()) != 1:
        raise ConfigError("password_file", "one line, USER:PASSWORD or a token")
    user, colon, password = text.partition(":")
    return {"user": user, "password": password} if colon else {"token": text}


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("ca_file", f"certificates in PEM, not {ca_file} ({error})") from error


class Broker:
    """A connection that is up until it fails; every method but `close` raises BrokerGone then."""

    def __init__(self, config: NatsConfig, client: Client, publisher_id: str) -> None:
        self._config = config
        self._client = client
        self._js = client.jetstream(timeout=ACK_S, publish_async_max_pending=1 << 16)
        self._headers = {PUBLISHER: publisher_id, DIALECT: config.dialect}
        self._id = publisher_id
        self._bucket: Any = None

    def __repr__(self) -> str:
        return f"<Broker {self._config.servers} {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def largest(self) -> int:
        """Bytes of a batch that the broker takes."""
        return int(self._client.max_payload) - HEADER_BYTES

    async def prepare(self) -> None:
        """The stream and the bucket are there."""
        from nats.js.api import ObjectStoreConfig, StreamConfig
        from nats.js.errors import NotFoundError

        config, root = self._config, self._config.subject.partition(".")[0]
        stream = StreamConfig(
            name=config.stream,
            subjects=[f"{root}.>", root],
            max_msgs_per_subject=config.max_messages,
            max_bytes=config.max_bytes,
            max_age=config.max_age_s,
            duplicate_window=min(MIN_DUPLICATE_WINDOW_S, config.max_age_s),
        )
        with _mapped():
            try:
                await self._js.stream_info(config.stream)
            except NotFoundError:
                await self._made(self._js.add_stream(stream))
            bucket = f"{config.stream}_snapshots"
            try:
                self._bucket = await self._js.object_store(bucket)
            except NotFoundError:
                store = ObjectStoreConfig(bucket=bucket, ttl=config.max_age_s)
                await self._made(self._js.create_object_store(bucket, store))
                self._bucket = await self._js.object_store(bucket)

    async def _made(self, making: Any) -> None:
        """Another publisher may have made it in between."""
        from nats.js.errors import BadRequestError

        try:
            await making
        except BadRequestError as error:
            if error.err_code != NO_STREAM_MADE:
                raise

    async def last_place(self) -> int:
        """The number in the stream of its newest message, ours or not."""
        with _mapped():
            return int((await self._js.stream_info(self._config.stream)).state.last_seq)

    async def publish(self, batches: Sequence[Waiting]) -> list[bool]:
        """Which of them the stream has, all sent in order and together."""
        from nats.errors import Error

        acks: list[asyncio.Future[Any]] = []
        with suppress(Error, OSError):  # those behind it are not sent; what became of the others is asked below
            for batch in batches:
                acks.append(await self._js.publish_async(
                    self._config.subject, batch.payload, wait_stall=ACK_S, headers=self._headers_of(batch.seq)
                ))  # fmt: skip
        await self._settled(acks)
        taken = [ack.done() and not ack.cancelled() and ack.exception() is None for ack in acks]
        return taken + [False] * (len(batches) - len(acks))

    async def _settled(self, acks: Sequence[asyncio.Future[Any]]) -> None:
        """Until all are answered, the connection is lost, or it takes too long."""
        left = {ack for ack in acks if not ack.done()}
        deadline = asyncio.get_running_loop().time() + ACK_S
        while left and self.is_up and asyncio.get_running_loop().time() < deadline:
            _, left = await asyncio.wait(left, timeout=0.1)

    def _headers_of(self, seq: int) -> dict[str, str]:
        return {**self._headers, "Nats-Msg-Id": f"{self._id}-{seq}", SEQ: str(seq)}

    async def put_snapshot(self, upto: int, place: int, payloads: Sequence[bytes]) -> None:
        """The state after batch `upto`; what came later is behind message `place` of the stream."""
        from nats.js.api import ObjectMeta

        told = {**self._headers, UPTO: str(upto), FROM: str(place + 1)}
        lists = {name: [value] for name, value in told.items()}  # as every other client writes an object's headers
        with _mapped():
            await self._bucket.put(self._config.subject, SnapshotFile(payloads), ObjectMeta(headers=lists))

    async def close(self) -> None:
        """At once, whatever the state."""
        await _close(self._client)


async def connect(config: NatsConfig, known: Credentials, publisher_id: str) -> Broker:
    """A broker that is ready. BrokerGone if none is."""
    from nats.aio.client import Client

    async def told(error: Exception) -> None:
        log.debug("nats: %s", error)

    client = Client()
    try:
        with _mapped():
            async with asyncio.timeout(2 * CONNECT_S):
                await client.connect(
                    [*config.servers], allow_reconnect=False, connect_timeout=int(CONNECT_S), error_cb=told,
                    max_reconnect_attempts=1, reconnect_time_wait=0, name="kvevents", **known.options,
                )  # fmt: skip
        broker = Broker(config, client, publisher_id)
        await broker.prepare()
    except BaseException:
        await _close(client)
        raise
    return broker


async def _close(client: Client) -> None:
    """The client waits for a broker that does not read, and leaves a connection open that was refused."""
    from nats.errors import Error

    with suppress(Error, OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await client.close()
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


class _mapped:
    """What the client raises, as BrokerGone."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from nats.errors import Error

        if isinstance(error, Error | OSError | TimeoutError):
            raise BrokerGone(f"{type(error).__name__}: {error}") from error


class SnapshotFile(io.RawIOBase):
    """Payloads as one object: each behind its length, 4 bytes, big endian. Not joined: a state may be large."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = _pieces(payloads)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As much as fits; 0 at the end."""
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view):
            if not self._left:
                self._left = memoryview(next(self._pieces, b""))
                if not self._left:
                    break
            taken = self._left[: len(view) - filled]
            view[filled : filled + len(taken)] = taken
            self._left, filled = self._left[len(taken) :], filled + len(taken)
        return filled


def _pieces(payloads: Sequence[bytes]) -> Iterator[bytes]:
    for payload in payloads:
        yield len(payload).to_bytes(4, "big")
        if payload:
            yield payload
