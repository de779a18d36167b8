"""The soak's child processes: engines that are killed and started again, readers, and one that only sleeps."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tools.proving.process import Ready
from tools.soak.engine import Orders, serve

END_S = 180.0
SUMMED = (
    "requests", "blocks_offered", "blocks_stored", "bytes_verified", "corrupt_blocks", "loads_failed",
    "preemptions", "resets", "client_errors", "cpu_s",
)  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tools.soak.engine"])
"""An engine that takes the place of a killed one does not import torch anew."""


def spawn(module: str, *arguments: str, yields: bool = True) -> subprocess.Popen[bytes]:
    """yields: it has what others leave of the cores. Engines and readers do: it is the sidecar that is looked at,
    and in earnest they have other cores or other machines."""
    command = [*(["chrt", "--idle", "0"] if yields else []), sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Engine:
    """One place for an engine; `totals` adds up over its lives, as far as each one told.

    A new life makes up for what was not offered since the first one began.
    """

    def __init__(self, engine_socket: str, seed: int, blocks_per_s: float, reset_every_s: float) -> None:
        self.kills = 0
        self.ended_early = 0
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._orders = Orders(engine_socket, seed, blocks_per_s, time.monotonic(), 0, reset_every_s)
        self._start()

    def _start(self) -> None:
        orders = self._orders
        self._orders = orders._replace(seed=orders.seed + 100, offered=int(self._before["blocks_offered"]))
        ours, theirs = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=serve, args=(self._orders, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, args=(ours,), daemon=True)
        self._listener.start()

    def _listen(self, pipe: Connection) -> None:
        try:
            while True:
                counts = pipe.recv()
                self._now = Counter({name: counts[name] for name in SUMMED})
        except (EOFError, OSError):  # killed, maybe in the middle of a message
            pipe.close()

    def _over(self) -> None:
        self._process.join()
        self._listener.join()
        self._before.update(self._now)
        self._now = Counter()

    @property
    def totals(self) -> Counter[str]:
        return self._before + self._now

    def watch(self) -> None:
        """One that ended on its own is started again, and counted."""
        if not self._process.is_alive():
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
        """It ends what it began. TimeoutError if it does not."""
        self._process.terminate()
        self._process.join(END_S)
        still = self._process.is_alive()
        self.close()
        if still:
            raise TimeoutError(f"an engine did not end in {END_S:.0f} s")

    def close(self) -> None:
        """kill -9, for good."""
        self._process.kill()
        self._over()


class Readers:
    """One process of readers."""

    def __init__(self, ready: Ready, stay: int, churn: int, fold: int, seed: int) -> None:
        places = ["--stay", str(stay), "--churn", str(churn), "--fold", str(fold), "--seed", str(seed)]
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


class Control:
    """Sleeps, at the priority of the sidecar."""

    def __init__(self) -> None:
        self._process = spawn("tools.soak.control", yields=False)

    def p99_s(self) -> float:
        out, _ = self._process.communicate(b"end\n", END_S)
        return float(out)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
