"""A router's index, written from proto/SPEC.md alone, holds what a real sidecar holds. The consumer, down to "the
sidecar", uses pyzmq and MessagePack only."""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from test_spec import BLOCK_BYTES, BLOCKS, DEADLINE_S, HELLO, ROOT, STEP, Engine, first_line

Blocks = dict[tuple[str, int], set[int]]
ARRAYS = {
    "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"],
    "BlockRemoved": ["block_hashes", "medium"],
}
"""What stands in an event that is an array, after its type, as far as it is used here."""
SETTLE_S = 1.0


class Index:
    """What is resident by (medium, group), from one publisher's stream."""

    def __init__(self, pub: str, replay: str, snapshot: str = "", topic: bytes = b"", exact: bool = False) -> None:
        self.replay, self.snapshot, self.topic, self.exact = replay, snapshot, topic, exact
        self.blocks: Blocks = defaultdict(set)
        self.last, self.live, self.publisher = -1, -1, b""
        self.restarts = 0
        self.replayed_at, self.settled = float("inf"), False
        self.context = zmq.Context()
        self.sub = self.socket(zmq.SUB, pub)
        self.sub.subscribe(topic)
        if not exact:
            self.join()

    def socket(self, kind: int, endpoint: str) -> Any:
        made = self.context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVHWM, 0)
        made.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        made.connect(endpoint)
        return made

    def close(self) -> None:
        self.context.destroy(linger=0)

    def join(self) -> None:
        if self.snapshot:
            self.take_snapshot()
        else:
            self.take(self.reply(0))

    def take_snapshot(self) -> None:
        with self.socket(zmq.REQ, self.snapshot) as req:
            req.send(b"snapshot")
            seq, self.publisher, *payloads = req.recv_multipart()
        self.last = int.from_bytes(seq, "big", signed=True)
        self.blocks.clear()
        for payload in payloads:
            self.fold(payload)

    def reply(self, start: int) -> list[tuple[int, bytes]]:
        """A whole reply, or zmq.Again: what has no end marker counts for nothing."""
        with self.socket(zmq.DEALER, self.replay) as dealer:
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            messages = [dealer.recv_multipart()]
            while messages[-1][2] != b"\xff" * 8:
                messages.append(dealer.recv_multipart())
        self.replayed_at, self.settled = time.monotonic(), False
        numbered = [(int.from_bytes(seq, "big"), payload) for _, _, seq, payload in messages[:-1]]
        return numbered

    def exact_reply(self, start: int, live: int) -> list[tuple[int, bytes]]:
        """What a reader of the dialect vllm-router takes: all from `start` to the live number, or nothing."""
        numbered = self.reply(start)
        if [seq for seq, _ in numbered[: live + 1 - start]] == list(range(start, live + 1)):
            return numbered[: live + 1 - start]
        self.blocks.clear()
        return []

    def take(self, numbered: list[tuple[int, bytes]]) -> None:
        for seq, payload in numbered:
            if seq > self.last:
                self.fold(payload)
                self.last = seq

    def pump(self, seconds: float) -> None:
        """Fold what comes within that time."""
        until = time.monotonic() + seconds
        while self.sub.poll(max(0.0, until - time.monotonic()) * 1000):
            topic, seq, payload = self.sub.recv_multipart()
            if topic == self.topic:
                self.heard(int.from_bytes(seq, "big"), payload)
        self.settled = time.monotonic() > self.replayed_at + SETTLE_S

    def heard(self, seq: int, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload)
        publisher = batch[3] if len(batch) > 3 else self.publisher
        newest = self.last if self.settled else self.live
        if publisher != self.publisher or seq <= newest:
            self.restarts, self.last, self.publisher = self.restarts + 1, -1, publisher
            self.blocks.clear()
            if not self.exact:
                self.join()
        self.live = seq
        if seq > self.last + 1:
            start = self.last + 1
            self.take(self.exact_reply(start, seq) if self.exact else self.reply(start))
        assert self.exact or seq <= self.last + 1, "still a hole"
        self.take([(seq, payload)])

    def fold(self, payload: bytes) -> None:
        for raw in msgspec.msgpack.decode(payload)[1]:
            event = raw if isinstance(raw, dict) else self.named(raw)
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] in ARRAYS:
                self.change(event)

    def named(self, raw: list[Any]) -> dict[str, Any]:
        return {"type": raw[0], **dict(zip(ARRAYS.get(raw[0], ()), raw[1:], strict=False))}

    def change(self, event: dict[str, Any]) -> None:
        held = self.blocks[(event["medium"] or "GPU").upper(), event.get("group_idx") or 0]
        hashes = set(event["block_hashes"])
        if event["type"] == "BlockRemoved":
            held -= hashes
            return
        assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
        if event.get("kv_cache_spec_kind") == "full_attention":
            assert event["parent_block_hash"] in {None, *held}
        held |= hashes


# the sidecar


def serve(folder: Path, config: str, *flags: str) -> subprocess.Popen[bytes]:
    """A real `kvevents serve` that listens."""
    (folder / "config.toml").write_text(config)
    socket = ["--engine-socket", str(folder / "e"), "--host-bytes", "3000000", "--log-level", "warning"]
    command = [sys.executable, "-m", "kvevents_service", "serve", *socket, "--config", str(folder / "config.toml")]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE)
    first_line(process)
    return process


@contextmanager
def life(folder: Path, config: str, *flags: str) -> Iterator[None]:
    """One process, ended by SIGKILL."""
    with serve(folder, config, *flags) as process:
        try:
            yield
        finally:
            process.kill()


def traffic(folder: Path, model: str = "full", requests: int = 12) -> None:
    """The reference engine serves a slice of a trace."""
    trace = ROOT / "kvevents_service" / "data" / "conversation-200.jsonl"
    where = ["--engine-socket", str(folder / "e"), "--trace", str(trace), "--model", model]
    command = [sys.executable, "-m", "kvevents_service.engine", *where, "--requests", str(requests)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)


def truth(folder: Path) -> Blocks:
    with closing(Engine(str(folder / "e"), BLOCK_BYTES)) as observer:
        observer.send(["hello", 1, "observer", "truth"])
        assert observer.receive()[0] == "welcome"
        *_, width, _, residents = observer.ask(["inspect", 1, True])
    return {
        (medium, group): {int.from_bytes(packed[i : i + width], "big") for i in range(0, len(packed), width)}
        for medium, group, packed in residents
        if packed
    }


def assert_holds(folder: Path, index: Index, said: Callable[[int], int] = int, groups: int = 255) -> None:
    """The index comes to hold what is resident, as its dialect says it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        index.pump(0.1)
        expected = {place: set(map(said, hashes)) for place, hashes in truth(folder).items() if place[1] < groups}
        if {place: hashes for place, hashes in index.blocks.items() if hashes} == expected:
            return
        assert time.monotonic() < deadline, "the index is not what is resident"


def until_heard(index: Index) -> None:
    """A live number came: the subscription works, and a restart will be seen."""
    deadline = time.monotonic() + DEADLINE_S
    before = index.live
    while index.live == before:
        assert time.monotonic() < deadline, "nothing is live"
        index.pump(0.1)


@pytest.fixture
def ends(tmp_path: Path) -> dict[str, str]:
    return {name: f"ipc://{tmp_path}/{name}" for name in ("pub", "replay")}


@pytest.fixture
def join() -> Iterator[Callable[..., Index]]:
    """Makes indexes, and closes them."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Index(**options)))


def output(**settings: Any) -> str:
    """Settings of an output whose late readers need a snapshot."""
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in settings.items()]
    return "\n".join(["retained_batches = 20", "[[outputs]]", *lines])


def test_live_late_reset_and_restart(tmp_path: Path, ends: dict[str, str], join: Callable[..., Index]) -> None:
    settings = tmp_path, output(**ends), "--state-dir", str(tmp_path / "state")
    with life(*settings):
        live = join(**ends)
        traffic(tmp_path, "hybrid")
        assert_holds(tmp_path, live)
        late = join(**ends)
        assert_holds(tmp_path, late)
        with closing(Engine(str(tmp_path / "e"), BLOCKS * BLOCK_BYTES)) as engine:
            engine.hello(HELLO)
            assert engine.ask(STEP)[2] == 3
            assert_holds(tmp_path, live)
            assert engine.ask(["reset", 9]) == ["reset_done", 9, 3]
            assert_holds(tmp_path, live)
            assert engine.ask(["step", 10, *STEP[2:]])[2] == 3
            engine.leave()
    with life(*settings):
        until_heard(late)
        assert_holds(tmp_path, late)
        traffic(tmp_path)
        assert_holds(tmp_path, late)
        assert_holds(tmp_path, live)
    assert live.restarts == late.restarts == 0


def test_a_restart_without_a_state_directory(
    tmp_path: Path, ends: dict[str, str], join: Callable[..., Index]
) -> None:
    """Nothing live was heard before it: the number alone tells, when nothing can be on its way any more."""
    with life(tmp_path, "heartbeat_s = 0\n" + output(**ends)):
        traffic(tmp_path)
        late = join(**ends)
        assert late.blocks
        late.pump(SETTLE_S * 1.1)
        assert late.live == -1
    with life(tmp_path, output(**ends)):
        until_heard(late)
        assert_holds(tmp_path, late)
        assert late.restarts == 1


def test_the_snapshot_endpoint(tmp_path: Path, ends: dict[str, str], join: Callable[..., Index]) -> None:
    ends["snapshot"] = f"ipc://{tmp_path}/snapshot"
    with life(tmp_path, output(**ends)):
        traffic(tmp_path)
        late = join(**ends)
        assert_holds(tmp_path, late)
    with life(tmp_path, output(**ends)):
        until_heard(late)
        assert_holds(tmp_path, late)
        assert late.restarts == 1


def test_llm_d(tmp_path: Path, ends: dict[str, str], join: Callable[..., Index]) -> None:
    def low63(number: int) -> int:
        low = number & (2**63 - 1)
        return low if low >= 2**32 else low | 2**62

    with life(tmp_path, output(dialect="llm-d", topic="kv@pod@model", **ends)):
        live = join(**ends, topic=b"kv@pod@model")
        traffic(tmp_path, "hybrid")
        assert_holds(tmp_path, live, low63, groups=1)
        assert_holds(tmp_path, join(**ends, topic=b"kv@pod@model"), low63, groups=1)


def test_a_state_told_live(tmp_path: Path, ends: dict[str, str], join: Callable[..., Index]) -> None:
    """The numbers are past 100,000 from the start, so one who asks from 0 is told live."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "next-seq").write_text("200000\n")
    with life(tmp_path, output(dialect="vllm-router", **ends), "--state-dir", str(tmp_path / "state")):
        traffic(tmp_path)
        first = join(**ends, exact=True)
        assert_holds(tmp_path, first, groups=1)
        assert_holds(tmp_path, join(**ends, exact=True), groups=1)
        assert_holds(tmp_path, first, groups=1)
        assert (first.restarts, first.last > 200_000) == (0, True)
