"""A real vLLM on the device with the connector, where this Python has one: what its pool has lost comes back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tools/e2e/engine.py"
MARK = "e2e: "
ANSWER_S = 150.0
LENGTH, STORED = 130, 128
"""Tokens of the prompt, and of its full blocks."""
Result = dict[str, object]


def prompt(factor: int, length: int) -> list[int]:
    return [(place * factor + 3) % 500 for place in range(length)]


def commands() -> str:
    """A is asked, pushed out of a pool of 12 blocks, and asked again."""
    asked = [prompt(7, LENGTH), prompt(13, 200), prompt(17, 200), prompt(7, LENGTH)]
    return "".join(json.dumps({"do": "ask", "prompts": [each], "max_tokens": 8}) + "\n" for each in asked)


def run(directory: str, extra: dict[str, Any], cpu: bool) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cpu:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    words = [sys.executable, str(ENGINE), "--model", directory]
    subprocess.run([*words, "--make", "plain"], env=environment, check=True, capture_output=True, timeout=ANSWER_S)
    words += ["--connector", "KVEventsConnector", "--module", "kvevents_service.engine.vllm"]
    done = subprocess.run(
        [*words, "--extra", json.dumps(extra)],
        input=commands(),
        env=environment,
        text=True,
        capture_output=True,
        timeout=ANSWER_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(answer) for answer in answers]


def vllm_engine(path: str, cpu: bool) -> Result:
    if importlib.util.find_spec("vllm") is None:
        return {"ok": True, "skipped": "this Python has no vLLM"}
    with tempfile.TemporaryDirectory() as directory:
        ready, *answers = run(directory, {"sidecar": path, "lookup_timeout_s": 5.0}, cpu)
    first, last = answers[0], answers[-1]
    same, cached = first["tokens"] == last["tokens"], last["cached"][0]
    return {"ok": same and cached >= STORED, "vllm": ready["version"], "same_tokens": same, "cached": cached}
