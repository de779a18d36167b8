"""The whole path as a person runs it: the demo, with kill -9 of either side, and tail beside it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvevents_service.cli import demo_run
from kvevents_service.items import Batch
from kvevents_service.wire.control import Inspected, Residents
from kvevents_service.wire.events import BlockStored, EventBatch

KVEVENTS = [sys.executable, "-m", "kvevents_service"]
LONG_S = 100
ENDPOINTS = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
KEYS = {
    *("requests", "hit_tokens", "prompt_tokens", "blocks_stored", "blocks_removed", "blocks_resident"),
    *("bytes_moved", "bytes_verified", "corrupt_blocks", "gaps", "stream_matches_resident"),
}


class Demo:
    """A demo under way. `wait_for` reads its chatter until a process has started."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*KVEVENTS, "demo", "--json", *ENDPOINTS, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.chatter: list[str] = []

    def wait_for(self, start: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.chatter.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(self.chatter)

    def kill(self, line: str) -> None:
        os.kill(pid_in(line), signal.SIGKILL)

    def summary(self) -> dict[str, int]:
        out, err = self.process.communicate(timeout=LONG_S)
        assert self.process.returncode == 0, (self.chatter, err, out)
        return json.loads(out)


def pid_in(line: str) -> int:
    return int(re.search(r"pid (\d+)", line)[1])  # type: ignore[index]


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Nothing of a demo's is left in /dev/shm; other tests, which run beside, have names of their own there."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if not name.startswith(("kvevents-test", "kvevents-cpu", "torch_", "sem."))]


def assert_true(summary: dict[str, int]) -> None:
    assert summary.keys() >= KEYS
    assert summary["corrupt_blocks"] == 0
    assert summary["gaps"] == 0
    assert summary["stream_matches_resident"] is True
    assert summary["blocks_resident"] > 0


def test_the_demo_serves_from_the_tier_and_ends_true(shared_memory: None) -> None:
    summary = Demo("--host-bytes", str(192 << 20)).summary()
    assert_true(summary)
    assert summary["requests"] == 200
    assert summary["hit_tokens"] > 0
    assert summary["bytes_verified"] > 0
    assert summary["blocks_removed"] > 0
    assert summary["blocks_stored"] - summary["blocks_removed"] == summary["blocks_resident"]


@pytest.mark.parametrize("options", [["--tier", "disk"], ["--tier", "cpu+disk"]], ids=lambda words: words[1])
def test_the_demo_serves_from_other_tiers(shared_memory: None, options: list[str]) -> None:
    """As the first one; of two tiers both are full, and one is the other's."""
    sizes = ["--disk-bytes", str(192 << 20), *(["--host-bytes", str(48 << 20)] if "+" in options[1] else [])]
    summary = Demo(*options, *sizes).summary()
    assert_true(summary)
    assert (summary["requests"], summary["hit_tokens"] > 0, summary["bytes_verified"] > 0) == (200, True, True)
    assert summary["blocks_stored"] - summary["blocks_removed"] == summary["blocks_resident"]
    media = {"STORAGE": (192 << 20) // 2048, **({"CPU": (48 << 20) // 2048} if "+" in options[1] else {})}
    assert summary["blocks_resident_on"] == media
    if "+" in options[1]:
        assert summary["blocks_demoted"] > media["STORAGE"]
        assert summary["blocks_promoted"] > 0
        assert summary["evicted_unsaved"] < summary["blocks_demoted"] // 2


def test_a_hybrid_model_cascades(shared_memory: None) -> None:
    summary = Demo("--tier", "cpu+disk", "--model", "hybrid", "--host-bytes", str(32 << 20)).summary()
    assert_true(summary)
    assert summary["blocks_demoted"] > 0
    assert summary["blocks_promoted"] > 0


def test_kill_9_of_the_sidecar_costs_hits_and_nothing_else(shared_memory: None) -> None:
    demo = Demo("--requests", "120")
    sidecar = demo.wait_for("sidecar: pid")
    demo.wait_for("engine: pid")
    progress(demo)
    demo.kill(sidecar)
    demo.wait_for("sidecar: pid")
    summary = demo.summary()
    assert_true(summary)
    assert summary["sidecar_restarts"] == 1
    assert summary["requests"] == 120


def test_kill_9_of_the_engine_keeps_the_blocks_for_its_successor(shared_memory: None) -> None:
    demo = Demo("--requests", "120")
    demo.wait_for("sidecar: pid")
    engine = demo.wait_for("engine: pid")
    progress(demo)
    demo.kill(engine)
    demo.wait_for("engine: pid")
    summary = demo.summary()
    assert_true(summary)
    assert summary["engine_restarts"] == 1
    assert summary["hit_tokens"] > 0


def progress(demo: Demo) -> None:
    """Wait until the demo has served some requests."""
    demo.wait_for("served")


def test_kill_9_of_the_demo_ends_both(shared_memory: None) -> None:
    demo = Demo()
    started = [demo.wait_for("sidecar: pid"), demo.wait_for("engine: pid")]
    progress(demo)
    demo.process.kill()
    demo.process.communicate(timeout=LONG_S)  # its streams end when the last of its children has ended
    deadline = time.monotonic() + LONG_S  # an ending process closes its streams first
    while any(runs(pid_in(line)) for line in started):
        assert time.monotonic() < deadline, "a child outlived the demo"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pipe_gets_events_only_if_it_asks_for_them() -> None:
    words = [*KVEVENTS, "demo", *ENDPOINTS, "--requests", "3"]
    calm, full = (
        subprocess.run([*words, *options], capture_output=True, text=True, timeout=LONG_S, check=True)
        for options in ([], ["--events"])
    )
    assert calm.stdout.startswith("\nrequests served  ")
    assert re.match(r"[0-9:.]{12} #\d+ +stored ", full.stdout)
    assert full.stdout.splitlines()[-1] == calm.stdout.splitlines()[-1]


def test_a_closed_pipe_ends_it_in_silence() -> None:
    shell = ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *KVEVENTS, "demo", *ENDPOINTS, "--events"]
    result = subprocess.run(shell, capture_output=True, text=True, timeout=LONG_S)
    assert (result.returncode, result.stdout.count("\n")) == (0, 1)
    assert all(line.startswith(("sidecar: ", "engine: ", "served ")) for line in result.stderr.splitlines())


def test_tail_beside_a_running_demo_prints_one_object_per_event() -> None:
    demo = Demo("--requests", "120")
    line = demo.wait_for("sidecar: pid")
    pub, replay = re.search(r"events on (\S+), replay on (\S+)", line).groups()  # type: ignore[union-attr]
    tail = [*KVEVENTS, "tail", pub, "--replay", replay, "--json"]
    counted = subprocess.run([*tail, "--count", "50"], capture_output=True, text=True, timeout=LONG_S, check=True)
    events = [json.loads(printed) for printed in counted.stdout.splitlines()]
    assert len(events) == 50
    assert {event["type"] for event in events} <= {"BlockStored", "BlockRemoved"}
    piped = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *tail],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert (piped.returncode, piped.stderr.replace(f"following {pub}\n", "")) == (0, "")
    assert json.loads(piped.stdout)["type"] == "BlockStored"
    assert_true(demo.summary())


SMALL_CACHE = ["--engine-blocks", "7900"]


@pytest.mark.parametrize(
    "options",
    [
        ["--offload", "lazy"],
        ["--model", "hybrid", *SMALL_CACHE],
        ["--model", "hybrid", "--offload", "lazy", *SMALL_CACHE],
    ],
    ids=" ".join,
)
def test_other_models_caches_and_ways_to_offload_end_true(options: list[str]) -> None:
    summary = Demo("--requests", "120", *options).summary()
    assert_true(summary)
    assert summary["hit_tokens"] > 0
    assert summary["bytes_verified"] > 0
    assert bool(summary["preemptions"]) or "--engine-blocks" not in options


def test_demos_that_start_at_once_take_other_ports() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    demos = [Demo("--requests", "3", "--pub", endpoint) for _ in range(2)]
    for summary in [demo.summary() for demo in demos]:
        assert_true(summary)
        assert summary["sidecar_restarts"] == 0


async def test_the_books_are_compared_at_the_number_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = demo_run.DemoSettings(tmp_path, tmp_path, 1, 1, "full", "eager", 1, 1, "", "")
    run = demo_run.DemoRun(settings, lambda _: None, lambda _: None)
    names = [block.to_bytes(8, "big") for block in (11, 12)]
    books = [Inspected(1, seq, 8, {}, [Residents("STORAGE", 0, b"".join(names[:seq]))]) for seq in (1, 2)]
    monkeypatch.setattr(demo_run, "inspect", lambda _: books.pop(0))
    for number, seq in enumerate((0, 1)):  # a block has come to the disk since the first books
        stored = BlockStored([11 + number], None, [1], 1, None, "STORAGE", None)
        run.follower._take(Batch(b"", seq, EventBatch(0.0, [stored]), (), False))
    run.follower._take(Batch(b"", 2, EventBatch(0.0, []), (), False))  # which says nothing of any block
    await run._compare()
    assert (run.summary.stream_matches_resident, run.summary.blocks_resident) == (True, 2)
