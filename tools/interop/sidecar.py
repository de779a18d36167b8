"""`kvevents serve` as a process of its own, with one output per dialect, killed and started again at will."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from consumer import Endpoints
from feeder import BYTES_PER_BLOCK
from processes import Child, free_port, loopback

STATE_FILE = "next-seq"


class Sidecar:
    """The settings stay the same over restarts: ports, sockets and the state directory.

    topics: dialect -> topic of its output.
    """

    def __init__(self, directory: Path, topics: Mapping[str, str], *, blocks: int, retained: int) -> None:
        self.directory = directory
        self.engine_socket = str(directory / "engine.sock")
        self.outputs = {name: Endpoints(loopback(free_port()), loopback(free_port())) for name in topics}
        self.config = directory / "serve.toml"
        self._state = directory / "state"
        self.config.write_text(self._toml(topics, blocks, retained))
        self._child: Child | None = None

    def _toml(self, topics: Mapping[str, str], blocks: int, retained: int) -> str:
        lines = [
            f'engine_socket = "{self.engine_socket}"',
            f"host_bytes = {blocks * BYTES_PER_BLOCK}",
            f'state_dir = "{self._state}"',
            f"retained_batches = {retained}",
        ]
        for dialect, topic in topics.items():
            pub, replay, _ = self.outputs[dialect]
            lines += ["[[outputs]]", f'pub = "{pub}"', f'replay = "{replay}"']
            lines += [f'dialect = "{dialect}"', f'topic = "{topic}"']
        return "\n".join(lines) + "\n"

    def preset(self, next_seq: int) -> None:
        """As if a process before this one had used every number below `next_seq`."""
        self._state.mkdir(mode=0o700)
        (self._state / STATE_FILE).write_text(f"{next_seq}\n")

    def start(self) -> None:
        arguments: list[str | Path] = [sys.executable, "-m", "kvevents_service", "serve", "--config", self.config]
        log = self.directory / "sidecar.log"
        said = log.stat().st_size if log.exists() else 0
        child = Child(arguments, log, os.environ)
        self._child = child
        child.wait_until(lambda: b'"ready":true' in log.read_bytes()[said:])

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None, "started before it is killed"
        self._child.kill()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
