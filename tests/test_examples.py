"""The examples, run as people run them: two sidecars, two engines that served different prompts, one router."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from kvevents_service.engine.trace import prompt_tokens, read_trace

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "kvevents_service" / "data" / "conversation-200.jsonl"
DEADLINE_S = 60
BLOCK = 16
PODS = {"pod-a": 0, "pod-b": 40}
"""The one request of the trace that each pod has served."""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        started.terminate()
        started.communicate(timeout=DEADLINE_S)


@contextmanager
def pod(directory: Path, served: int) -> Iterator[dict[str, str]]:
    """A sidecar whose engine has served one request and gone; its ready line."""
    socket = str(directory / f"{served}.sock")
    free = ("--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--log-level", "warning")
    with process("-m", "kvevents_service", "serve", "--engine-socket", socket, *free) as sidecar:
        ready = json.loads(sidecar.stdout.readline())
        engine = ("--engine-socket", socket, "--trace", str(TRACE), "--skip", str(served), "--requests", "1")
        subprocess.run(
            [sys.executable, "-m", "kvevents_service.engine", *engine],
            check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        yield ready


def ask(router: subprocess.Popen[str], prompt: list[int]) -> dict[str, object]:
    router.stdin.write(json.dumps({"token_ids": prompt}) + "\n")
    router.stdin.flush()
    return json.loads(router.stdout.readline())


def test_the_router_finds_the_pod_that_served_a_prompt(tmp_path: Path) -> None:
    with pod(tmp_path, PODS["pod-a"]) as a, pod(tmp_path, PODS["pod-b"]) as b:
        pods = [f"{name}={ready['pub']},{ready['replay']}" for name, ready in (("pod-a", a), ("pod-b", b))]
        with process(str(ROOT / "examples" / "router.py"), *pods) as router:
            for name, served in PODS.items():
                (line,) = islice(read_trace(TRACE), served, served + 1)
                prompt = list(prompt_tokens(line))
                deadline = time.monotonic() + DEADLINE_S
                while (answer := ask(router, prompt))["catching_up"]:
                    assert time.monotonic() < deadline, answer
                tokens = len(prompt) // BLOCK * BLOCK
                assert answer == {"pod": name, "tokens": tokens, "media": {"CPU": tokens}, "catching_up": []}
            assert ask(router, [1] * 100) == {"pod": None, "tokens": 0, "media": {}, "catching_up": []}


@pytest.mark.parametrize("name", ["router.py", "nats_reader.py"])
def test_an_example_without_its_arguments_says_how_it_is_called(name: str) -> None:
    if name == "nats_reader.py":
        pytest.importorskip("nats", reason="nats-py is not installed (extra: nats)")
    path = str(ROOT / "examples" / name)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"    python examples/{name} " in done.stderr
