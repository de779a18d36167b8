"""vLLM's answers to scripts, from its own process in the oracle's virtual environment."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from oracle.script import Answer, Script

SIDE = Path(__file__).with_name("vllm_side.py")


class OracleFailed(RuntimeError):
    """vLLM's process ended before it had answered; its last words are the message."""


class Oracle:
    """The process; a context. `folder` is the virtual environment."""

    def __init__(self, folder: Path) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [folder / "bin/python", SIDE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._complaints.close()

    def answer(self, script: Script) -> list[Answer]:
        """One answer an operation; fewer if vLLM raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(script) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._complaints.seek(0)
            raise OracleFailed(self._complaints.read()[-2000:])
        answers: list[Answer] = json.loads(line)
        return answers
