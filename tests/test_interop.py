"""`make interop` without the real routers: its own consumers right in a live stream, a missing program not ok."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 100


def interop(directory: Path, *consumers: str) -> tuple[int, list[dict[str, Any]]]:
    flags = [part for name in consumers for part in ("--consumer", name)]
    command = [sys.executable, ROOT / "tools/interop", directory, "--scenario", "live", *flags]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_line_says_who_what_and_whether(tmp_path: Path) -> None:
    code, lines = interop(tmp_path, "PrefixIndex", "llm-d", "sglang")
    told = [(line["consumer"], line["real"], line["scenario"], line["ok"]) for line in lines]
    expected = [("kvevents PrefixIndex", True), ("llm-d", False), ("sglang", False)]
    assert told == [(*who, "live", True) for who in expected], lines
    assert code == 0


def test_a_program_that_is_not_there_is_not_ok(tmp_path: Path) -> None:
    code, lines = interop(tmp_path, "dynamo", "sglang")
    assert [(line["consumer"], line["ok"]) for line in lines] == [("dynamo 1.6.1", False), ("sglang", True)]
    assert code == 1


def test_rows_that_need_an_engine_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/interop", tmp_path, "--scenario", "relay of a vLLM engine"]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, cwd=ROOT, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "5 rows with a real vLLM engine are left out: --engine DIR" in done.stderr
