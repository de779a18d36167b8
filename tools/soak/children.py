"""The soak's child processes: engines that are killed and started again, readers, and one that is stopped."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import msgspec

from tools.proving.process import Ready

END_S = 180.0
SUMMED = (
    "requests", "blocks_offered", "blocks_stored", "bytes_verified", "corrupt_blocks", "loads_failed",
    "preemptions", "resets", "client_errors",
)  # fmt: skip


NICE = "10"
"""Engines and readers yield to the sidecar: on a machine of few cores it is the sidecar that is looked at."""


def spawn(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = ["nice", "-n", NICE, sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Engine:
    """One place for an engine; `totals` adds up over its lives, as far as each one told."""

    def __init__(self, engine_socket: str, seed: int, reset_every: float) -> None:
        self.kills = 0
        self.ended_early = 0
        self._arguments = ["--engine-socket", engine_socket, "--reset-every", str(reset_every)]
        self._seed = seed
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._start()

    def _start(self) -> None:
        self._seed += 100
        self._process = spawn("tools.soak.engine", *self._arguments, "--seed", str(self._seed))
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            counts = msgspec.json.decode(line)
            self._now = Counter({name: counts[name] for name in SUMMED})

    def _over(self) -> None:
        self._process.wait()
        self._listener.join()
        self._before.update(self._now)
        self._now = Counter()

    @property
    def totals(self) -> Counter[str]:
        return self._before + self._now

    def watch(self) -> None:
        """One that ended on its own is started again, and counted."""
        if self._process.poll() is not None:
            self.ended_early += 1
            self._over()
            self._start()

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does; another one takes its place."""
        self._process.kill()
        self.kills += 1
        self._over()
        self._start()

    def stop(self) -> None:
        """It ends what it began. Raises TimeoutExpired if it does not."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        finally:
            self.close()

    def close(self) -> None:
        """kill -9, for good."""
        self._process.kill()
        self._over()


class Readers:
    """One process of readers."""

    def __init__(self, ready: Ready, stay: int, churn: int, seed: int) -> None:
        places = ["--stay", str(stay), "--churn", str(churn), "--seed", str(seed)]
        self._process = spawn("tools.soak.readers", "--ready", msgspec.json.encode(ready).decode(), *places)
        self.count = stay + churn

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> dict[str, Any]:
        """Have them catch up and compare; what they told."""
        try:
            out, _ = self._process.communicate(b"end\n", END_S)
            return msgspec.json.decode(out) if out else {"readers": [], "faults": ["the readers' process died"]}
        except subprocess.TimeoutExpired:
            return {"readers": [], "faults": [f"the readers did not end in {END_S:.0f} s"]}
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
