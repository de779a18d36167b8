"""`kvevents serve` with one output per dialect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from feeder import BYTES_PER_BLOCK
from served import Served

STATE_FILE = "next-seq"


class Sidecar(Served):
    """A sidecar of `blocks` blocks that keeps `retained` batches for replay."""

    def __init__(self, directory: Path, topics: Mapping[str, str], *, blocks: int, retained: int) -> None:
        self.engine_socket = str(directory / "engine.sock")
        self._state = directory / "state"
        settings = [
            f'engine_socket = "{self.engine_socket}"',
            f"host_bytes = {blocks * BYTES_PER_BLOCK}",
            f'state_dir = "{self._state}"',
            f"retained_batches = {retained}",
        ]
        super().__init__("serve", directory, topics, settings)

    def preset(self, next_seq: int) -> None:
        """As if a process before this one had used every number below `next_seq`."""
        self._state.mkdir(mode=0o700)
        (self._state / STATE_FILE).write_text(f"{next_seq}\n")
