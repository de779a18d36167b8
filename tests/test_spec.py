"""proto/SPEC.md is true: each hex block is what the code makes, each error code is in its table, and an engine
written from that page alone, with nothing of this package, holds the example session with a real sidecar."""

import array
import ast
import fcntl
import mmap
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

ROOT = Path(__file__).parents[1]
SPEC = (ROOT / "proto" / "SPEC.md").read_text(encoding="utf-8")
DEADLINE_S = 20.0

HASH_BYTES, BLOCK_TOKENS, BLOCK_BYTES, BLOCKS = 16, 4, 64, 6
HASHES = [bytes([0xA0 + i]) * 8 + bytes([0xB0 + i]) * 8 for i in range(3)]
TOKENS = list(range(100, 112))
TS = 1_700_000_000.5
BOOT_ID = "0123456789abcdef0123456789abcdef"


# the page


def hex_blocks() -> dict[str, bytes]:
    """Blocks fenced as "```hex NAME", by name. A # starts a note; spaces and line ends mean nothing."""
    blocks = re.findall(r"^```hex (\S+)\n(.*?)^```$", SPEC, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len({name for name, _ in blocks}), "a name twice"
    assert len(blocks) == SPEC.count("```hex"), "a hex block without a name"
    return {name: bytes.fromhex(re.sub(r"#.*", "", text)) for name, text in blocks}


def made_by_the_code() -> dict[str, bytes]:
    """What stands in each block, from this package's own encoders."""
    from kvevents_service.core.announce import encode, removed_event, stored_event
    from kvevents_service.core.metadata import RemovedRun, snapshot
    from kvevents_service.wire import control
    from kvevents_service.wire.codec import encode_batch
    from kvevents_service.wire.dialects import DIALECTS
    from kvevents_service.wire.events import AllBlocksCleared, EventBatch
    from kvevents_service.wire.frames import REPLAY_END, replay_request
    from kvevents_service.wire.framing import encode_message
    from kvevents_service.wire.name_board import BOARD_BYTES
    from kvevents_service.wire.packing import pack_int32

    group = control.GroupSpec(0, "full_attention", BLOCK_TOKENS)
    memory = control.Memory(BLOCKS * BLOCK_BYTES)
    region = control.Region("layer.0", 0, 0, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
    offer = control.Offer("req-1", 0, b"".join(HASHES), pack_int32(TOKENS), pack_int32([0, 1, 2]))
    meta = snapshot(offer, group, "CPU", HASH_BYTES)
    main = snapshot(offer, msgspec.structs.replace(group, main=True), "CPU", HASH_BYTES)
    messages = {
        "hello": control.Hello(
            1, "engine", "example-0", "example/model-a", HASH_BYTES, [group], [memory], [region]
        ),
        "welcome": control.Welcome(1, BOOT_ID, 1, 64, BLOCK_BYTES, BOARD_BYTES),
        "step": control.Step(1, [offer]),
        "step_done": control.StepDone(1, 3, 0, 0),
        "lookup": control.Lookup(2, "req-2", b"".join(HASHES)),
        "hit": control.Hit(2, 3, 2),
        "load": control.Load(3, "req-2", 2, pack_int32([3, 4, 5])),
        "loaded": control.Loaded(3, 3),
        "error": control.Error(None, "bad_message", "message", "one msgpack value"),
        "reset": control.Reset(4),
        "reset_done": control.ResetDone(4, 3),
    }
    removed = removed_event(RemovedRun(group, "CPU", tuple(HASHES[::-1])))
    return {
        **{name: bytes(encode_message(message)) for name, message in messages.items()},
        "stored-batch": encode_batch(EventBatch(TS, [stored_event(meta)], 0)),
        "removed-batch": encode_batch(EventBatch(TS, [removed], 0)),
        "llm-d-batch": encode(DIALECTS["llm-d"], (main,), TS, 0),
        "cleared-batch": encode_batch(EventBatch(TS, [AllBlocksCleared()], 0)),
        "replay-request": replay_request(0)[1],
        "replay-end": REPLAY_END[2],
    }


BLOCKS_OF_SPEC = hex_blocks()
MADE = made_by_the_code()


@pytest.mark.parametrize("name", [*MADE, *BLOCKS_OF_SPEC.keys() - MADE.keys()])
def test_a_hex_block_is_what_the_code_makes(name: str) -> None:
    assert name in MADE, "nothing here makes this block"
    assert BLOCKS_OF_SPEC.get(name, b"").hex() == MADE[name].hex()


def codes_of_the_source() -> set[str]:
    """First argument of every ControlError, and the code of every refusal."""
    position = {"ControlError": 0, "_refuse": 1, "_turn_away": 1}
    codes = set()
    for path in (ROOT / "kvevents_service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                argument = next(iter(node.args[position[name] :]), None) if name in position else None
                if isinstance(argument, ast.Constant):
                    codes.add(argument.value)
    return codes


def table_under(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its head; backticks stripped."""
    lines = SPEC.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_error_codes_is_the_source() -> None:
    documented = [row[0] for row in table_under("Error codes")]
    assert len(documented) == len(set(documented))
    assert set(documented) == codes_of_the_source()


def test_the_table_of_bounds_is_the_source() -> None:
    from kvevents_service.core import allowance, announce, groups, journal, offers, replay, tier
    from kvevents_service.service import engines, handshake, replayer, session, sidecar
    from kvevents_service.service import snapshot_endpoint as endpoint
    from kvevents_service.wire import codec, control

    replays, asked = replay.ReplayLimits(), allowance.AllowanceLimits()
    journal_limits, limits = journal.JournalLimits(), tier.Limits()
    assert {row[0]: row[1] for row in table_under("Bounds")} == {
        "frame body": f"{control.MAX_FRAME_BYTES} bytes",
        "hello body": f"{control.MAX_HELLO_BYTES} bytes",
        "hello deadline": f"{handshake.HELLO_DEADLINE_S:g} s",
        "descriptors on a hello": str(handshake.MAX_FDS),
        "sessions": str(engines.MAX_SESSIONS),
        "groups": str(groups.MAX_GROUPS),
        "ranks of an engine": str(handshake.MAX_RANKS),
        "tokens of a block": str(groups.MAX_BLOCK_SIZE),
        "hash width": f"{sidecar.HASH_BYTES.start} to {sidecar.HASH_BYTES.stop - 1} bytes",
        "blocks waiting to be stored": str(limits.max_pending_blocks),
        "offers, finished and preempted requests of a step": f"{control.MAX_STEP_ITEMS} each",
        "adapter's name": f"{offers.MAX_NAME_LETTERS} letters",
        "extra keys of a block": f"{offers.MAX_KEY_LETTERS} letters and bytes, "
        f"and {offers.KEY_LETTERS_A_TOKEN} more for each token",
        "leases": str(limits.max_leases),
        "lease": f"{limits.max_lease_s:g} s",
        "wait of a copy for its turn": f"{limits.transfer_deadline_s:g} s",
        "answers left unread": f"{session.MAX_UNREAD_BYTES} bytes",
        "event payload": f"{codec.MAX_PAYLOAD_BYTES} bytes",
        "batches not yet sent": str(journal_limits.pending_batches),
        "blocks in batches not yet sent": str(journal_limits.pending_blocks),
        "batches retained for replay": str(journal_limits.retained_batches),
        "bytes retained for replay": str(journal_limits.retained_bytes),
        "kept longer for replies under way": f"{journal_limits.needed_batches} batches, "
        f"{journal_limits.needed_bytes} bytes",
        "replays of one output at a time": str(replayer.MAX_CLIENTS),
        "requests of one host, replays and snapshots": f"{asked.requests_per_s:g} a second (`requests_per_s`), "
        f"{asked.burst_s:g} seconds' worth at once",
        "bytes of answers to one host": f"{int(asked.bytes_per_s)} a second (`answer_bytes_per_s`), likewise",
        "one replay": f"{replayer.STALL_S:g} s without progress, {replayer.CLIENT_DEADLINE_S:g} s in all",
        "numbers in a reply with a snapshot": f"{replays.reach}; exact ones {replays.exact_reach}",
        "snapshots in memory": str(replays.snapshots),
        "an exact reply, and each message of a state told live": f"{replays.exact.payload_bytes} bytes",
        "events of a batch": str(announce.MAX_BATCH_EVENTS),
        "snapshot requests": f"{endpoint.MAX_WAITING} waiting, {endpoint.MAX_UNREAD} unread answers, "
        f"{endpoint.MAX_REPLY_BYTES} bytes, {endpoint.DEADLINE_S:g} s",
    }


# an engine written from the page alone


def int32s(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def frame(message: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


class Engine:
    """A socket, a memfd, and plain lists. Every wait has a deadline."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self.fd = os.memfd_create("engine")
        os.ftruncate(self.fd, size_bytes)
        self.memory = mmap.mmap(self.fd, size_bytes)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)

    def close(self) -> None:
        self.socket.close()
        self.memory.close()
        os.close(self.fd)

    def hello(self, message: list[Any]) -> list[Any]:
        self.send_hello(message)
        return self.receive()

    def send_hello(self, message: list[Any]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.fd]))
        data = frame(message)
        sent = self.socket.sendmsg([data], [rights])
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def send(self, message: list[Any]) -> None:
        self.socket.sendall(frame(message))

    def receive(self) -> list[Any]:
        (length,) = struct.unpack("<I", self._exactly(4))
        message: list[Any] = msgspec.msgpack.decode(self._exactly(length))
        return message

    def ask(self, message: list[Any]) -> list[Any]:
        self.send(message)
        return self.receive()

    def leave(self) -> bytes:
        """Shut down the writing side and wait for the end of the stream; returns what came before it."""
        self.socket.shutdown(socket.SHUT_WR)
        rest = b""
        while part := self.socket.recv(65536):
            rest += part
        return rest

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the sidecar closed the connection"
            data += part
        return data


HELLO = [
    *("hello", 1, "engine", "example-0", "example/model-a", HASH_BYTES),
    [[0, "full_attention", BLOCK_TOKENS, None, True, False]],
    [[BLOCKS * BLOCK_BYTES, None, None]],
    [["layer.0", 0, 0, BLOCK_BYTES, BLOCK_BYTES, BLOCKS]],
    0,
    1,
    0,
    [],
]
OFFER = ["req-1", 0, b"".join(HASHES), int32s(TOKENS), int32s([0, 1, 2]), None, None, None, None, None]
STEP = ["step", 1, [OFFER], [], [], None]
LOOKUP = ["lookup", 2, "req-2", b"".join(HASHES), 10.0, 0, False]


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, "no ready line"
    line = process.stdout.readline()
    assert line, f"the sidecar ended at its start: exit {process.wait(DEADLINE_S)}"
    return line


@contextmanager
def running_sidecar(folder: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """A real `kvevents serve`, ended by its own pid; gives its ready line."""
    arguments = ["--engine-socket", str(folder / "engine.sock"), "--host-bytes", str(64 * BLOCK_BYTES)]
    endpoints = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--log-level", "warning"]
    command = [sys.executable, "-m", "kvevents_service", "serve", *arguments, *endpoints, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield msgspec.json.decode(first_line(process))
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


@contextmanager
def zmq_socket(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        sock.connect(endpoint)
        yield sock


def replay(endpoint: str, *request: bytes) -> list[list[bytes]]:
    """Every message of a reply, the end marker last."""
    with zmq_socket(zmq.DEALER, endpoint) as dealer:
        dealer.send_multipart(request)
        messages = [dealer.recv_multipart()]
        while messages[-1][2] != b"\xff" * 8:
            messages.append(dealer.recv_multipart())
        return messages


def with_ts(payload: bytes) -> bytes:
    """The payload as if its batch had been numbered at TS."""
    assert payload[:2] == b"\x93\xcb"
    return payload[:2] + struct.pack(">d", TS) + payload[10:]


def stored(engine: Engine) -> None:
    """The first half of the example: three blocks are offered and stored."""
    for block in range(3):
        engine.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([block + 1]) * BLOCK_BYTES
    assert engine.ask(STEP) == ["step_done", 1, 3, 0, 0]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with running_sidecar(tmp_path_factory.mktemp("spec")) as ready:
        yield ready


@pytest.fixture
def engine(sidecar: dict[str, Any]) -> Iterator[Engine]:
    with closing(Engine(sidecar["engine_socket"], BLOCKS * BLOCK_BYTES)) as engine:
        yield engine


def test_the_example_session(tmp_path: Path) -> None:
    """With a sidecar of its own: the page's ids and numbers are those of a first session."""
    with (
        running_sidecar(tmp_path) as sidecar,
        closing(Engine(sidecar["engine_socket"], BLOCKS * BLOCK_BYTES)) as engine,
    ):
        storing_and_loading(sidecar, engine)
        an_error(engine)
        events(sidecar, engine)
        assert engine.leave() == b""


def storing_and_loading(sidecar: dict[str, Any], engine: Engine) -> None:
    assert frame(HELLO) == BLOCKS_OF_SPEC["hello"]
    welcome = engine.hello(HELLO)
    assert welcome == ["welcome", 1, sidecar["boot_id"], 1, 64, BLOCK_BYTES, 1 << 22]
    assert frame([*welcome[:2], BOOT_ID, *welcome[3:]]) == BLOCKS_OF_SPEC["welcome"]

    assert frame(STEP) == BLOCKS_OF_SPEC["step"]
    stored(engine)

    assert frame(LOOKUP) == BLOCKS_OF_SPEC["lookup"]
    hit = engine.ask(LOOKUP)
    assert frame(hit) == BLOCKS_OF_SPEC["hit"]
    load = ["load", 3, "req-2", hit[3], int32s([3, 4, 5]), None, None]
    assert frame(load) == BLOCKS_OF_SPEC["load"]
    assert frame(engine.ask(load)) == BLOCKS_OF_SPEC["loaded"]
    half = 3 * BLOCK_BYTES
    assert engine.memory[half:] == engine.memory[:half] == b"".join(bytes([i]) * BLOCK_BYTES for i in (1, 2, 3))


def an_error(engine: Engine) -> None:
    engine.socket.sendall(b"\x01\x00\x00\x00\xc1")  # 0xc1 is no MessagePack
    assert frame(engine.receive()) == BLOCKS_OF_SPEC["error"]


def events(sidecar: dict[str, Any], engine: Engine) -> None:
    batch, end = replay(sidecar["replay"], b"", BLOCKS_OF_SPEC["replay-request"])
    assert batch[:3] == [b"", b"", bytes(8)]
    assert with_ts(batch[3]) == BLOCKS_OF_SPEC["stored-batch"]
    assert end == [b"", b"", BLOCKS_OF_SPEC["replay-end"], b""]

    assert frame(["reset", 4]) == BLOCKS_OF_SPEC["reset"]
    assert frame(engine.ask(["reset", 4])) == BLOCKS_OF_SPEC["reset_done"]
    removed, _ = replay(sidecar["replay"], (1).to_bytes(8, "big"))  # without the delimiter
    assert with_ts(removed[3]) == BLOCKS_OF_SPEC["removed-batch"]


def stats(engine: Engine) -> list[Any]:
    return engine.ask(["inspect", 1000, True])


def test_a_live_message_is_the_replayed_one(sidecar: dict[str, Any], engine: Engine) -> None:
    engine.hello(HELLO)
    with zmq_socket(zmq.SUB, sidecar["pub"]) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        until = time.monotonic() + DEADLINE_S
        while not subscriber.poll(20):  # a PUB socket forgets what it sent before it knew the subscriber
            assert time.monotonic() < until
            engine.ask(["reset", 4])
            stored(engine)
        topic, seq, payload = subscriber.recv_multipart()
    assert topic == b""
    assert len(seq) == 8
    assert replay(sidecar["replay"], b"", seq)[0] == [b"", topic, seq, payload]


@pytest.mark.parametrize("request_frames", [[b"", b"\x00"], [b"x" * 8], [b"", b"", bytes(8)], [b"", b"\x7f" * 8]])
def test_a_bad_replay_request_gets_the_end_marker(sidecar: dict[str, Any], request_frames: list[bytes]) -> None:
    assert replay(sidecar["replay"], *request_frames) == [[b"", b"", b"\xff" * 8, b""]]


REFUSED: dict[str, tuple[list[Any], list[Any]]] = {
    "not_now": (HELLO, [None]),
    "bad_group": (["step", 7, [[*OFFER[:1], 1, *OFFER[2:]]]], [7]),
    "bad_block_ids": (["load", 8, "r", 1, int32s([BLOCKS])], [8]),
    "bad_hashes": (["lookup", 9, "r", b"\x00"], [9]),
    "bad_lease": (["lookup", 10, "r", b"", -1.0], [10]),
    "bad_message": (["lookup", "eleven", "r", b""], [None]),
}


@pytest.mark.parametrize("code", REFUSED)
def test_a_refused_message_is_answered_and_the_session_lives(engine: Engine, code: str) -> None:
    engine.hello(HELLO)
    message, call_id = REFUSED[code]
    answer = engine.ask(message)
    assert [answer[0], answer[1], answer[2]] == ["error", *call_id, code]
    assert engine.ask(["lookup", 12, "r", b"", 1.0]) == ["hit", 12, 0, None]


def changed(position: int, value: Any) -> list[Any]:
    return [*HELLO[:position], value, *HELLO[position + 1 :]]


TURNED_AWAY: dict[str, list[Any]] = {
    "no_hello": STEP,
    "bad_protocol": changed(1, 2),
    "bad_role": changed(2, "router"),
    "bad_hello": changed(5, 7),
    "bad_groups": changed(6, []),
    "unsupported_group": changed(6, [[0, "mamba", BLOCK_TOKENS]]),
    "bad_memory": changed(8, [["layer.0", 0, 0, BLOCK_BYTES, BLOCK_BYTES, BLOCKS + 1]]),
    "bad_message": changed(4, None),
}


@pytest.mark.parametrize("code", TURNED_AWAY)
def test_a_refused_hello_is_answered_and_closed(engine: Engine, code: str) -> None:
    assert engine.hello(TURNED_AWAY[code])[:3] == ["error", None, code]
    assert engine.socket.recv(1) == b""


def test_one_namespace_at_a_time(sidecar: dict[str, Any], engine: Engine) -> None:
    engine.hello(HELLO)
    with closing(Engine(sidecar["engine_socket"], BLOCKS * BLOCK_BYTES)) as other:
        assert other.hello(changed(4, "example/model-b"))[:3] == ["error", None, "other_layout"]
    with closing(Engine(sidecar["engine_socket"], BLOCKS * BLOCK_BYTES)) as twin:
        assert twin.hello(HELLO)[0] == "welcome"
        assert twin.leave() == b""


def test_elements_at_the_end_are_ignored(engine: Engine) -> None:
    assert engine.hello([*HELLO, {"new": True}])[0] == "welcome"
    assert engine.ask([*LOOKUP, "new"])[:2] == ["hit", 2]


def test_elements_with_a_default_are_left_out_and_a_float_may_be_an_integer(engine: Engine) -> None:
    short = [[0, "full_attention", BLOCK_TOKENS]], [[BLOCKS * BLOCK_BYTES]], *HELLO[8:9]
    assert engine.hello([*HELLO[:6], *short])[0] == "welcome"
    assert engine.ask(["lookup", 2, "req-2", b"", 10]) == ["hit", 2, 0, None]


def test_descriptors_ride_on_any_byte_of_the_hello(engine: Engine) -> None:
    data = frame(HELLO)
    engine.socket.sendall(data[:-1])
    engine.socket.sendmsg([data[-1:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [engine.fd]))])
    assert engine.receive()[0] == "welcome"


UNDESCRIBED: dict[str, list[Any]] = {
    "bad_lengths": [*OFFER[:3], int32s(TOKENS[:-1]), *OFFER[4:]],
    "bad_tokens": [*OFFER[:3], int32s([-1, *TOKENS[1:]]), *OFFER[4:]],
    "bad_hash": [*OFFER[:5], b"short", *OFFER[6:]],
    "bad_extra_keys": [*OFFER[:8], [[{"a": "map"}], None, None], None],
    "bad_inner": [*OFFER[:9], [[0, 1, HASHES[0]]]],
}


@pytest.mark.parametrize("reason", UNDESCRIBED)
def test_an_offer_that_cannot_be_described_is_declined_and_the_rest_of_the_step_is_not(
    engine: Engine, reason: str
) -> None:
    engine.hello(changed(4, reason))
    before = stats(engine)[4][f"declined_{reason}"]
    assert engine.ask(["step", 1, [UNDESCRIBED[reason], OFFER]]) == ["step_done", 1, 3, 0, 3]
    assert stats(engine)[4][f"declined_{reason}"] - before == 3


@pytest.mark.parametrize("ids", [[3, 4], [3, 4, 5, 0]])
def test_a_load_whose_ids_do_not_fit_its_hit_is_a_load_of_0(engine: Engine, ids: list[int]) -> None:
    engine.hello(changed(4, f"loads into {ids}"))
    stored(engine)
    hit = engine.ask(LOOKUP)
    assert hit[2] == 3
    assert engine.ask(["load", 3, "req-2", hit[3], int32s(ids), 3]) == ["loaded", 3, 0]


def test_the_name_board_says_what_need_not_be_asked(engine: Engine) -> None:
    engine.send_hello(changed(4, "shows its names"))
    data, ancillary, _, _ = engine.socket.recvmsg(65536, socket.CMSG_LEN(4))
    welcome = msgspec.msgpack.decode(data[4:])
    (fd,) = struct.unpack("i", ancillary[0][2])
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with mmap.mmap(fd, welcome[6], prot=mmap.PROT_READ) as board:
        cells = [int.from_bytes(name[-4:], sys.byteorder) % len(board) for name in HASHES]
        assert [board[cell] for cell in cells] == [0, 0, 0]
        stored(engine)
        assert all(board[cell] for cell in cells)
    os.close(fd)


def test_an_observer_only_looks(engine: Engine) -> None:
    assert engine.hello(["hello", 1, "observer", "watcher"])[4:] == [0, 0, 0]
    assert engine.ask(LOOKUP)[:3] == ["error", 2, "not_now"]
    tag, call_id, next_seq, width, counters, _ = stats(engine)
    assert (tag, call_id) == ("inspected", 1000)
    assert width == 8
    assert counters["next_seq"] == next_seq


def test_a_frame_that_announces_too_much_ends_the_session(engine: Engine) -> None:
    engine.hello(HELLO)
    engine.socket.sendall(struct.pack("<I", 64 * 1024 * 1024 + 1))
    assert engine.receive()[:3] == ["error", None, "bad_frame"]
    assert engine.socket.recv(1) == b""


def test_numbers_go_on_after_a_restart_with_a_state_directory(tmp_path: Path) -> None:
    def life(check: Callable[[dict[str, Any], Engine], None]) -> None:
        with (
            running_sidecar(tmp_path, "--state-dir", str(tmp_path / "state")) as ready,
            closing(Engine(ready["engine_socket"], BLOCKS * BLOCK_BYTES)) as engine,
        ):
            engine.hello(HELLO)
            check(ready, engine)
            engine.leave()

    life(lambda _, engine: stored(engine))

    def second(ready: dict[str, Any], engine: Engine) -> None:
        first = ready["first_seq"]  # 0: stored, 1: removed, because the sidecar was stopped in good order
        assert 2 <= first < 100  # and perhaps a heartbeat
        cleared, *_ = replay(ready["replay"], b"", first.to_bytes(8, "big"))
        assert cleared[2] == first.to_bytes(8, "big")
        assert with_ts(cleared[3]) == BLOCKS_OF_SPEC["cleared-batch"]

    life(second)
