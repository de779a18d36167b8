"""One run of the fuzzer: the sidecar, the attack, what runs beside, and the check at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvevents_service.subscriber import Subscriber
from tools.fuzz.attack import Told
from tools.fuzz.beside import HealthyEngine
from tools.proving.follower import Follower, Observer, differences, folded, level, resident
from tools.proving.process import MIB, SidecarProcess

TIERS = {"host_bytes": 1 * MIB, "disk_bytes": 16 * MIB, "host_blocks": 128, "disk_blocks": 512}
"""So small that blocks must leave both all the time."""
LIMITS = {"requests_per_s": 0.0, "answer_bytes_per_s": 0.0, "retained_batches": 500}
"""Without allowances: all of this comes from one host, and the reader beside is on it, too. The journal is full
soon, so that what grows later is a leak."""
WARM_UP = 0.1
GROWTH_BYTES = 48 * MIB
DESCRIPTORS = 40
END_S = 60.0


class Plan(NamedTuple):
    """inputs: at least so many, unless `seconds` are over before."""

    inputs: int = 1_000_000
    seed: int = 1
    seconds: float = 540.0


class Fuzz:
    """Runs once. `say` takes a line for people."""

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.sidecar = SidecarProcess(directory, TIERS, **LIMITS)
        self.faults: list[str] = []
        self._warm_bytes = self._most_bytes = self._warm_files = 0
        self._told = Told(0, {})

    async def run(self) -> dict[str, Any]:
        ready = self.sidecar.ready
        started = time.monotonic()
        try:
            engine = HealthyEngine(ready.engine_socket, self.plan.seed)
            engine.start()
            async with Subscriber(ready.pub, replay=ready.replay, track=True) as subscriber:
                follower = Follower()
                following = asyncio.create_task(follower.run(subscriber))
                await asyncio.to_thread(self._attack)
                took = time.monotonic() - started
                if self.sidecar.alive:
                    self.faults += await asyncio.to_thread(engine.end)
                    await self._compare(subscriber, follower)
                following.cancel()
                await asyncio.wait([following])
            return self._report(engine, follower, took)
        finally:
            if self.sidecar.alive:
                self.sidecar.stop()

    def _attack(self) -> None:
        ready = msgspec.json.encode(self.sidecar.ready).decode()
        words = ["--ready", ready, "--inputs", str(self.plan.inputs), "--seed", str(self.plan.seed)]
        command = [sys.executable, "-m", "tools.fuzz.attack", *words, "--seconds", str(self.plan.seconds)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as attack:
            try:
                assert attack.stdout is not None
                for line in attack.stdout:
                    self._hear(msgspec.json.decode(line, type=Told))
            finally:
                attack.kill()
        if not self._told.done:
            self.faults.append("the attack died")
        if self._told.fault:
            self.faults.append(f"seed {self.plan.seed}, after {self._told.inputs} inputs: {self._told.fault}")

    def _hear(self, told: Told) -> None:
        self._told = told
        if not self.sidecar.alive:
            self.faults.append("the sidecar died")
            return
        usage = self.sidecar.usage()
        if not self._warm_bytes or told.inputs < WARM_UP * self.plan.inputs:
            self._warm_bytes, self._warm_files = max(self._warm_bytes, usage.anon_bytes), usage.descriptors
        self._most_bytes = max(self._most_bytes, usage.anon_bytes)
        self.say(f"{told.inputs:,} of {self.plan.inputs:,} inputs; sidecar {usage.anon_bytes / MIB:.0f} MiB")

    async def _compare(self, subscriber: Subscriber, follower: Follower) -> None:
        observer = await asyncio.to_thread(Observer, self.sidecar.ready.engine_socket)
        inspected = await level(observer, follower, END_S)
        if inspected is not None:
            self.faults += follower.faults() + differences(folded(subscriber), resident(inspected))
            for fold in subscriber.state().values():
                self.faults += [f"the stream: {name}: {count}" for name, count in (+fold.faults).items()]
        else:
            self.faults.append(f"the reader did not catch up: {follower}")
        await asyncio.to_thread(observer.close)

    def _report(self, engine: HealthyEngine, follower: Follower, took: float) -> dict[str, Any]:
        usage = self.sidecar.usage() if self.sidecar.alive else None
        if usage is not None and usage.anon_bytes > self._warm_bytes + GROWTH_BYTES:
            self.faults.append(f"memory grew by {(usage.anon_bytes - self._warm_bytes) / MIB:.0f} MiB")
        if usage is not None and usage.descriptors > self._warm_files + DESCRIPTORS:
            self.faults.append(f"open files grew from {self._warm_files} to {usage.descriptors}")
        code = self.sidecar.stop()
        self.faults += [] if code == 0 else [f"the sidecar ended with {code}"]
        errors = self.sidecar.log_lines("error", "critical")
        self.faults += [f"log: {line.message[:300]} {line.error[-600:]}" for line in errors]
        return {
            "ok": not self.faults,
            "faults": self.faults[:20],
            "inputs": self._told.inputs,
            "seed": self.plan.seed,
            "seconds": round(took, 1),
            "healthy_rounds": engine.rounds,
            "healthy_blocks_loaded": engine.loaded,
            "healthy_wrong_bytes": engine.wrong_bytes,
            "healthy_slowest_s": round(engine.slowest_s, 3),
            "batches_read": follower.batches,
            "gaps": follower.gaps,
            "memory_warm_mib": round(self._warm_bytes / MIB, 1),
            "memory_end_mib": round(usage.anon_bytes / MIB, 1) if usage else None,
            "memory_most_mib": round(self._most_bytes / MIB, 1),
            "counts": self._told.counts,
        }
