"""A `kvevents serve` process of our own: started, scraped, measured from outside, stopped by its own pid."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_S = 10.0
STOP_S = 30.0
MIB = 1 << 20


class Ready(msgspec.Struct):
    """The ready line, as far as it is used here."""

    engine_socket: str
    pub: str
    replay: str
    outputs: list[dict[str, object]]
    admin: str

    @property
    def snapshot(self) -> str:
        return str(self.outputs[0]["snapshot"])


class Usage(NamedTuple):
    """What the kernel says of a process. anon_bytes: its own memory, without what engines share with it."""

    anon_bytes: int
    resident_bytes: int
    descriptors: int


class LogLine(msgspec.Struct):
    """One line of `--log-format json`."""

    level: str
    message: str
    logger: str = ""
    error: str = ""


class SidecarProcess:
    """Runs from `__init__` to `stop`. Ports are free ones; two tiers; every endpoint there is."""

    def __init__(self, directory: Path, tiers: Mapping[str, int], **settings: float) -> None:
        self.log = directory / "sidecar.log"
        config = directory / "serve.toml"
        config.write_text(_toml(directory, {**tiers, **settings}))
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvevents_service", "serve", "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the sidecar did not start: {self.log.read_text()[-2000:]}")
        self.ready = msgspec.json.decode(line, type=Ready)

    def __repr__(self) -> str:
        return f"<SidecarProcess pid={self.pid} code={self._process.poll()}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def usage(self) -> Usage:
        status = Path(f"/proc/{self.pid}/status").read_text()
        kib = {name: int(size) for name, size in re.findall(r"(?m)^(\w+):\s+(\d+) kB", status)}
        descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        return Usage(kib["RssAnon"] * 1024, kib["VmRSS"] * 1024, descriptors)

    def scrape(self) -> dict[str, float]:
        """Every sample of /metrics; labels are part of the name, in alphabetical order."""
        with urllib.request.urlopen(f"{self.ready.admin}/metrics", timeout=SCRAPE_S) as answer:
            text = answer.read().decode()
        return {
            name + "".join(f",{key}={value}" for key, value in sorted(labels.items())): number
            for family in text_string_to_metric_families(text)
            for name, labels, number, *_ in family.samples
        }

    def log_lines(self, *levels: str) -> list[LogLine]:
        """What it logged at these levels; what is no such line (a crash) counts as an error."""
        lines = [_log_line(line) for line in self.log.read_bytes().splitlines() if line.strip()]
        return [line for line in lines if line.level in levels]

    def stop(self) -> int:
        """SIGTERM, and SIGKILL after STOP_S; returns the exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _log_line(line: bytes) -> LogLine:
    try:
        return msgspec.json.decode(line, type=LogLine)
    except msgspec.DecodeError:
        return LogLine("error", line.decode(errors="replace"))


def _toml(directory: Path, settings: Mapping[str, float]) -> str:
    texts = {
        "engine_socket": directory / "run" / "engine.sock",
        "disk_path": directory,
        "state_dir": directory / "state",
        "pub": "tcp://127.0.0.1:0",
        "replay": "tcp://127.0.0.1:0",
        "snapshot": "tcp://127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "log_format": "json",
    }
    lines = [f'{key} = "{value}"' for key, value in texts.items()]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in settings.items())]) + "\n"


def lag_quantile_s(samples: Mapping[str, float], share: float) -> float:
    """Upper bound of this share of the event loop's lag: the least bucket's edge that holds as many."""
    prefix = "kvevents_event_loop_lag_seconds_bucket,le="
    buckets = {float(key.removeprefix(prefix)): n for key, n in samples.items() if key.startswith(prefix)}
    total = buckets[float("inf")]
    return min(edge for edge, count in buckets.items() if count >= share * total)
