"""`kvevents relay` as a process: ready line, a stream, signals, exit codes, no torch."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from core.engine_model import key, stored
from peers import peer

from kvevents_service.cli.relay import _OF_SOURCE, overrides
from kvevents_service.subscriber import Source, Subscriber

LONG_S = 30
ANY = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--log-level", "warning"]
FLAGS = dict.fromkeys([*_OF_SOURCE, "pub"])


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvevents_service", "relay", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate(timeout=LONG_S)


async def test_a_stream_comes_through_and_is_withdrawn_at_the_end(children: list[subprocess.Popen[str]]) -> None:
    async with peer(snapshots=False) as engine:
        engine.send(1, stored((0, 1), 2))
        children.append(start("--from", engine.endpoint, "--from-replay", engine.replay, *ANY))
        said = await asyncio.to_thread(ready, children[0])
        assert (said["ready"], said["sources"][0]["endpoint"]) == (True, engine.endpoint)
        out = said["outputs"][0]
        async with Subscriber(Source(out["pub"], out["replay"]), track=True) as subscriber:
            await _until(subscriber, {key((0,)), key((0, 1))})
            children[0].send_signal(signal.SIGTERM)
            await _until(subscriber, set())
        assert await asyncio.to_thread(children[0].wait, LONG_S) == 0


async def _until(subscriber: Subscriber, shown: set[int]) -> None:
    async with asyncio.timeout(LONG_S):
        async for _ in subscriber:
            if any(fold.hashes("GPU", 0) == shown for fold in subscriber.state().values()):
                return


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--from", "tcp://127.0.0.1:1"], "pub and replay"),
        ([*ANY], "sources"),
        (["--engine", "sglang", *ANY], "from"),
        (["--from", "nowhere", *ANY], "sources[0].endpoint"),
        (["--from", "tcp://127.0.0.1:1", "--dp-rank", "1-0", *ANY], "sources[0].dp_rank"),
        (["--from", "tcp://127.0.0.1:1", *ANY, "--pub", "tcp://0.0.0.0:0"], "pub"),
    ],
)
def test_bad_settings_are_2(options: list[str], setting: str, children: list[subprocess.Popen[str]]) -> None:
    children.append(start(*options))
    _, err = children[0].communicate(timeout=LONG_S)
    assert children[0].returncode == 2
    assert f"kvevents relay: {setting}: expected" in err


def test_flags_become_a_table() -> None:
    flags = FLAGS | {"endpoint": "tcp://h:1", "dp_rank": "2", "stale_after": 3.0, "pub": "p"}
    assert overrides(**flags) == {
        "pub": "p",
        "sources": [{"endpoint": "tcp://h:1", "dp_rank": 2, "stale_after_s": 3.0}],
    }
    assert overrides(**FLAGS) == {"pub": None, "sources": None}


def test_a_relay_needs_no_torch() -> None:
    code = "import sys, kvevents_service.cli, kvevents_service.service.relay_app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
