"""`make fuzz`, short: bad input on every socket of a running sidecar harms nobody, and each has its answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 100
INPUTS = 2000


@pytest.mark.parametrize("seed", [1])
def test_nothing_dies_of_bad_input(seed: int) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--inputs", str(INPUTS), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    report = json.loads(done.stdout)
    assert (done.returncode, report["faults"]) == (0, []), done.stderr.decode()[-2000:]
    assert report["inputs"] >= INPUTS
    for kind in ("errors", "answers", "broken borders", "half hellos", "replay requests", "raw ZMTP messages"):
        assert report["counts"][kind] > 0, report
    assert report["healthy_blocks_loaded"] > 0
