"""The engine plane over real sockets: store, look up, load, and everything a bad peer can do."""

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path

import msgspec
import pytest

from kvevents_service.core.residency import Residency, key64
from kvevents_service.errors import ConfigError, SidecarGone
from kvevents_service.service.engines import listen
from kvevents_service.subscriber import Batch, Subscriber
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    Error,
    GroupSpec,
    Hello,
    Inspect,
    Inspected,
    Lookup,
    Memory,
    Region,
    Step,
    Welcome,
)
from kvevents_service.wire.framing import FrameReader, decode_sidecar, encode_message

DEADLINE_S = 20.0


def chain(seed: int, blocks: int) -> Chain:
    return make_chain([(seed * 1009 + i * 7) % 30_000 for i in range(blocks * 4)], 4)


async def fold(service, next_seq: int) -> Residency:
    folded = Residency()
    async with asyncio.timeout(DEADLINE_S), Subscriber(service.ready.pub, replay=service.ready.replay) as stream:
        async for item in stream:
            assert isinstance(item, Batch), item
            folded.apply(item.batch.events)
            if item.seq + 1 == next_seq:
                return folded
    raise AssertionError("the stream ended")


async def assert_stream_is_true(service, inspected: Inspected, medium: str = "CPU") -> None:
    """The oracle: the fold of the stream is the resident set (I4)."""
    folded = await fold(service, inspected.next_seq)
    folded.check()
    packed = inspected.residents[0].block_hashes
    resident = {key64(packed[i : i + 8]) for i in range(0, len(packed), inspected.hash_bytes)}
    assert folded.hashes(medium, 0) == resident
    assert len(folded) == len(resident)


async def test_stored_blocks_come_back_byte_for_byte(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        prompt = chain(1, 8)
        for block in range(8):
            mini.fill(block, 10 + block)
        ended = await asyncio.to_thread(mini.store, prompt, list(range(8)))
        assert ended.steps[0].stored == 8
        assert await asyncio.to_thread(mini.load, prompt, list(range(40, 48))) == 8
        assert all(mini.holds(40 + block, 10 + block) for block in range(8))
        inspected = await asyncio.to_thread(mini.client.inspect, residents=True)
        assert inspected.stats["blocks_resident"] == 8
        assert inspected.stats["bytes_moved"] == 16 * 128
        await assert_stream_is_true(service, inspected)


async def test_the_event_is_complete_when_the_request_is_long_gone(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        prompt = chain(2, 3)
        await asyncio.to_thread(mini.store, prompt, [5, 3, 9], ("r",))
        async with Subscriber(service.ready.pub, replay=service.ready.replay) as stream:
            item = await asyncio.wait_for(anext(stream), DEADLINE_S)
        event = item.batch.events[0]
        assert event.token_ids == list(prompt.token_ids)
        assert event.block_hashes == [key64(block_hash) for block_hash in prompt.hashes]
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, 4, "CPU")
        assert (event.group_idx, event.kv_cache_spec_kind, event.locality) == (0, "full_attention", "LOCAL")
        assert item.batch.data_parallel_rank == 0


async def test_eviction_under_pressure_keeps_the_stream_true(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        for seed in range(12):
            await asyncio.to_thread(mini.store, chain(seed, 8), list(range(8)))
        inspected = await asyncio.to_thread(mini.client.inspect, residents=True)
        assert inspected.stats["blocks_removed"] == 12 * 8 - 32
        await assert_stream_is_true(service, inspected)


async def test_a_reset_is_said_at_once_by_removals(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, chain(1, 4), [0, 1, 2, 3])
        assert await asyncio.to_thread(mini.client.reset) == 4
        assert (await asyncio.to_thread(mini.client.lookup, "r", list(chain(1, 4).hashes))).blocks == 0
        await assert_stream_is_true(service, await asyncio.to_thread(mini.client.inspect, residents=True))
        assert (await fold(service, 2)).removed == 4


async def test_blocks_outlive_their_engine_and_serve_the_next_one(run, engine) -> None:
    async with run() as service:
        first = await asyncio.to_thread(engine)
        first.fill(7, 99)
        await asyncio.to_thread(first.store, chain(3, 1), [7])
        assert await asyncio.to_thread(first.client.close, 5.0)
        second = await asyncio.to_thread(engine)
        assert len(service.sidecar.roster.engines) == 1
        assert await asyncio.to_thread(second.load, chain(3, 1), [20]) == 1
        assert second.holds(20, 99)


async def test_another_model_gets_an_empty_tier_once_no_engine_is_left(run, engine) -> None:
    async with run() as service:
        first = await asyncio.to_thread(engine)
        await asyncio.to_thread(first.store, chain(3, 2), [0, 1])
        await asyncio.to_thread(first.client.close, 5.0)
        other = await asyncio.to_thread(lambda: engine(namespace="other"))
        assert (await asyncio.to_thread(other.client.lookup, "r", list(chain(3, 2).hashes))).blocks == 0
        await asyncio.to_thread(other.store, chain(4, 2), [0, 1])
        await assert_stream_is_true(service, await asyncio.to_thread(other.client.inspect, residents=True))


async def test_draining_says_that_every_block_is_gone(tmp_path: Path, run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, chain(1, 4), [0, 1, 2, 3])
        await service.drain()
        folded = await fold(service, service.publisher.journal.next_seq)
        assert len(folded) == 0
        assert folded.removed == 4


# bad peers


class RawPeer:
    """A peer that writes what it likes, in the test's loop."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.path = path
        self.frames = FrameReader()

    async def __aenter__(self) -> "RawPeer":
        await asyncio.get_running_loop().sock_connect(self.sock, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    async def send(self, *messages: msgspec.Struct | bytes) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else bytes(encode_message(message))
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def answer(self) -> object:
        """The next message; None at EOF."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            while data := await loop.sock_recv(self.sock, 65536):
                for body in self.frames.feed(data):
                    return decode_sidecar(body)
        return None


OBSERVER = Hello(PROTOCOL_VERSION, "observer", "test")


def engine_hello(**changes: object) -> Hello:
    hello = Hello(
        PROTOCOL_VERSION,
        "engine",
        "raw",
        "tiny",
        32,
        [GroupSpec(0, "full_attention", 4)],
        [Memory(4096, "kvevents-test-absent")],
        [Region("l", 0, 0, 64, 64, 64)],
    )
    return msgspec.structs.replace(hello, **changes)


@pytest.mark.parametrize(
    ("hello", "code", "field"),
    [
        (engine_hello(protocol=99), "bad_protocol", "protocol"),
        (engine_hello(role="boss"), "bad_role", "role"),
        (engine_hello(), "bad_memory", "shm_name"),
        (engine_hello(memories=[Memory(4096)]), "bad_memory", "memories"),
        (engine_hello(memories=[Memory(4096, "../etc/passwd")]), "bad_memory", "shm_name"),
        (engine_hello(memories=[Memory(4096, "a\0b")]), "bad_memory", "shm_name"),
        (engine_hello(regions=[]), "bad_memory", "regions"),
        (engine_hello(regions=[Region("l", 1, 0, 64, 64, 64)]), "bad_memory", "regions[0].memory"),
        (engine_hello(regions=[Region("l", 0, 0, 64, 64, 65)]), "bad_memory", "regions[0]"),
        (engine_hello(regions=[Region("l", 0, 0, 64, 32, 64)]), "bad_memory", "regions[0].stride_bytes"),
        (engine_hello(regions=[Region("l", 0, -1, 64, 64, 1)]), "bad_memory", "regions[0]"),
        (Step(1, []), "no_hello", "message"),
    ],
)
async def test_a_hello_that_cannot_be_is_answered_and_closed(run, hello, code: str, field: str) -> None:
    async with run() as service, RawPeer(service.ready.engine_socket) as peer:
        await peer.send(hello)
        answer = await peer.answer()
        assert isinstance(answer, Error)
        assert (answer.code, answer.field) == (code, field)
        assert await peer.answer() is None


async def test_an_unusable_hello_of_groups_names_the_group(run, tmp_path: Path) -> None:
    name = f"kvevents-test-{os.getpid()}"
    Path("/dev/shm", name).write_bytes(bytes(4096))
    hello = engine_hello(memories=[Memory(4096, name)], groups=[GroupSpec(0, "mamba", 4)])
    async with run() as service, RawPeer(service.ready.engine_socket) as peer:
        await peer.send(hello)
        answer = await peer.answer()
        assert isinstance(answer, Error)
        assert (answer.code, answer.field) == ("unsupported_group", "groups")


async def test_named_memory_is_unlinked_as_soon_as_it_is_mapped(run) -> None:
    path = Path("/dev/shm", f"kvevents-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    async with run() as service, RawPeer(service.ready.engine_socket) as peer:
        await peer.send(engine_hello(memories=[Memory(4096, path.name)]))
        assert isinstance(await peer.answer(), Welcome)
        assert not path.exists()


async def test_a_second_layout_is_refused_while_an_engine_is_there(run, engine) -> None:
    path = Path("/dev/shm", f"kvevents-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    async with run() as service:
        await asyncio.to_thread(engine)
        async with RawPeer(service.ready.engine_socket) as peer:
            await peer.send(engine_hello(memories=[Memory(4096, path.name)]))
            answer = await peer.answer()
            assert isinstance(answer, Error)
            assert answer.code == "other_layout"


async def test_malformed_frames_are_answered_and_end_no_session(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        async with RawPeer(service.ready.engine_socket) as peer:
            await peer.send(OBSERVER)
            assert isinstance(await peer.answer(), Welcome)
            for body in (b"\xc1", b"", b"\x93\xa5hello", b"\x92\xa4step\xcf", b"\x05", b"\x91\xa7unknown"):
                await peer.send(struct.pack("<I", len(body)) + body)
                answer = await peer.answer()
                assert isinstance(answer, Error)
                assert answer.code == "bad_message"
            await peer.send(Lookup(3, "r", b""))
            answer = await peer.answer()
            assert (answer.call_id, answer.code) == (3, "not_now")
            await peer.send(Inspect(4))
            assert (await peer.answer()).call_id == 4
        assert (await asyncio.to_thread(mini.store, chain(1, 2), [0, 1])).steps[0].stored == 2


async def test_a_frame_that_announces_too_much_ends_only_its_sender(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        async with RawPeer(service.ready.engine_socket) as peer:
            await peer.send(OBSERVER)
            await peer.answer()
            await peer.send(b"\xff\xff\xff\xff")
            assert (await peer.answer()).code == "bad_frame"
            assert await peer.answer() is None
        assert (await asyncio.to_thread(mini.store, chain(1, 2), [0, 1])).steps[0].stored == 2


async def test_block_ids_outside_the_memory_are_refused_before_anything_changed(run, engine) -> None:
    async with run():
        mini = await asyncio.to_thread(engine)
        ended = await asyncio.to_thread(mini.store, chain(1, 1), [64])
        assert (ended.steps[0].stored, ended.steps[0].declined) == (0, 0)
        assert "bad_block_ids" in mini.client.last_error
        inspected = await asyncio.to_thread(mini.client.inspect)
        assert inspected.stats["blocks_pending"] == inspected.stats["blocks_resident"] == 0


# the socket


async def test_the_socket_is_private(run) -> None:
    async with run() as service:
        path = Path(service.ready.engine_socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listen(path).close()
    listen(path).close()


def test_a_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listen(path), pytest.raises(ConfigError, match="nobody else listens"):
        listen(path)


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match="no other file"):
        listen(str(tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "precious"


async def test_an_observer_asks_without_memory(run) -> None:
    from kvevents_service.cli.demo_run import inspect

    async with run() as service:
        assert (await asyncio.to_thread(inspect, service.ready.engine_socket)).next_seq == 0
    with pytest.raises(SidecarGone):
        await asyncio.to_thread(inspect, service.ready.engine_socket, 0.1)
