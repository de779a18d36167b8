"""`python -m kvevents_service.engine` as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path

from kvevents_service.errors import not_installed

TRACE = Path(__file__).parents[2] / "kvevents_service" / "data" / "conversation-200.jsonl"


def test_without_a_sidecar_it_serves_and_says_so(tmp_path: Path) -> None:
    nobody = str(tmp_path / "none.sock")
    words = ["--engine-socket", nobody, "--trace", str(TRACE), "--requests", "1", "--connect-wait", "0.2"]
    command = [sys.executable, "-m", "kvevents_service.engine", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.startswith(f"no sidecar at {nobody} (")
    assert json.loads(result.stdout.splitlines()[-1])["requests"] == 1


def test_without_torch_it_says_what_to_install() -> None:
    words = ["engine", "--engine-socket", "none", "--trace", str(TRACE)]
    blocked = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = {words!r}"
    code = f"{blocked}; runpy.run_module('kvevents_service.engine', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"Error: {not_installed('torch', 'offload')}"]
