"""The small HTTP server: what it answers, and what no client can do to it."""

import asyncio
import json
import logging
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from kvevents_service.service.hosts import Hosts
from kvevents_service.service.http import MAX_HEAD_BYTES, HttpLimits, HttpServer, Response, plain

Ask = Callable[[bytes], object]
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
BIG = b"x" * 32_000_000
"""More than both sockets' buffers hold."""


async def hello() -> Response:
    return plain(HTTPStatus.OK, "hello")


async def big() -> Response:
    return Response(HTTPStatus.OK, BIG)


async def broken() -> Response:
    raise KeyError("a bug")


async def numbers() -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            yield b"%d\n" % number

    return Response(HTTPStatus.OK, pieces())


async def endless() -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield BIG

    return Response(HTTPStatus.OK, pieces())


async def ticking() -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * 8192
            await asyncio.sleep(0.02)

    return Response(HTTPStatus.OK, pieces())


async def breaking() -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise KeyError("a bug")

    return Response(HTTPStatus.OK, pieces())


ROUTES = {
    "/breaking": breaking,
    "/hello": hello,
    "/big": big,
    "/broken": broken,
    "/numbers": numbers,
    "/endless": endless,
    "/ticking": ticking,
}


@asynccontextmanager
async def serving(hosts: Hosts | None = None, **limits: float) -> AsyncIterator[HttpServer]:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    server = HttpServer(sock, ROUTES, HttpLimits(**limits), hosts=hosts, urgent=("/hello",))  # type: ignore[arg-type]
    task = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(30):
            yield server
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.close()


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server._socket.getsockname())


async def ask(server: HttpServer, request: bytes) -> bytes:
    """Everything that is answered until the server closes."""
    reader, writer = await connect(server)
    try:
        writer.write(request)
        return await reader.read(-1)
    finally:
        writer.close()


async def settled(server: HttpServer) -> None:
    while server.connections:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (GET % b"/hello", b"200 OK", b"hello\n"),
        (GET % b"/hello?x=1", b"200 OK", b"hello\n"),
        (b"GET /hello HTTP/1.0\r\n\r\n", b"200 OK", b"hello\n"),
        (b"HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK", b""),
        (b"HEAD /numbers HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK", b""),
        (GET % b"/nowhere", b"404 Not Found", f"there are: {', '.join(ROUTES)}\n".encode()),
        (GET % b"/../hello", b"404 Not Found", None),
        (b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab", b"405 Method Not Allowed", None),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"405 Method Not Allowed", None),
        (GET % b"/h%65llo", b"404 Not Found", None),
        (GET % b"/hello" * 2, b"200 OK", b"hello\n"),
        (b"GET /hello HTTP/1.1\r\n\r\n", b"400 Bad Request", None),
        (b"garbage\r\n\r\n", b"400 Bad Request", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400 Bad Request", None),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 9000, b"431 Request Header Fields Too Large", None),
        (GET % b"/broken", b"500 Internal Server Error", b"internal server error\n"),
    ],
)
async def test_each_request_has_its_answer(request_bytes: bytes, status: bytes, body: bytes | None) -> None:
    async with serving() as server:
        head, _, rest = (await ask(server, request_bytes)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert b"\r\nconnection: close" in head.lower()
        assert body is None or rest == body
        await settled(server)


async def test_a_stream_comes_in_pieces() -> None:
    async with serving() as server:
        answer = await ask(server, GET % b"/numbers")
        assert answer.endswith(b"\r\n\r\n2\r\n0\n\r\n2\r\n1\n\r\n2\r\n2\n\r\n0\r\n\r\n")


async def test_a_large_answer_comes_whole() -> None:
    async with serving() as server:
        assert (await ask(server, GET % b"/big")).endswith(b"\r\n\r\n" + BIG)


async def test_a_bug_is_logged_and_the_next_request_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        for _ in range(5):
            await ask(server, GET % b"/broken")
        assert b"hello" in await ask(server, GET % b"/hello")
        assert server.failed == 5
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_stream_that_breaks_off_ends_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        answer = await ask(server, GET % b"/breaking")
        assert b"first" in answer
        assert not answer.endswith(b"0\r\n\r\n"), "its reader can tell"
        assert b"hello" in await ask(server, GET % b"/hello")
        assert server.failed == 1
    assert len(caplog.records) == 1


async def test_who_asks_too_slowly_is_left() -> None:
    async with serving(request_s=0.1) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /hello HTTP/1.1\r\nHo")
        assert await reader.read(-1) == b""
        writer.close()
        await settled(server)
        assert server.refused == 1


@pytest.mark.parametrize("path", [b"/big", b"/endless"])
async def test_who_does_not_read_is_left(path: bytes) -> None:
    async with serving(write_s=0.1) as server:
        _, writer = await connect(server)
        writer.transport.pause_reading()
        writer.write(GET % path)
        while not server.refused:
            await asyncio.sleep(0.01)
        await settled(server)
        writer.transport.abort()


@pytest.mark.parametrize("path", [b"/big", b"/endless", b"/hello"])
async def test_who_leaves_in_the_middle_leaves_nothing(path: bytes) -> None:
    async with serving() as server:
        _, writer = await connect(server)
        writer.write(GET % path)
        await writer.drain()
        writer.transport.abort()
        assert b"hello" in await ask(server, GET % b"/hello")
        await settled(server)


async def test_who_leaves_between_two_pieces_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        for _ in range(5):
            with socket.create_connection(server._socket.getsockname()) as client:
                client.sendall(GET % b"/ticking")
                await asyncio.sleep(0.05)
                assert client.recv(10) == b"HTTP/1.1 2"  # the rest is left there: the end is a reset
            await settled(server)
        assert (server.failed, server.refused) == (0, 5)
    assert not caplog.records


async def test_a_page_that_is_not_read_keeps_its_place_for_some_pieces_only() -> None:
    async with serving(write_s=0.1) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server._socket.getsockname())
            client.sendall(GET % b"/ticking")
            async with asyncio.timeout(2):  # not 100 pieces
                while not server.refused:
                    await asyncio.sleep(0.01)
        await settled(server)


async def held(server: HttpServer, count: int, request: bytes = b"") -> list[asyncio.StreamWriter]:
    """So many connections that take no answer."""
    writers, before = [], server.connections
    for _ in range(count):
        _, writer = await connect(server)
        writer.transport.pause_reading()
        writer.write(request)
        writers.append(writer)
    while server.connections < before + count:
        await asyncio.sleep(0.01)
    return writers


async def until_asked(server: HttpServer, requests: int) -> None:
    while server.answering < requests:
        await asyncio.sleep(0.01)


async def test_who_never_asks_gives_way_the_oldest_first() -> None:
    async with serving(connections=2, reserve=2) as server:
        slow = [await connect(server) for _ in range(4)]
        for number in (1, 2):
            while server.connections < 4:
                await asyncio.sleep(0.01)
            assert b"hello" in await ask(server, GET % b"/hello")
            assert server.evicted == number
            slow.append(await connect(server))
        for reader, _ in slow[:2]:
            with suppress(ConnectionError):
                assert await reader.read(-1) == b""
        for reader, writer in slow[2:]:
            writer.write(GET % b"/hello")
            assert b"hello" in await reader.read(-1)
        await settled(server)
        assert (server.requests, server.refused) == (6, 2)
        for _, writer in slow:
            writer.close()


async def test_probes_are_answered_while_others_hold_all_places() -> None:
    async with serving(connections=2, reserve=2) as server:
        writers = await held(server, 2, GET % b"/endless")
        await until_asked(server, 2)
        assert (await ask(server, GET % b"/numbers")).startswith(b"HTTP/1.1 503 ")
        assert b"hello" in await ask(server, GET % b"/hello")
        for writer in writers:
            writer.transport.abort()
        await settled(server)
        assert b"2\n" in await ask(server, GET % b"/numbers")


async def test_too_many_who_do_not_take_their_answers_are_told_so() -> None:
    async with serving(connections=4, reserve=0) as server:
        writers = await held(server, 4, GET % b"/endless")
        await until_asked(server, 4)
        assert (await ask(server, b"")).startswith(b"HTTP/1.1 503 ")
        for writer in writers:
            writer.transport.abort()
        await settled(server)


async def test_a_head_that_drips_in_is_cut_off_in_time() -> None:
    async with serving(request_s=0.2) as server:
        reader, writer = await connect(server)
        with suppress(ConnectionError):
            for byte in GET % b"/hello" + b"x" * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if not server.connections and server.refused:
                    break
        with suppress(ConnectionError):  # what it had not read yet makes a reset of its end
            assert await reader.read(-1) == b""
        assert server.refused == 1
        writer.close()


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(("over", "status"), [(0, b"200 OK"), (1, b"431 Request Header Fields Too Large")])
async def test_the_head_is_as_long_as_documented_and_no_longer(over: int, status: bytes, pieces: int) -> None:
    start, end = b"GET /hello HTTP/1.1\r\nHost: x\r\nX: ", b"\r\n\r\n"
    head = start + b"y" * (MAX_HEAD_BYTES + over - len(start) - len(end)) + end
    async with serving() as server:
        reader, writer = await connect(server)
        for place in range(0, len(head), step := -(-len(head) // pieces)):
            writer.write(head[place : place + step])
            await writer.drain()
            await asyncio.sleep(0.001 if pieces > 1 else 0)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 " + status)
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n", b"200 OK"),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nX: ", b"431 Request Header Fields Too Large"),
    ],
)
async def test_what_is_sent_behind_a_request_does_not_cost_its_answer(head: bytes, status: bytes) -> None:
    def whole() -> bytes:
        with socket.create_connection(server._socket.getsockname()) as client:
            client.sendall(head + b"y" * 4_000_000)
            answer = b""
            while piece := client.recv(65536):
                answer += piece
            return answer

    async with serving() as server:
        answer = await asyncio.to_thread(whole)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert (b"\r\nallow: get, head" in answer.lower()) == (b"405" in status)


async def test_a_client_that_closes_its_side_gets_its_answer() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(GET % b"/numbers")
        writer.write_eof()
        assert (await reader.read(-1)).endswith(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(
    ("host", "good"),
    [
        (b"localhost:9470", True),
        (b"LOCALHOST.", True),
        (b"127.0.0.1", True),
        (b"[::1]:9470", True),
        (b"10.0.0.7:9470", True),
        (b"node-7:9470", True),
        (b"evil.example", False),
        (b"evil.example:9470", False),
        (b"localhost.evil.example", False),
        (b"127.0.0.1.evil.example", False),
        (b"127.0.0.1@evil.example", False),
        (b"[::1].evil.example", False),
        (b"x y", False),
    ],
)
async def test_a_page_that_a_name_led_here_reads_nothing(host: bytes, good: bool) -> None:
    async with serving(Hosts(["Node-7"])) as server:
        answer = await ask(server, (GET % b"/hello").replace(b"Host: x", b"Host: " + host))
        assert answer.startswith(b"HTTP/1.1 " + (b"200 " if good else b"403 "))
        assert (b"hello" in answer) == good


async def test_no_name_at_all_is_no_browser() -> None:
    async with serving(Hosts()) as server:
        assert b"hello" in await ask(server, b"GET /hello HTTP/1.0\r\n\r\n")


def requests(seed: int, count: int) -> Iterator[bytes]:
    """Requests as they should not be: cut, flipped, doubled, of methods and headers that few send."""
    chance = random.Random(seed)
    whole = [
        GET % b"/hello",
        GET % b"/numbers",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes(range(256)),
    ]
    for _ in range(count):
        made = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(4)):
            made[chance.randrange(len(made))] = chance.randrange(256)
        cut = chance.choice((len(made), len(made), chance.randrange(len(made) + 1)))
        yield bytes(made[:cut]) * chance.choice((1, 1, 2))


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_does_harm(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(request_s=5) as server:
        for request in requests(seed, 100):
            reader, writer = await connect(server)
            writer.write(request)
            writer.write_eof()
            with suppress(ConnectionError):
                await reader.read(-1)
            writer.close()
        assert b"hello" in await ask(server, GET % b"/hello")
        await settled(server)
        assert server.failed == 0
    assert not caplog.records


async def test_an_end_does_not_wait_for_an_open_stream() -> None:
    async with serving() as server:
        _, writer = await connect(server)
        writer.write(GET % b"/endless")
        while not server.requests:
            await asyncio.sleep(0.01)
    writer.transport.abort()
    assert json.dumps(server.connections) == "0"
