"""HTTP for operators, on h11: GET and HEAD, one request a connection, everything bounded.

h11 because it is all there is to it: no dependencies, no loop of its own, and our deadlines and bounds around it.
A client that is slow to ask or to read costs one place for some seconds; nobody else waits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Final, NamedTuple

import h11

from kvevents_service.service.rarely import is_told

log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 8192
ACCEPT_RETRY_S: Final = 0.1
SEND_BUFFER_BYTES: Final = 65536
"""The kernel would take megabytes: many minutes of a live page that nobody reads."""
TEXT: Final = "text/plain; charset=utf-8"
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_ALWAYS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
     "connect-src 'self'; img-src data:; frame-ancestors 'none'"),
    ("Connection", "close"),
)  # fmt: skip


class HttpLimits(NamedTuple):
    """request_s: for the head of a request. write_s: for a client to take an answer, or a piece of a stream."""

    connections: int = 32
    request_s: float = 5.0
    write_s: float = 10.0


class Response(NamedTuple):
    """One answer. A body that comes piece by piece goes on until it ends or its reader leaves."""

    status: HTTPStatus
    body: bytes | AsyncGenerator[bytes, None]
    content_type: str = TEXT


Handler = Callable[[], Awaitable[Response]]


def plain(status: HTTPStatus, text: str = "") -> Response:
    return Response(status, f"{text or status.phrase.lower()}\n".encode())


class HttpServer:
    """Answers on a listening socket, which it closes at its end."""

    def __init__(
        self, sock: socket.socket, routes: Mapping[str, Handler], limits: HttpLimits | None = None
    ) -> None:
        self.limits = limits or HttpLimits()
        self.requests = self.refused = self.failed = 0
        self.connections = 0
        self._socket = sock
        self._routes = routes

    def __repr__(self) -> str:
        return f"<HttpServer connections={self.connections} requests={self.requests} refused={self.refused}>"

    def close(self) -> None:
        self._socket.close()

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                sock = await self._accept()
                if self.connections >= self.limits.connections:
                    self._say_busy(sock)
                else:
                    self.connections += 1
                    tasks.create_task(self._serve(sock))

    async def _accept(self) -> socket.socket:
        """The next connection; out of descriptors is waited out."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):
                sock, _ = await loop.sock_accept(self._socket)
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                return sock
            await asyncio.sleep(ACCEPT_RETRY_S)

    def _say_busy(self, sock: socket.socket) -> None:
        self.refused += 1
        with suppress(OSError):
            sock.send(_BUSY)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        exchange = None
        try:
            exchange = Exchange(*await asyncio.open_connection(sock=sock), self.limits)
            request = await exchange.request()
            self.requests += 1
            await exchange.answer(await self._answer(request))
        except (OSError, TimeoutError, EOFError):  # the client has left, or is too slow
            self.refused += 1
        except h11.RemoteProtocolError as error:
            self.refused += 1
            assert exchange is not None, "only an exchange reads"
            with suppress(OSError, TimeoutError, h11.LocalProtocolError):
                await exchange.answer(plain(HTTPStatus(error.error_status_hint)))
        except Exception:  # the border of a connection: a stream that breaks off must not end the service
            self.failed += 1
            if is_told(self.failed):
                log.exception("an answer broke off (%d failures so far)", self.failed)
        finally:
            self.connections -= 1
            if exchange is None:
                sock.close()
            else:
                exchange.close()

    async def _answer(self, request: h11.Request) -> Response:
        if request.method not in (b"GET", b"HEAD"):
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only")
        path = request.target.partition(b"?")[0].decode("ascii", "replace")
        handler = self._routes.get(path)
        if handler is None:
            return plain(HTTPStatus.NOT_FOUND, f"there are: {', '.join(self._routes)}")
        try:
            return await handler()
        except Exception:  # the border of a request: a bug in a view must not end the service
            self.failed += 1
            if is_told(self.failed):
                log.exception("%s failed (%d failures so far)", path, self.failed)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR)


class Exchange:
    """One request and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: HttpLimits) -> None:
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # drain waits until the kernel has taken all
        self._head_only = False

    async def request(self) -> h11.Request:
        """h11.RemoteProtocolError, TimeoutError, or EOFError without any."""
        async with asyncio.timeout(self._limits.request_s):
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._head_only = event.method == b"HEAD"
                    return event
                if event is not h11.NEED_DATA:
                    raise EOFError
                self._http.receive_data(await self._reader.read(MAX_HEAD_BYTES))

    async def answer(self, response: Response) -> None:
        """Send it, each piece within `write_s`. OSError or TimeoutError if the client does not take it."""
        body = response.body
        headers = [("Content-Type", response.content_type), *_ALWAYS]
        if isinstance(body, bytes):
            headers.append(("Content-Length", str(len(body))))
        reason = response.status.phrase.encode()
        await self._send(h11.Response(status_code=response.status, headers=headers, reason=reason))
        if isinstance(body, bytes):
            await self._send_body(body)
        elif not self._head_only:
            async with aclosing(body) as pieces:
                async for piece in pieces:
                    await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    async def _send_body(self, body: bytes) -> None:
        if not self._head_only:
            await self._send(h11.Data(data=body))

    async def _send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        data = self._http.send(event)
        if data:
            if self._writer.transport.is_closing():  # uvloop's write has no error of its own for it
                raise ConnectionResetError("the client has left")
            self._writer.write(data)
            async with asyncio.timeout(self._limits.write_s):
                await self._writer.drain()

    def close(self) -> None:
        """What was answered has been taken; what was not is worth nothing."""
        transport = self._writer.transport
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            self._writer.close()
