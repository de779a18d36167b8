"""What a peer or the machine can do to the sidecar, and what it costs: that peer's own session at most."""

import asyncio
import os
import resource
import socket
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from kvevents_service.core.announce import EVENT_WEIGHT, MAX_BATCH_TOKENS, in_batches
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import BlockStoreMeta, Cleared, RemovedRun
from kvevents_service.errors import ControlError
from kvevents_service.service.handshake import read_greeting
from kvevents_service.testing import make_chain
from kvevents_service.transfer.memory import attach
from kvevents_service.wire.codec import MAX_PAYLOAD_BYTES
from kvevents_service.wire.control import Error, GroupSpec, Memory, Region, Step
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.framing import encode_message, peek_id

CHAIN = make_chain(range(16), 4)
GROUP = GroupSpec(0, "full_attention", 4, main=True)


async def test_out_of_descriptors_is_waited_out(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        peers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
        try:
            for peer in peers:
                peer.connect(service.ready.engine_socket)
            assert (await asyncio.to_thread(mini.store, CHAIN, [0, 1, 2, 3])).steps[0].stored == 4
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for peer in peers:
                peer.close()
        second = await asyncio.to_thread(engine)
        assert await asyncio.to_thread(second.load, CHAIN, [10, 11, 12, 13]) == 4


@pytest.mark.parametrize(("count", "room", "expected"), [(64, 0, "limit of open files"), (65, 999, "at most 64")])
async def test_no_room_for_descriptors_is_not_called_too_many(count: int, room: int, expected: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        socket.send_fds(theirs, [bytes(4)], [0] * count)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + room), hard))
        try:
            with pytest.raises(ControlError, match=expected):
                await read_greeting(ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_draining_sidecar_takes_no_more_steps(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        service.sidecar.draining = True
        ended = await asyncio.to_thread(mini.store, CHAIN, [0, 1, 2, 3])
        assert ended.steps[0].stored == 0
        assert "draining" in mini.client.last_error


def test_a_memfd_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 256)
    with pytest.raises(ControlError, match="F_SEAL_SHRINK"):
        attach([Memory(256)], [Region("l", 0, 0, 64, 64, 4)], [fd])


async def test_a_step_that_cannot_be_understood_is_refused_by_its_id(run, engine) -> None:
    async with run():
        mini = await asyncio.to_thread(engine)
        step_id = mini.client.step([CHAIN.offer([0, 1, 2, 3], group="zero")])  # type: ignore[arg-type]
        ended = await asyncio.to_thread(mini.wait)
        assert [done.step_id for done in ended.steps] == [step_id]
        assert mini.client.last_error.startswith("bad_message")


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (bytes(encode_message(Step(7, []))[4:]), 7),
        (bytes(encode_message(Error(7, "a", "b", "c"))[4:]), None),
        (b"\x92\xa4step\xa1x", None),
        (b"\x92\xa4step\xc3", None),
        (b"\x91\xa4step", None),
        (b"\xc1", None),
        (b"", None),
    ],
)
def test_the_id_of_a_broken_message_is_read_where_it_can_be(body: bytes, number: int | None) -> None:
    assert peek_id(body) == number


def test_the_id_is_read_without_the_rest() -> None:
    lists = 1 << 20
    body = b"\x93\xa4step\x07\xdd" + lists.to_bytes(4, "big") + b"\x90" * lists
    tracemalloc.start()
    assert peek_id(body) == 7
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < lists


# batches


def meta(blocks: int, block_size: int = 4) -> BlockStoreMeta:
    hashes = b"".join(number.to_bytes(32, "big") for number in range(blocks))
    group = GroupSpec(0, "full_attention", block_size, main=True)
    return BlockStoreMeta(group, "CPU", 32, hashes, bytes(4 * block_size * blocks), None, None, None, None)


def test_a_small_batch_stays_one() -> None:
    said = (meta(3), RemovedRun(GROUP, "CPU", (b"x" * 32,)), Cleared())
    assert list(in_batches(said)) == [said]


def test_nothing_to_say_is_no_batch() -> None:
    assert list(in_batches(())) == []


def test_a_large_store_is_split_into_parts_that_chain() -> None:
    whole = meta(MAX_BATCH_TOKENS // 16)
    parts = [piece for batch in in_batches((whole,)) for piece in batch]
    assert len(parts) == 2
    assert b"".join(part.block_hashes for part in parts) == whole.block_hashes
    assert b"".join(part.token_ids for part in parts) == whole.token_ids
    assert parts[1].parent_block_hash == parts[0].hash_at(parts[0].blocks - 1)


def test_a_block_larger_than_a_batch_goes_alone() -> None:
    assert [len(batch) for batch in in_batches((meta(2, MAX_BATCH_TOKENS + 1),))] == [1, 1]


def test_a_large_removal_is_split_in_order() -> None:
    most = MAX_BATCH_TOKENS // EVENT_WEIGHT
    hashes = tuple(number.to_bytes(8, "big") for number in range(most + 1))
    batches = list(in_batches((RemovedRun(GROUP, "CPU", hashes),)))
    assert [len(run.block_hashes) for (run,) in batches] == [most, 1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_batch_of_small_blocks_is_too_large_in_any_dialect(dialect: str) -> None:
    """A frame of the engine plane full of the smallest blocks there are, each an event."""
    one = meta(1, block_size=1)
    gpu = msgspec.structs.replace(one, medium="GPU")
    hashes = (b"\xff" * 32,) * 100_000
    said = ([gpu] * 100_000, [RemovedRun(one.group, "GPU", hashes)])
    for announcements in said:
        batches = [*in_batches(announcements)]
        assert len(batches) > 1
        for batch in batches:
            assert len(Encoding(dialect).encode(batch, 1.0)) < MAX_PAYLOAD_BYTES / 3


async def test_closing_a_worker_fails_what_it_had_queued() -> None:
    from array import array

    from kvevents_service.core.metadata import TransferMeta
    from kvevents_service.engine.layout import SharedMemory, uniform_layers
    from kvevents_service.transfer.arena import HostArena
    from kvevents_service.transfer.worker import CopyFailed, CopyWorker

    shared = SharedMemory.create(64)
    memory = attach([Memory(64)], uniform_layers(1, 1, 64), [shared.fd])
    worker = CopyWorker("store", HostArena(1, 64), lambda: 0.0)  # never run: its queue is never served
    future = worker.submit(TransferMeta(1, "store", 1, 1, array("i", [0]), array("i", [0]), 1.0), memory)
    worker.close()
    with pytest.raises(CopyFailed, match="closed"):
        await future


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    from kvevents_service.errors import ConfigError
    from kvevents_service.service.engines import listen

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="only this user can write"):
        listen(str(shared / "s"))


# found by attack


async def test_memory_that_shrinks_fails_the_copy_and_not_the_sidecar(run) -> None:
    from kvevents_service.engine.client import OffloadClient
    from kvevents_service.engine.layout import EngineLayout, uniform_layers

    path = Path("/dev/shm", f"kvevents-test-shrink-{os.getpid()}")
    path.write_bytes(bytes(64 * 64))
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    async with run() as service:
        layout = EngineLayout("s", "shrink", [GROUP], [Memory(64 * 64)], uniform_layers(1, 64, 64), [fd])
        client = OffloadClient(service.ready.engine_socket, layout)
        assert await asyncio.to_thread(client.wait_connected, 10)
        os.ftruncate(fd, 0)
        assert client.step([CHAIN.offer(range(4))]) is not None
        ended = await asyncio.to_thread(client.poll, 10)
        assert [done.stored for done in ended.steps] == [0]
        await asyncio.to_thread(client.close, 10)
    os.close(fd)


async def test_a_state_directory_that_is_gone_does_not_stop_the_stream(run, engine, tmp_path: Path) -> None:
    import shutil

    async with run(state_dir=str(tmp_path / "state")) as service:
        mini = await asyncio.to_thread(engine)
        shutil.rmtree(tmp_path / "state")
        assert (await asyncio.to_thread(mini.store, CHAIN, [0, 1, 2, 3])).steps[0].stored == 4
        async with asyncio.timeout(10):
            while not service.publisher.batches_sent:
                await asyncio.sleep(0)
        assert service.publisher.stats()["state_write_failed"] >= 1


async def test_a_giant_subscription_is_cut_off(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        host, port = service.ready.pub.removeprefix("tcp://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x03SUB"
        writer.write(greeting + b"\x04" + bytes((len(ready),)) + ready)
        writer.write(b"\x02" + (1 << 20).to_bytes(8, "big") + b"\x01" + bytes(4096))
        async with asyncio.timeout(10):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1 << 20)
        writer.close()
        assert (await asyncio.to_thread(mini.store, CHAIN, [0, 1, 2, 3])).steps[0].stored == 4


async def test_tiny_blocks_do_not_make_the_books_larger_than_the_tier(run) -> None:
    from kvevents_service.service.open_tier import MAX_SLOTS

    async with run(host_bytes=1 << 40) as service:
        assert service.sidecar._tiers.capacities([1]) == [MAX_SLOTS]
