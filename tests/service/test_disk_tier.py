"""A sidecar whose tier is a file: a real engine process on it, its events, and settings that do not fit."""

import asyncio
import os
import signal
import sys
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from rank_engine import PIPELINE, RankMemory
from test_engine_plane import RawPeer, chain, engine_hello, fold

from kvevents_service.config import ServeConfig
from kvevents_service.core.residency import key64
from kvevents_service.engine.layout import uniform_layers
from kvevents_service.errors import ConfigError
from kvevents_service.service.app import Service, started
from kvevents_service.testing import make_chain
from kvevents_service.wire.control import Error, Memory, Reset, Welcome

TRACE = files("kvevents_service") / "data" / "conversation-200.jsonl"
BLOCK_BYTES = 128
"""Of the small engine of these tests."""


async def check(service: Service, inspected: object) -> None:
    """The oracle, on the medium of this tier, and on no other."""
    folded = await fold(service, inspected.next_seq)  # type: ignore[attr-defined]
    folded.check()
    packed = b"".join(shelf.block_hashes for shelf in inspected.residents)  # type: ignore[attr-defined]
    assert {shelf.medium for shelf in inspected.residents} == {"STORAGE"}  # type: ignore[attr-defined]
    resident = {key64(packed[i : i + 8]) for i in range(0, len(packed), 8)}
    assert folded.hashes("STORAGE", 0) == resident
    assert len(folded) == len(resident)


async def serve_a_trace(service: Service, requests: int) -> dict[str, object]:
    """The reference engine as a process, on production traffic; it verifies every byte that it loads."""
    words = ("--engine-socket", service.ready.engine_socket, "--trace", str(TRACE), "--requests", str(requests))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvevents_service.engine", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
    return msgspec.json.decode(out.splitlines()[-1])


async def test_an_engine_gets_its_bytes_back_from_the_disk_and_the_stream_says_storage(
    run, engine, tmp_path: Path
) -> None:
    blocks = 12000
    async with run(host_bytes=None, disk_path=str(tmp_path), disk_bytes=blocks * 2048) as service:
        counts = await serve_a_trace(service, 48)
        assert (counts["done"], counts["requests"], counts["corrupt_blocks"]) == (True, 48, 0)
        assert counts["bytes_verified"] > 0
        inspected = service.sidecar.inspect(1, residents=True).inspected()
        assert inspected.stats["blocks_removed"] > 0
        assert inspected.stats["blocks_resident"] > blocks // 2
        await check(service, inspected)


async def test_ranks_on_disk(run, tmp_path: Path) -> None:
    from test_ranks import BLOCK_BYTES as ALL_BYTES
    from test_ranks import Pipeline

    async with run(host_bytes=None, disk_path=str(tmp_path), disk_bytes=20 * ALL_BYTES) as service:
        engine = await asyncio.to_thread(Pipeline, service.ready.engine_socket)
        await asyncio.to_thread(engine.start, 0, 1, 2)
        assert await asyncio.to_thread(engine.store, chain(1, 8), list(range(8)), 10) == (8, 0)
        assert await asyncio.to_thread(engine.load, chain(1, 8), list(range(30, 38))) == 8
        assert engine.hold(list(range(30, 38)), 10)
        await check(service, service.sidecar.inspect(1, residents=True).inspected())
        await asyncio.to_thread(engine.close)
    assert len(PIPELINE) == len([RankMemory(rank, shape).close() for rank, shape in enumerate(PIPELINE)])


@pytest.mark.parametrize("page_cache", [False, True])
async def test_the_page_cache_is_used_where_it_is_asked_for(run, engine, tmp_path: Path, page_cache: bool) -> None:
    disk = {"host_bytes": None, "disk_path": str(tmp_path), "disk_bytes": 1 << 20, "disk_page_cache": page_cache}
    async with run(**disk) as service:
        mini = await asyncio.to_thread(engine)
        mini.fill(3, 41)
        await asyncio.to_thread(mini.store, chain(1, 1), [3])
        assert await asyncio.to_thread(mini.load, chain(1, 1), [9]) == 1
        assert mini.holds(9, 41)
        assert service.sidecar.stats()["disk_direct"] <= (not page_cache)
        assert service.sidecar.stats()["disk_errors_checksum"] == 0


async def test_a_file_that_lost_its_bytes_makes_loads_misses_and_the_sidecar_goes_on(
    run, engine, tmp_path: Path
) -> None:
    async with run(host_bytes=None, disk_path=str(tmp_path), disk_bytes=32 * BLOCK_BYTES) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, chain(1, 4), [0, 1, 2, 3])
        storage = service.sidecar._tiers.storages[0]
        os.ftruncate(storage.fd, 0)
        assert await asyncio.to_thread(mini.load, chain(1, 4), [10, 11, 12, 13]) == 0
        assert service.sidecar.stats()["disk_errors_short"] == 4
        mini.fill(5, 77)
        await asyncio.to_thread(mini.store, chain(2, 1), [5])  # a write makes the file grow again
        assert await asyncio.to_thread(mini.load, chain(2, 1), [20]) == 1
        assert mini.holds(20, 77)
        await check(service, service.sidecar.inspect(1, residents=True).inspected())


@pytest.mark.parametrize(
    ("settings", "field", "expected"),
    [
        ({"host_bytes": 63}, "host_bytes", "64 bytes"),
        ({"host_bytes": 640, "host_blocks": 11}, "host_blocks", "at most 10"),
        ({"host_bytes": None, "disk_path": "", "disk_bytes": 63}, "disk_bytes", "64 bytes"),
        ({"host_bytes": None, "disk_path": "", "disk_bytes": 640, "disk_blocks": 11}, "disk_blocks", "at most 10"),
    ],
)
async def test_a_tier_that_does_not_fit_the_engine_names_its_setting(
    run, tmp_path: Path, settings: dict[str, object], field: str, expected: str
) -> None:
    if "disk_path" in settings:
        settings = {**settings, "disk_path": str(tmp_path)}
    async with run(**settings) as service, RawPeer(service.ready.engine_socket) as peer:
        name = f"kvevents-test-disk-{os.getpid()}"
        Path("/dev/shm", name).write_bytes(bytes(4096))
        memory = msgspec.structs.replace(engine_hello().memories[0], shm_name=name)
        await peer.send(engine_hello(memories=[memory]))
        answer = await peer.answer()
        assert isinstance(answer, Error)
        assert (answer.code, answer.field) == ("tier_too_small", field)
        assert expected in answer.expected


@pytest.mark.parametrize("kind", ["host", "disk"])
async def test_a_tier_has_no_more_blocks_than_it_may(run, engine, tmp_path: Path, kind: str) -> None:
    disk = {"host_bytes": None, "disk_path": str(tmp_path), "disk_bytes": 4096, "disk_blocks": 3}
    async with run(**(disk if kind == "disk" else {"host_blocks": 3})) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, make_chain(range(32), 4), list(range(8)))
        assert service.sidecar.stats()["blocks_resident"] == 3


@pytest.mark.parametrize(("path", "size", "setting"), [("absent", 4096, "disk_path"), ("", 1 << 60, "disk_bytes")])
async def test_a_disk_that_cannot_be_had_ends_the_start(tmp_path: Path, path: str, size: int, setting: str) -> None:
    config = ServeConfig(
        engine_socket=str(tmp_path / "s"),
        pub="tcp://127.0.0.1:0",
        replay=None,
        disk_path=str(tmp_path / path),
        disk_bytes=size,
    )
    with pytest.raises(ConfigError) as error:
        async with started(config):
            pass
    assert error.value.setting == setting


async def test_a_disk_without_direct_io_is_said_in_the_log(
    run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of less than two sectors has none."""
    disk = {"host_bytes": None, "disk_path": str(tmp_path), "disk_bytes": 4096}
    async with run(**disk):
        assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
            f"disk_path: no direct I/O in {tmp_path}: copies go through the page cache"
        ]
    caplog.clear()
    async with run(**disk, disk_page_cache=True):
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_reset_that_the_disk_is_not_told_of_is_no_success(run, engine, tmp_path: Path) -> None:
    disk = {"host_bytes": None, "disk_path": str(tmp_path), "disk_bytes": 4096, "disk_keep": True}
    async with run(**disk) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, chain(1, 4), [0, 1, 2, 3])
        fd = service.sidecar._tiers.storages[0]._index._file.fd
        kept, full = os.dup(fd), os.open("/dev/full", os.O_RDWR)
        os.dup2(full, fd)
        name = f"kvevents-test-reset-{os.getpid()}"
        Path("/dev/shm", name).write_bytes(bytes(8192))
        async with RawPeer(service.ready.engine_socket) as peer:
            same = {"memories": [Memory(8192, name)], "regions": uniform_layers(2, 64, 64)}
            await peer.send(engine_hello(**same))
            assert isinstance(await peer.answer(), Welcome)
            await peer.send(Reset(5))
            answer = await peer.answer()
        os.dup2(kept, fd)
        os.close(full)
        os.close(kept)
        assert isinstance(answer, Error)
        assert (answer.call_id, answer.code, answer.field) == (5, "not_forgotten", "disk_path")
        assert service.sidecar.stats()["blocks_resident"] == 0
        await check(service, service.sidecar.inspect(1, residents=True).inspected())
