"""A sidecar process on free ports, for the commands that look at one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG_S = 60


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Its ready line."""
    folder: Path = tmp_path_factory.mktemp("sidecar")
    free = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command = [sys.executable, "-m", "kvevents_service", "serve", "--engine-socket", str(folder / "run" / "e.sock")]
    with subprocess.Popen(
        [*command, *free, "--host-bytes", "1MiB", "--log-level", "warning"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()
        process.wait(LONG_S)
