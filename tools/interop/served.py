"""`kvevents serve` or `relay` as a process, with one output per dialect, killed and started again at will."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from consumer import Endpoints
from processes import Child, free_port, loopback


class Served:
    """The settings stay the same over restarts: ports, sockets and the state directory.

    topics: dialect -> topic of its output. settings: lines of TOML that stand before the outputs.
    """

    def __init__(self, command: str, directory: Path, topics: Mapping[str, str], settings: Sequence[str]) -> None:
        self.directory = directory
        self.outputs = {name: Endpoints(loopback(free_port()), loopback(free_port())) for name in topics}
        self.config = directory / f"{command}.toml"
        lines = [*settings, *(line for dialect, topic in topics.items() for line in self._output(dialect, topic))]
        self.config.write_text("\n".join(lines) + "\n")
        self._command = command
        self._child: Child | None = None

    def _output(self, dialect: str, topic: str) -> list[str]:
        pub, replay, _ = self.outputs[dialect]
        said = {"pub": pub, "replay": replay, "dialect": dialect, "topic": topic}
        return ["[[outputs]]", *(f'{key} = "{value}"' for key, value in said.items())]

    def start(self) -> None:
        log = self.directory / f"{self._command}.log"
        said = log.stat().st_size if log.exists() else 0
        words = [sys.executable, "-m", "kvevents_service", self._command, "--config", self.config]
        child = self._child = Child(words, log, os.environ)
        child.wait_until(lambda: b'"ready":true' in log.read_bytes()[said:])

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None, "started before it is killed"
        self._child.kill()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
