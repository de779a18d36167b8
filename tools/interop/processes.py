"""Child processes, started with a log file and ended by their own pid; ports; a little HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import sample
from typing import Any

STOP_S = 10.0
START_S = 30.0
POLL_S = 0.05
HTTP_S = 10.0
PORTS = range(20_000, 32_000)

_given: set[int] = set()


def free_port() -> int:
    """A port that nothing is bound to and that this process has not given out before.

    Below the kernel's range for connections: it stays free while a sidecar is started again.
    """
    for port in sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
    raise RuntimeError("no free port")


def loopback(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


class Child:
    """A process of ours. Its output goes to `log`."""

    def __init__(self, arguments: Sequence[str | Path], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(env),
            )

    def __repr__(self) -> str:
        return f"<Child pid={self._process.pid} code={self._process.returncode} log={self.log}>"

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, SIGKILL after STOP_S; returns the exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """SIGKILL: the process has no say in it."""
        self._process.kill()
        return self._process.wait()

    def wait_until(self, ready: Callable[[], bool], wait_s: float = START_S) -> None:
        """RuntimeError if it ends, or is not ready in time."""
        deadline = time.monotonic() + wait_s
        while not ready():
            if not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"{self!r} did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)


def ask(port: int, method: str, path: str, body: object = None) -> Any:
    """One HTTP request to this machine; the JSON answer, or its text. RuntimeError for a status of 400 and up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HTTP_S)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {text[:500]}")
        return json.loads(text) if text[:1] in ("{", "[") else text
    finally:
        connection.close()


def answers(port: int, path: str) -> bool:
    """Whether a server is up."""
    try:
        ask(port, "GET", path)
    except (OSError, RuntimeError, http.client.HTTPException):
        return False
    return True
