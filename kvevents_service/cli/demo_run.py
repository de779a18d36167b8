"""The demo's run: a sidecar, an engine and a subscriber, each watched, and the sums at the end.

Either process may be killed at any time: the run starts it again and goes on. The engine's counters are added up
over its lives; the stream is folded as any router would fold it, and compared with the sidecar's own books.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvevents_service.cli.processes import START_S, Child, child
from kvevents_service.core.residency import Residency, key64
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.request import EngineCounts
from kvevents_service.errors import SidecarGone
from kvevents_service.subscriber import Batch, Gap, Item, Restart, Resync, Subscriber, Undecodable
from kvevents_service.wire.control import Inspected

MAX_RESTARTS = 5
QUIET_S = 60.0
INSPECT_S = 20.0
"""Long: on a busy machine, while a disk is written to, the books of a large tier take seconds."""
CATCH_UP_S = 60.0
PROGRESS_EVERY = 25
EXIT_CONFIG = 2


class DemoSettings(NamedTuple):
    """What a run is told. Endpoints with port 0 take a free one."""

    trace: Path
    directory: Path
    host_bytes: int
    disk_bytes: int
    model: str
    offload: str
    requests: int
    engine_blocks: int
    pub: str
    replay: str


class Summary(msgspec.Struct):
    """The end of a run; with `--json` it is the one object on stdout."""

    requests: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    blocks_resident: int = 0
    blocks_resident_on: dict[str, int] = {}
    blocks_demoted: int = 0
    blocks_promoted: int = 0
    evicted_unsaved: int = 0
    bytes_moved: int = 0
    bytes_verified: int = 0
    corrupt_blocks: int = 0
    gaps: int = 0
    stream_matches_resident: bool = False
    stream_faults: int = 0
    sidecar_restarts: int = 0
    engine_restarts: int = 0

    def faults(self, requests: int) -> list[str]:
        """What is not as it must be, in words."""
        checks = {
            f"{self.requests} of {requests} requests were served": self.requests >= requests,
            "nothing was stored": bool(self.blocks_stored),
            f"{self.corrupt_blocks} blocks had wrong bytes": not self.corrupt_blocks,
            f"{self.gaps} batches are missing from the stream": not self.gaps,
            f"the stream said {self.stream_faults} things a true stream never says": not self.stream_faults,
            "the fold of the stream is not the resident set": self.stream_matches_resident,
        }
        return [fault for fault, good in checks.items() if not good]


class Follower:
    """Folds the stream; hands every item on to be shown."""

    def __init__(self, show: Callable[[Item], None]) -> None:
        self.fold = Residency()
        self.next_seq = self.told = 0
        """Behind the last number, and behind the last one of a batch with events: heartbeats have none."""
        self.gaps = self.undecodable = 0
        self._show = show
        self._moved = asyncio.Event()

    async def run(self, subscriber: Subscriber) -> None:
        """Follow until cancelled."""
        async for item in subscriber:
            self._take(item)
            self._show(item)
            self._moved.set()

    def _take(self, item: Item) -> None:
        match item:
            case Batch():
                self.fold.apply(item.batch.events)
                self.next_seq = item.seq + 1
                if item.batch.events:
                    self.told = self.next_seq
            case Gap():
                self.gaps += item.got - item.expected
            case Restart():
                self.fold.forget()
                self.next_seq = self.told = 0
            case Resync():
                self.fold.forget()
            case Undecodable():
                self.undecodable += 1

    async def reach(self, next_seq: int) -> None:
        """Wait until every batch below `next_seq` has arrived. TimeoutError after CATCH_UP_S."""
        async with asyncio.timeout(CATCH_UP_S):
            while self.next_seq < next_seq:
                self._moved.clear()
                await self._moved.wait()


class DemoRun:
    """One run. `say` takes a line for people."""

    def __init__(self, settings: DemoSettings, show: Callable[[Item], None], say: Callable[[str], None]) -> None:
        self.settings = settings
        self.summary = Summary()
        self.follower = Follower(show)
        self.say = say
        self._socket = str(settings.directory / "engine.sock")
        self._pub, self._replay = settings.pub, settings.replay
        self._ready = asyncio.Event()
        self._low_water = 0
        self._told = 0

    async def run(self) -> Summary:
        """Serve the whole trace, compare, stop. Raises SidecarGone if a process cannot be kept alive."""
        self._choose_endpoints()
        try:
            async with asyncio.TaskGroup() as tasks:
                sidecar = tasks.create_task(self._keep_sidecar())
                await self._ready.wait()
                async with Subscriber(self._pub, replay=self._replay) as subscriber:
                    following = tasks.create_task(self.follower.run(subscriber))
                    await self._keep_engine()
                    await self._compare()
                    following.cancel()
                sidecar.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        return self.summary

    # the sidecar

    async def _keep_sidecar(self) -> None:
        for _ in range(MAX_RESTARTS + 1):
            self.summary.sidecar_restarts += self._ready.is_set()
            async with child("sidecar", self._serve_arguments()) as sidecar:
                ready = await sidecar.line(START_S)
                if ready:
                    self.say(f"sidecar: pid {sidecar.process.pid}, events on {self._pub}, replay on {self._replay}")
                    self._ready.set()
                code = await sidecar.process.wait()
                if not ready and code == EXIT_CONFIG:
                    if not self._ready.is_set() and self._choose_endpoints():
                        continue  # somebody took a port between our look and the sidecar's
                    raise SidecarGone("the sidecar did not start, for the reason above")
                self.say(f"sidecar: pid {sidecar.process.pid} ended with {code}; starting it again")
        raise SidecarGone(f"the sidecar ended {MAX_RESTARTS + 1} times")

    def _choose_endpoints(self) -> bool:
        """Take free ports in place of those that are taken; True if one was."""
        before = self._pub, self._replay
        self._pub, self._replay = free_endpoint(self._pub, self.say), free_endpoint(self._replay, self.say)
        return (self._pub, self._replay) != before

    def _serve_arguments(self) -> list[str]:
        settings = {
            "--engine-socket": self._socket,
            "--host-bytes": str(self.settings.host_bytes),
            **self._disk_arguments(),
            "--pub": self._pub,
            "--replay": self._replay,
            "--log-level": "warning",
        }
        return ["kvevents_service", "serve", *(word for pair in settings.items() for word in pair)]

    def _disk_arguments(self) -> dict[str, str]:
        if not self.settings.disk_bytes:
            return {}
        return {"--disk-path": str(self.settings.directory), "--disk-bytes": str(self.settings.disk_bytes)}

    # the engine

    async def _keep_engine(self) -> None:
        for life in range(MAX_RESTARTS + 1):
            self.summary.engine_restarts = life
            async with child("engine", self._engine_arguments()) as engine:
                self.say(f"engine: pid {engine.process.pid}, serving {self.settings.trace.name}")
                if await self._serve_out(engine):
                    return
                self.say(f"engine: pid {engine.process.pid} ended early; starting it again")
        raise SidecarGone(f"the engine ended {MAX_RESTARTS + 1} times before it was done")

    def _engine_arguments(self) -> list[str]:
        served = self._low_water  # a request that was running is served again
        return [
            *("kvevents_service.engine", "--engine-socket", self._socket, "--trace", str(self.settings.trace)),
            *("--model", self.settings.model, "--offload", self.settings.offload),
            *("--blocks", str(self.settings.engine_blocks)),
            *("--skip", str(served), "--requests", str(self.settings.requests - served)),
        ]

    async def _serve_out(self, engine: Child) -> bool:
        """Add up one life of the engine; True if it served everything."""
        before = msgspec.structs.replace(self.summary)
        while line := await engine.line(QUIET_S):
            counts = msgspec.json.decode(line, type=EngineCounts)
            for field in (
                "requests",
                "prompt_tokens",
                "hit_tokens",
                "preemptions",
                "bytes_moved",
                "bytes_verified",
                "corrupt_blocks",
            ):
                setattr(self.summary, field, getattr(before, field) + getattr(counts, field))
            self._low_water = counts.low_water
            self._tell_progress()
            if counts.done:
                return True
        return False

    def _tell_progress(self) -> None:
        done, total = self.summary.requests, self.settings.requests
        if done >= self._told + PROGRESS_EVERY or done >= total > self._told:
            self._told = done
            self.say(f"served {done} of {total} requests, {self.summary.hit_tokens:,} tokens from the tier")

    # the comparison

    async def _inspected(self) -> Inspected:
        """The sidecar's books, as of the last event that the follower has: a disk may still be written to.

        TimeoutError if that does not come.
        """
        books = 0
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while True:
                    inspected = await asyncio.to_thread(inspect, self._socket)
                    books = inspected.next_seq
                    await self.follower.reach(books)
                    if self.follower.told <= books:
                        return inspected
        except TimeoutError as error:
            late = f"the stream was at number {self.follower.next_seq}, the books at {books}"
            raise TimeoutError(str(error) or f"after {CATCH_UP_S:.0f} s {late}") from error

    async def _compare(self) -> None:
        inspected = await self._inspected()
        fold, summary = self.follower.fold, self.summary
        resident = {
            (shelf.medium, shelf.group): hash_keys(shelf.block_hashes, inspected.hash_bytes)
            for shelf in inspected.residents
        }
        folded = {(shelf.medium, shelf.group): set(hashes) for shelf, hashes in fold.shelves.items()}
        summary.stream_matches_resident = _filled(folded) == _filled(resident)
        summary.blocks_stored, summary.blocks_removed = fold.stored, fold.removed
        summary.blocks_resident = sum(map(len, resident.values()))
        for (medium, _), names in resident.items():
            summary.blocks_resident_on[medium] = summary.blocks_resident_on.get(medium, 0) + len(names)
        for field in ("blocks_demoted", "blocks_promoted", "evicted_unsaved"):
            setattr(summary, field, inspected.stats.get(field, 0))
        summary.gaps = self.follower.gaps
        summary.stream_faults = sum(fold.faults.values()) + fold.redacted + self.follower.undecodable


def _filled(shelves: dict[tuple[str, int], set[int]]) -> dict[tuple[str, int], set[int]]:
    return {shelf: hashes for shelf, hashes in shelves.items() if hashes}


def hash_keys(packed: bytes, hash_bytes: int) -> set[int]:
    """Packed hashes as the fold keys them."""
    return {key64(packed[start : start + hash_bytes]) for start in range(0, len(packed), hash_bytes or 1)}


def inspect(engine_socket: str, wait_s: float = INSPECT_S) -> Inspected:
    """The sidecar's own books, asked as an observer. SidecarGone if it does not answer."""
    client = OffloadClient(engine_socket, EngineLayout("demo", "", (), (), ()))
    try:
        connected = client.wait_connected(wait_s)
        inspected = client.inspect(residents=True, wait_s=wait_s) if connected else None
        why = client.last_error or f"{'connected, but nothing' if connected else 'no welcome'} within {wait_s:g} s"
    finally:
        client.close()
    if inspected is None:
        raise SidecarGone(f"no answer from the sidecar ({why})")
    return inspected


def free_endpoint(endpoint: str, say: Callable[[str], None]) -> str:
    """The endpoint, or for tcp one on a free port if its port is 0 or taken."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            say(f"{endpoint} is taken: using a free port")
            probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
