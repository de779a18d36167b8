"""One soak from start to end. `say` takes a line for people."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from signal import SIGSTOP
from typing import Any, NamedTuple

from tools.proving.process import MIB, SidecarProcess, lag_quantile_s
from tools.soak.children import Engine, Readers, spawn
from tools.soak.verdict import Growth, Sample, lag_faults, memory_faults

TIERS = {"host_bytes": 20 * MIB, "disk_bytes": 64 * MIB}
LIMITS = {"retained_bytes": 16 * MIB, "send_high_water_mark": 500}
"""Smaller than the defaults, so that they are full after seconds and the memory is level from then on."""
SCRAPE_EVERY_S = 2.0
TELL_EVERY_S = 6.0
REPORTED = ("requests", "bytes_verified", "corrupt_blocks", "loads_failed", "resets")
EXPECTED_WARNINGS: tuple[str, ...] = ()


class Plan(NamedTuple):
    """What a soak is made of. seconds: of traffic; the end's comparison comes on top. The first engine resets and
    is not killed, unless there is no other."""

    seconds: float = 540.0
    engines: int = 2
    stay: int = 2
    churn: int = 14
    kill_every_s: float = 15.0
    reset_every_s: float = 20.0
    seed: int = 1


class Control(threading.Thread):
    """Sleeps as the sidecar's own measure of lag does, in this process, which does little else."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s: list[float] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + 0.1
            time.sleep(0.1)
            insort(self.late_s, time.monotonic() - due)

    def p99_s(self) -> float:
        self._over.set()
        self.join()
        return self.late_s[int(len(self.late_s) * 0.99)]


class Soak:
    """Runs once."""

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.sidecar = SidecarProcess(directory, TIERS, **LIMITS)
        ready = self.sidecar.ready
        self.stopped = self._stopped_reader(ready.pub)
        self.readers = [
            Readers(ready, plan.stay, 0, plan.seed),
            *(Readers(ready, 0, share, plan.seed + share + i) for i, share in enumerate(_shares(plan.churn, 2))),
        ]
        self.engines = [
            Engine(ready.engine_socket, plan.seed + place, plan.reset_every_s if place == 0 else 0.0)
            for place in range(plan.engines)
        ]
        self.samples: list[Sample] = []
        self.scrapes = 0
        self.faults: list[str] = []
        self._random = Random(plan.seed)
        self._control = Control()

    def _stopped_reader(self, endpoint: str) -> subprocess.Popen[bytes]:
        return spawn("tools.soak.stopped", endpoint)

    def run(self) -> dict[str, Any]:
        """Traffic, then the comparison. Leaves no process behind."""
        try:
            self._stop_reader()
            self._control.start()
            started = time.monotonic()
            self._traffic(started)
            took = time.monotonic() - started
            control_s = self._control.p99_s()
            samples = self.sidecar.scrape()
            for engine in self.engines:
                engine.stop()
            self.say("traffic is over; the readers catch up and compare")
            told = [readers.end() for readers in self.readers]
            return self._report(took, control_s, samples, told)
        finally:
            self._end()

    def _stop_reader(self) -> None:
        """In the middle of its subscription, once it has read something."""
        assert self.stopped.stdout is not None
        self.stopped.stdout.readline()
        self.stopped.send_signal(SIGSTOP)

    def _traffic(self, started: float) -> None:
        kill_at, tell_at = started + self.plan.kill_every_s, started
        while (now := time.monotonic()) < started + self.plan.seconds and not self.faults:
            self._look(now - started)
            if now >= kill_at:
                self._random.choice(self.engines[1:] or self.engines).kill()
                kill_at = now + self.plan.kill_every_s
            if now >= tell_at:
                self._tell(now - started)
                tell_at = now + TELL_EVERY_S
            time.sleep(max(0.0, now + SCRAPE_EVERY_S - time.monotonic()))

    def _look(self, at_s: float) -> None:
        if not self.sidecar.alive:
            self.faults.append("the sidecar died")
            return
        self.faults += ["a readers' process died" for readers in self.readers if not readers.alive]
        for engine in self.engines:
            engine.watch()
        blocks = _sum(self.sidecar.scrape(), "kvevents_event_blocks_total")
        self.scrapes += 1
        self.samples.append(Sample(at_s, blocks, *self.sidecar.usage()))

    def _totals(self) -> Counter[str]:
        return sum((engine.totals for engine in self.engines), Counter())

    def _tell(self, at_s: float) -> None:
        totals, sample = self._totals(), self.samples[-1]
        rate = totals["blocks_offered"] / max(at_s, 1.0)
        self.say(
            f"{at_s:4.0f} s: {totals['requests']} requests, {rate:,.0f} blocks/s offered, "
            f"{totals['bytes_verified'] / MIB:,.0f} MiB verified, {sum(e.kills for e in self.engines)} kills, "
            f"{totals['resets']} resets; sidecar {sample.anon_bytes / MIB:.0f} MiB, load {os.getloadavg()[0]:.1f}"
        )

    # the end

    def _report(
        self, took: float, control_s: float, metrics: dict[str, float], told: list[dict[str, Any]]
    ) -> dict[str, Any]:
        totals = self._totals()
        readers = [reader for process in told for reader in process["readers"]]
        growth = Growth.of(self.samples)
        lag_s = lag_quantile_s(metrics, 0.99)
        self.faults += memory_faults(growth, self.samples) + lag_faults(lag_s, control_s)
        self.faults += self._reader_faults(told, readers) + self._engine_faults(totals)
        code = self.sidecar.stop()
        self.faults += [] if code == 0 else [f"the sidecar ended with {code}"]
        self.faults += self._log_faults()
        return {
            "ok": not self.faults,
            "faults": self.faults[:20],
            "seconds": round(took, 1),
            "blocks_offered_per_s": round(totals["blocks_offered"] / took),
            "blocks_stored_per_s": round(totals["blocks_stored"] / took),
            "events_blocks_per_s": round(_sum(metrics, "kvevents_event_blocks_total") / took),
            "blocks_loaded": round(_sum(metrics, "kvevents_loaded_blocks_total")),
            **{
                name: totals[name]
                for name in ("requests", "bytes_verified", "corrupt_blocks", "loads_failed", "resets")
            },
            "engine_kills": sum(engine.kills for engine in self.engines),
            "scrapes": self.scrapes,
            "subscribers": len(readers) + 1,
            "subscriber_lives": sum(reader["lives"] for reader in readers),
            "gaps": sum(reader["gaps"] for reader in readers),
            "resyncs": sum(reader["resyncs"] for reader in readers),
            "holes": sum(reader["holes"] for reader in readers),
            "compared": sum(reader["track"] for reader in readers),
            "replays": sum(process.get("replays_asked", 0) for process in told),
            "replays_broken_off": sum(process.get("replays_broken_off", 0) for process in told),
            **(growth.told() if growth else {}),
            "lag_p99_ms": lag_s * 1000,
            "control_lag_p99_ms": round(control_s * 1000, 2),
            "load1": round(os.getloadavg()[0], 1),
            "cpus": os.cpu_count(),
        }

    def _reader_faults(self, told: list[dict[str, Any]], readers: list[dict[str, Any]]) -> list[str]:
        expected = sum(process.count for process in self.readers)
        faults = [] if len(readers) == expected else [f"{len(readers)} of {expected} readers told how they got on"]
        faults += [fault for process in told for fault in process["faults"]]
        return faults + [f"reader {i}: {fault}" for i, reader in enumerate(readers) for fault in reader["faults"]]

    def _engine_faults(self, totals: Counter[str]) -> list[str]:
        checks = {
            f"{totals['corrupt_blocks']} blocks had wrong bytes": totals["corrupt_blocks"],
            f"{totals['client_errors']} calls of engines failed": totals["client_errors"],
            "no byte was loaded": not totals["bytes_verified"],
            "an engine ended on its own": any(engine.ended_early for engine in self.engines),
        }
        return [fault for fault, there in checks.items() if there]

    def _log_faults(self) -> list[str]:
        lines = self.sidecar.log_lines("error", "critical", "warning")
        odd = [line for line in lines if not line.message.startswith(EXPECTED_WARNINGS or ("\0",))]
        return [f"log: {line.level}: {line.message[:300]} {line.error[-300:]}" for line in odd]

    def _end(self) -> None:
        for engine in self.engines:
            engine.close()
        for readers in self.readers:
            readers.kill()
        self.stopped.kill()
        self.stopped.wait()
        if self.sidecar.alive:
            self.sidecar.stop()


def _shares(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]


def _sum(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.partition(",")[0] == name)
