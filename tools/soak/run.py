"""One soak from start to end. `say` takes a line for people."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from signal import SIGSTOP
from typing import Any, NamedTuple

from tools.proving.process import MIB, SidecarProcess, lag_quantile_s
from tools.soak.children import Control, Engine, Readers, spawn
from tools.soak.verdict import (
    ODD_LEVELS,
    Growth,
    Sample,
    lag_faults,
    lag_is_judged,
    log_faults,
    memory_faults,
    rate_faults,
    reader_faults,
)

TIERS = {"host_bytes": 20 * MIB, "disk_bytes": 64 * MIB}
LIMITS = {"retained_bytes": 16 * MIB, "send_high_water_mark": 500}
"""Smaller than the defaults, so that they are full after seconds and the memory is level from then on."""
SCRAPE_EVERY_S = TELL_EVERY_S = 2.0
ASKED_AT_S, ASKED_AT = 40.0, 0.1
"""So late, or after this share of a short run, a reader asks for all that is retained and reads none of it: until
its reply is given up the journal keeps more, up to `needed_bytes`. It happens by chance, too, when a reader leaves:
so it does before memory is judged."""
REPORTED = ("requests", "bytes_verified", "corrupt_blocks", "loads_failed", "resets")
COUNTED = ("lives", "gaps", "resyncs", "holes", "dropped")
FOLDING = 2
"""Of the readers that stay, and of those that come and go: one of these by replay, one by snapshots."""


class Plan(NamedTuple):
    """What a soak is made of. seconds: of traffic; the comparison at the end comes on top. blocks_per_s: of all
    engines together. The first engine resets and is not killed, unless there is no other."""

    seconds: float = 540.0
    blocks_per_s: float = 20_000.0
    engines: int = 2
    stay: int = 2
    churn: int = 14
    kill_every_s: float = 15.0
    reset_every_s: float = 20.0
    seed: int = 1


class Soak:
    """Runs once."""

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        """say: takes a line on how it goes."""
        self.plan = plan
        self.say = say
        self.sidecar = SidecarProcess(directory, TIERS, **LIMITS)
        ready = self.sidecar.ready
        self.stopped = [spawn("tools.soak.stopped", ready.pub)]
        self.readers = [
            Readers(ready, plan.stay, 0, FOLDING, plan.seed),
            Readers(ready, 0, plan.churn, FOLDING, plan.seed + 1),
        ]
        each = plan.blocks_per_s / plan.engines
        self.engines = [
            Engine(ready.engine_socket, plan.seed + place, each, plan.reset_every_s if place == 0 else 0.0)
            for place in range(plan.engines)
        ]
        self.samples: list[Sample] = []
        self.scrapes = 0
        self.faults: list[str] = []
        self.cpu: dict[str, float] = {}
        self._random = Random(plan.seed)
        self._control = Control()

    def run(self) -> dict[str, Any]:
        """Traffic, then the comparison. Leaves no process behind."""
        try:
            self._stop_reader()
            started, cpu_s = time.monotonic(), self.sidecar.cpu_s()
            self._traffic(started)
            took = time.monotonic() - started
            self.cpu["sidecar"] = self.sidecar.cpu_s() - cpu_s
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
        """The last one, in the middle of what it reads, once it has read something."""
        stopped = self.stopped[-1]
        assert stopped.stdout is not None
        stopped.stdout.readline()
        stopped.send_signal(SIGSTOP)

    def _ask_and_stop(self) -> None:
        self.stopped.append(spawn("tools.soak.stopped", self.sidecar.ready.replay, "--replay", yields=False))
        self._stop_reader()

    def _traffic(self, started: float) -> None:
        kill_at, tell_at = started + self.plan.kill_every_s, started
        ask_at = started + min(ASKED_AT_S, ASKED_AT * self.plan.seconds)
        while (now := time.monotonic()) < started + self.plan.seconds and not self.faults:
            self._look(now - started)
            if now >= ask_at and len(self.stopped) == 1:
                self._ask_and_stop()
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
            f"{at_s:.0f} of {self.plan.seconds:.0f} s: {rate:,.0f} of {self.plan.blocks_per_s:,.0f} blocks/s, "
            f"{totals['bytes_verified'] / MIB:,.0f} MiB verified, {sum(e.kills for e in self.engines)} kills, "
            f"{totals['resets']} resets; sidecar {sample.anon_bytes / MIB:.0f} MiB, load {os.getloadavg()[0]:.1f}"
        )

    # the end

    def _report(
        self, took: float, control_s: float, metrics: dict[str, float], told: list[dict[str, Any]]
    ) -> dict[str, Any]:
        totals = self._totals()
        readers = [reader for process in told for reader in process["readers"]]
        growth, lag_s = Growth.of(self.samples), lag_quantile_s(metrics, 0.99)
        rate = totals["blocks_offered"] / took
        self.faults += rate_faults(rate, self.plan.blocks_per_s) + self._engine_faults(totals) + self._end_faults()
        self.faults += memory_faults(growth, self.samples) + lag_faults(lag_s, control_s)
        self.faults += [fault for process in told for fault in process["faults"]]
        self.faults += reader_faults(readers, sum(process.count for process in self.readers))
        self.cpu |= {"engines": totals["cpu_s"], "readers": sum(process.get("cpu_s", 0.0) for process in told)}
        return {
            "ok": not self.faults,
            "faults": self.faults[:20],
            "seconds": round(took, 1),
            "blocks_per_s_asked": self.plan.blocks_per_s,
            "blocks_offered_per_s": round(rate),
            "blocks_stored_per_s": round(totals["blocks_stored"] / took),
            "events_blocks_per_s": round(_sum(metrics, "kvevents_event_blocks_total") / took),
            "blocks_loaded": round(_sum(metrics, "kvevents_loaded_blocks_total")),
            **{name: totals[name] for name in REPORTED},
            "engine_kills": sum(engine.kills for engine in self.engines),
            "scrapes": self.scrapes,
            "subscribers": len(readers) + 1,
            **{f"subscriber_{name}": sum(reader.get(name, 0) for reader in readers) for name in COUNTED},
            "compared": sum(reader["folds"] for reader in readers),
            "replays": sum(process.get("replays_asked", 0) for process in told),
            "replays_broken_off": sum(process.get("replays_broken_off", 0) for process in told),
            **(growth.told() if growth else {}),
            "lag_p90_ms": lag_quantile_s(metrics, 0.9) * 1000,
            "lag_p99_ms": lag_s * 1000,
            "lag_judged": lag_is_judged(control_s),
            "control_lag_p99_ms": round(control_s * 1000, 2),
            "cores": {name: round(seconds / took, 3) for name, seconds in self.cpu.items()},
            "load1": round(os.getloadavg()[0], 1),
            "cpus": os.cpu_count(),
        }

    def _engine_faults(self, totals: Counter[str]) -> list[str]:
        checks = {
            f"{totals['corrupt_blocks']} blocks had wrong bytes": totals["corrupt_blocks"],
            f"{totals['client_errors']} calls of engines failed": totals["client_errors"],
            "no byte was loaded": not totals["bytes_verified"],
            "an engine ended on its own": any(engine.ended_early for engine in self.engines),
        }
        return [fault for fault, there in checks.items() if there]

    def _end_faults(self) -> list[str]:
        code = self.sidecar.stop()
        ended = [] if code == 0 else [f"the sidecar ended with {code}"]
        return ended + log_faults(self.sidecar.log_lines(*ODD_LEVELS))

    def _end(self) -> None:
        for engine in self.engines:
            engine.close()
        for readers in self.readers:
            readers.kill()
        self._control.kill()
        for stopped in self.stopped:
            stopped.kill()
            stopped.wait()
        if self.sidecar.alive:
            self.sidecar.stop()


def _sum(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.partition(",")[0] == name)
