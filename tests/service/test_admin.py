"""The admin endpoint of a running sidecar: its routes, the live stream, ports, and what it never says."""

import asyncio
import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import kvevents_service
from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.admin import FRESH_S, MAX_STREAMS, hosts_of, listen, url_of
from kvevents_service.testing import make_chain

PAGE = Path(kvevents_service.__file__).parent / "data" / "live.html"
CANARY = 1_234_567_891
LOCAL = "127.0.0.1:0"


async def get(url: str | None, path: str, host: str = "localhost") -> tuple[str, str, str]:
    """Status line, head and body."""
    reader, writer = await asyncio.open_connection(urlsplit(str(url)).hostname, urlsplit(str(url)).port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    answer = (await reader.read(-1)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.splitlines()[0], head.lower(), body


@pytest.mark.parametrize(
    ("path", "content", "within"),
    [
        ("/", "text/html", "<title>kvevents</title>"),
        ("/metrics", "text/plain; version=0.0.4", "kvevents_build_info"),
        ("/healthz", "text/plain", "ok"),
        ("/readyz", "application/json", '"ready":true'),
        ("/state", "application/json", '"outputs":[{"pub":"tcp://127.0.0.1:'),
    ],
)
async def test_each_route_answers(run, path: str, content: str, within: str) -> None:
    async with run(admin=LOCAL) as service:
        status, head, body = await get(service.ready.admin, path)
    assert status == "HTTP/1.1 200 OK"
    assert f"content-type: {content}" in head
    assert within in body


async def test_a_sidecar_that_drains_is_alive_and_not_ready(run) -> None:
    async with run(admin=LOCAL) as service:
        service.sidecar.draining = True
        assert (await get(service.ready.admin, "/healthz"))[0] == "HTTP/1.1 200 OK"
        status, _, body = await get(service.ready.admin, "/readyz")
        assert (status, json.loads(body)["failed"]) == ("HTTP/1.1 503 Service Unavailable", "open")
        assert json.loads((await get(service.ready.admin, "/state"))[2])["draining"] is True


async def test_the_state_has_short_hashes_and_no_tokens(run, engine) -> None:
    async with run(admin=LOCAL) as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain((CANARY,) * 32, 4)
        await asyncio.to_thread(mini.store, chain, list(range(8)))
        bodies = {path: (await get(service.ready.admin, path))[2] for path in ("/state", "/metrics", "/readyz")}
    state = json.loads(bodies["/state"])
    (told,) = state["latest"]
    assert told == {
        **{
            "dp_rank": 0,
            "seq": 0,
            "ts": told["ts"],
            "type": "BlockStored",
            "medium": "CPU",
            "group": 0,
            "blocks": 8,
        },
        "first": chain.hashes[0][-8:-4].hex(),
        "last": chain.hashes[7][-8:-4].hex(),
    }
    assert state["tiers"][0]["groups"] == [
        {"index": 0, "kind": "full_attention", "block_size": 4, "sliding_window": None, "main": True}
    ]
    assert state["engines"] == [{"session_id": 1, "engine_id": "mini", "ranks": 1}]
    assert state["copies"][0]["bytes"] == 8 * 128
    for body in bodies.values():
        assert str(CANARY) not in body
        assert chain.hashes[0].hex() not in body


@pytest.mark.parametrize("prefault", [True, False])
async def test_the_state_says_what_of_the_tier_is_present(run, engine, prefault: bool) -> None:
    tier_bytes = 32 * 2 * 64
    async with run(admin=LOCAL, host_prefault=prefault) as service:
        await asyncio.to_thread(engine)
        async with asyncio.timeout(60.0):
            while True:
                body = (await get(service.ready.admin, "/state"))[2]
                present = json.loads(body)["stats"]["host_present_bytes"]
                if present == tier_bytes or not prefault:
                    break
        assert present == (tier_bytes if prefault else 0)


async def test_the_live_stream_tells_the_state_again_and_again(run) -> None:
    async with run(admin=LOCAL) as service:
        url = urlsplit(service.ready.admin)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        seen = [json.loads((await reader.readuntil(b"\n\n")).partition(b"data: ")[2]) for _ in range(2)]
        assert seen[0]["boot_id"] == seen[1]["boot_id"] == service.ready.boot_id
        assert seen[1]["now"] > seen[0]["now"]
        writer.close()
        while service.admin.streams:
            await asyncio.sleep(0.01)


async def test_many_pages_leave_room_for_the_probes(run) -> None:
    async with run(admin=LOCAL) as service:
        url = urlsplit(service.ready.admin)
        held = []
        for _ in range(MAX_STREAMS):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
            await reader.readuntil(b"data: ")
            held.append(writer)
        assert service.admin.streams == MAX_STREAMS
        assert (await get(service.ready.admin, "/live"))[0] == "HTTP/1.1 503 Service Unavailable"
        assert (await get(service.ready.admin, "/readyz"))[0] == "HTTP/1.1 200 OK"
        for writer in held:
            writer.close()


async def test_probes_are_answered_when_nothing_else_is(run) -> None:
    async with run(admin=LOCAL) as service:
        server = service.admin.server
        server.answering = server.limits.connections
        codes = {
            path: (await get(service.ready.admin, path))[0][9:12] for path in ("/state", "/healthz", "/readyz")
        }
        assert codes == {"/state": "503", "/healthz": "200", "/readyz": "200"}


async def test_a_page_of_another_site_is_refused(run) -> None:
    async with run(admin=LOCAL, admin_hosts=("node-7",)) as service:
        for host, code in (("evil.example", "403"), ("node-7:9470", "200"), ("localhost", "200")):
            for path in ("/", "/state", "/metrics"):
                assert (await get(service.ready.admin, path, host))[0][9:12] == code


@pytest.mark.parametrize(
    ("settings", "good"),
    [
        ({}, False),
        ({"admin": "127.0.0.1:1"}, False),
        ({"admin": "[::1]:1"}, False),
        ({"admin": "0.0.0.0:1", "allow_remote": True}, True),
        ({"admin": "0.0.0.0:1", "allow_remote": True, "admin_hosts": ("a",)}, False),
    ],
)
def test_names_are_checked_where_they_are_known(settings: dict[str, object], good: bool) -> None:
    assert (b"other" in hosts_of(ServeConfig(**settings))) == good


@pytest.mark.parametrize("name", ["", "a b", "a:1", "http://a", "a..b", "é"])
def test_what_is_no_name_of_a_host(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^admin_hosts\[0\]: expected a host's name"):
        ServeConfig(admin_hosts=(name,))


async def test_many_who_ask_at_once_cost_one_look(run) -> None:
    async with run(admin=LOCAL) as service:
        first = service.admin._encoded()
        assert service.admin._encoded() is first
        await asyncio.sleep(2 * FRESH_S)
        assert service.admin._encoded() is not first


# where it listens


def test_two_sidecars_of_one_machine_both_have_one() -> None:
    first, second = listen("auto"), listen("auto")
    assert first is not None
    assert second is not None
    assert url_of(first) != url_of(second)
    first.close()
    second.close()


def test_off_is_off_and_an_address_that_was_asked_for_is_had_or_refused() -> None:
    assert listen("off") is None
    refused = pytest.raises(ConfigError, match=r"^admin: expected an address that can be bound")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        listen(f"127.0.0.1:{taken.getsockname()[1]}")
    with refused:
        listen("no such host:1")


def test_ipv6_is_written_in_brackets() -> None:
    sock = listen("[::1]:0")
    assert sock is not None
    assert re.fullmatch(r"http://\[::1\]:\d+", url_of(sock))
    sock.close()


# the page


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = PAGE.read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.search(r"<(script|link|img|iframe)[^>]* src=", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


async def test_the_page_reads_only_what_the_state_has(run, engine) -> None:
    async with run(admin=LOCAL) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, make_chain(range(8), 4), [0, 1])
        state = service.instruments.state()
    read = set(re.findall(r"\bstate\.(\w+)", PAGE.read_text()))
    assert read <= set(state)
    assert len(read) > 10
