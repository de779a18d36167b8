"""tests/gpu/run.sh: its logic, with shared memory in the place of the GPU; and what it says where there is none."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvevents_service import cuda

SCRIPT = Path(__file__).with_name("run.sh")
CHECKS = [
    "expandable_segments_are_refused",
    "store_evict_load",
    "fences_under_reuse",
    "killed_mid_copy",
    "leave",
    "connector",
    "vllm_engine",
]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        [SCRIPT, *flags], env=environment, capture_output=True, text=True, check=False, timeout=115
    )


def test_every_check_is_good_without_a_gpu_and_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    done = run("--cpu")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, [line for line in lines if not line["ok"]]) == (0, []), done.stderr
    assert [line["check"] for line in lines] == ["machine", *CHECKS, "copy_16KiB", "copy_64KiB"]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvevents-cpu")]


def test_a_machine_without_a_gpu_is_told_so() -> None:
    try:
        ctypes.CDLL(cuda.LIBRARY)
    except OSError:
        done = run()
        assert (done.returncode, done.stdout) == (3, "")
        assert "no GPU here, nothing was checked" in done.stderr
    else:
        pytest.skip("this machine has a driver")
