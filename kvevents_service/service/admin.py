"""What a service shows operators over HTTP: metrics, probes, its state, and a page that draws it live."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from importlib.resources import files
from typing import Final

import msgspec

from kvevents_service.config import ADMIN_AUTO, ADMIN_DEFAULT, ADMIN_OFF, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.hosts import Hosts
from kvevents_service.service.http import HttpServer, Response, plain
from kvevents_service.service.instruments import Instruments
from kvevents_service.service.metrics import CONTENT_TYPE, Metrics
from kvevents_service.service.probe import Probe
from kvevents_service.sockets import is_local

log = logging.getLogger(__name__)

JSON: Final = "application/json"
MAX_STREAMS: Final = 8
"""Pages that are open at once; each holds one of the server's places."""
PERIOD_S: Final = 1.0
FRESH_S: Final = 0.25
_PAGE: Final = files("kvevents_service") / "data" / "live.html"
_BACKLOG: Final = 32
URGENT: Final = frozenset({"/healthz", "/readyz"})
"""Answered even when all places are taken."""


def opened(config: ServeConfig, instruments: Instruments, probe: Probe) -> Admin | None:
    """Listening as the settings say; None for "off". ConfigError if that cannot be."""
    sock = listen(config.admin)
    return None if sock is None else Admin(sock, instruments, probe, hosts_of(config))


def hosts_of(config: ServeConfig) -> Hosts:
    """An endpoint that other machines reach has names that nobody here knows: they are checked only if some are
    said."""
    local = config.admin == ADMIN_AUTO or is_local(config.admin)
    return Hosts(config.admin_hosts, every=not local and not config.admin_hosts)


def listen(setting: str) -> socket.socket | None:
    """A listening socket; None for "off". With "auto" a taken port is no reason not to serve engines.

    Raises ConfigError for an address that was asked for and cannot be had.
    """
    if setting == ADMIN_OFF:
        return None
    if setting != ADMIN_AUTO:
        return _bound(setting)
    try:
        return _bound(ADMIN_DEFAULT)
    except ConfigError:
        log.info("%s is taken: metrics and probes are on another port, see the ready line", ADMIN_DEFAULT)
        return _bound(f"{ADMIN_DEFAULT.rpartition(':')[0]}:0")


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    name = "" if host == "*" else host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    try:
        sock = socket.create_server((name, int(port)), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError("admin", f"an address that can be bound, not {address} ({error})") from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Admin:
    """The routes. `run` answers until cancelled."""

    def __init__(
        self, sock: socket.socket, instruments: Instruments, probe: Probe, hosts: Hosts | None = None
    ) -> None:
        self.url = url_of(sock)
        self.streams = 0
        self._instruments = instruments
        self._probe = probe
        self._metrics = Metrics(instruments)
        self._made, self._made_at = b"", -FRESH_S
        routes = {
            "/": self._page,
            "/live": self._live,
            "/metrics": self._scrape,
            "/state": self._state,
            "/healthz": self._alive,
            "/readyz": self._ready,
        }
        self.server = HttpServer(sock, routes, hosts=hosts, urgent=URGENT)

    def __repr__(self) -> str:
        return f"<Admin {self.url} streams={self.streams} {self.server!r}>"

    async def run(self) -> None:
        await self.server.run()

    def close(self) -> None:
        self.server.close()

    async def _page(self) -> Response:
        return Response(HTTPStatus.OK, _PAGE.read_bytes(), "text/html; charset=utf-8")

    async def _scrape(self) -> Response:
        pieces = []
        for piece in self._metrics.pieces():
            pieces.append(piece)
            await asyncio.sleep(0)
        return Response(HTTPStatus.OK, b"".join(pieces), CONTENT_TYPE)

    async def _state(self) -> Response:
        return Response(HTTPStatus.OK, self._encoded(), JSON)

    def _encoded(self) -> bytes:
        """The state as JSON; made anew at most every FRESH_S, however many ask."""
        now = time.monotonic()
        if now - self._made_at >= FRESH_S:
            self._made, self._made_at = msgspec.json.encode(self._instruments.state()), now
        return self._made

    async def _alive(self) -> Response:
        """The loop answers, and that is all."""
        return plain(HTTPStatus.OK, "ok")

    async def _ready(self) -> Response:
        probed = await self._probe.ask()
        status = HTTPStatus.OK if probed.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(status, msgspec.json.encode(probed), JSON)

    async def _live(self) -> Response:
        """The state, again and again, as server-sent events (https://html.spec.whatwg.org, 9.2)."""
        if self.streams >= MAX_STREAMS:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"at most {MAX_STREAMS} pages at once")
        return Response(HTTPStatus.OK, self._stream(), "text/event-stream")

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        self.streams += 1
        try:
            while True:
                yield b"data: " + self._encoded() + b"\n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            self.streams -= 1
