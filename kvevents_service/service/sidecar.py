"""The sidecar itself: performs what the core decides. One tier, its workers, its publisher, its sessions.

The first engine's hello makes the tier (its block size is the engine's). A later engine with the same namespace
and layout shares it; one with another gets it emptied if no engine is left, else an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from kvevents_service.config import ServeConfig
from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.cut import StateSource
from kvevents_service.core.groups import check_groups
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.errors import ControlError
from kvevents_service.service.publisher import Publisher
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.memory import EngineMemory
from kvevents_service.transfer.worker import CopyFailed, CopyWorker, TransferFuture
from kvevents_service.wire.control import Hello, Inspected, Residents, SidecarMessage

log = logging.getLogger(__name__)

MEDIUM = "CPU"
TICK_S = 1.0
HASH_BYTES = range(8, 65)
MAX_SLOTS = 1 << 24
"""A slot costs about 90 bytes before it is used: tiny blocks must not make the books larger than the tier."""
KEY_BYTES = 8
"""An inspection names blocks by the last 8 bytes of their hash, as the event stream does."""


class Session(Protocol):
    """What the sidecar needs of a connected engine."""

    session_id: int
    memory: EngineMemory | None
    copies: int

    def send(self, message: SidecarMessage) -> None: ...

    def copy_ended(self) -> None: ...


class Layout(NamedTuple):
    """What must agree for two engines to share a tier."""

    namespace: str
    hash_bytes: int
    groups: tuple[tuple[int, str, int, int | None, bool], ...]
    regions: tuple[int, ...]
    hash_tokens: int


class OpenTier(NamedTuple):
    """A tier with the engines' layout, its bytes and its workers."""

    layout: Layout
    scheduler: OffloadScheduler
    arena: HostArena
    workers: dict[str, CopyWorker]
    tasks: list[asyncio.Task[None]]


class Sidecar:
    """Everything between the engine plane and the event plane."""

    def __init__(self, config: ServeConfig, publisher: Publisher, clock: Callable[[], float]) -> None:
        self.config = config
        self.publisher = publisher
        self.clock = clock
        self.boot_id = uuid.uuid4().hex
        self.sessions: dict[int, Session] = {}
        self.tier: OpenTier | None = None
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._copies = 0
        self._bytes_moved = 0

    def __repr__(self) -> str:
        return f"<Sidecar {self.boot_id[:8]} engines={len(self.sessions)} copies={self._copies}>"

    # sessions

    def admit(self, session: Session, hello: Hello, memory: EngineMemory) -> OpenTier:
        """Register an engine. ControlError if its layout cannot share the tier that is in use."""
        self.check_open()
        if hello.hash_bytes not in HASH_BYTES:
            raise ControlError("bad_hello", "hash_bytes", f"{HASH_BYTES.start} to {HASH_BYTES.stop - 1}")
        groups = check_groups(hello.groups, hello.hash_tokens)
        unit = hello.hash_tokens or next(group.block_size for group in groups if group.cacheable)
        layout = _layout(hello, unit)
        tier = self._tier_for(layout, TierSpec(MEDIUM, self._capacity(memory), hello.hash_bytes, groups, unit))
        tier.scheduler.hello(session.session_id, memory.blocks)
        self.sessions[session.session_id] = session
        return tier

    def check_open(self) -> None:
        """ControlError while draining: copies under way could else never come to an end."""
        if self.draining:
            raise ControlError("draining", "message", "a sidecar that is not shutting down")

    def _capacity(self, memory: EngineMemory) -> int:
        blocks = self.config.host_bytes // memory.block_bytes
        if not blocks:
            raise ControlError("tier_too_small", "host_bytes", f"at least one block, {memory.block_bytes} bytes")
        return min(blocks, MAX_SLOTS)

    def _tier_for(self, layout: Layout, spec: TierSpec) -> OpenTier:
        if self.tier is not None and self.tier.layout == layout:
            return self.tier
        if self.tier is not None:
            if self.sessions:
                raise ControlError("other_layout", "namespace", "the namespace and layout of the running engine")
            if self._copies:
                raise ControlError(
                    "busy", "namespace", "to come again when the copies of the last engine have ended"
                )
            self.perform(self.tier.scheduler.clear()[0])
            self._close_tier(self.tier)
        arena = HostArena(spec.capacity_blocks, sum(layout.regions))
        workers = {kind: CopyWorker(kind, arena, self.clock) for kind in ("store", "load")}
        tasks = [asyncio.create_task(worker.run(), name=f"{kind}-worker") for kind, worker in workers.items()]
        self.tier = OpenTier(layout, OffloadScheduler(spec), arena, workers, tasks)
        log.info("tier %s: %d blocks of %d bytes", spec.medium, spec.capacity_blocks, arena.block_bytes)
        return self.tier

    def dismiss(self, session: Session) -> None:
        """An engine is gone. Its blocks stay in the tier."""
        if self.sessions.pop(session.session_id, None) is not None and self.tier is not None:
            self.tier.scheduler.goodbye(session.session_id)

    # commands

    def perform(self, commands: Iterable[Command]) -> None:
        """Do what the core decided, in its order."""
        for command in commands:
            match command:
                case Publish(announcements):
                    self.publisher.publish(announcements)
                case Copy(transfer):
                    self._start_copy(transfer)
                case Reply(session_id, message):
                    if session_id in self.sessions:
                        self.sessions[session_id].send(message)

    def _start_copy(self, transfer: TransferMeta) -> None:
        session, tier = self.sessions[transfer.session_id], self.tier
        assert tier is not None, "only a tier's scheduler asks for a copy"
        assert session.memory is not None, "only an engine with memory offers or loads"
        session.copies += 1
        self._copies += 1
        self._idle.clear()
        future = tier.workers[transfer.kind].submit(transfer, session.memory)
        future.add_done_callback(lambda _: self._copy_ended(future, session, tier))

    def _copy_ended(self, future: TransferFuture, session: Session, tier: OpenTier) -> None:
        session.copies -= 1
        self._copies -= 1
        try:
            future.result()
        except (CopyFailed, asyncio.CancelledError) as error:
            log.warning("%s of %d blocks failed: %s", future.meta.kind, future.meta.blocks, error)
            self.perform(tier.scheduler.fail(future.meta))
        else:
            self.perform(tier.scheduler.complete(future.meta))
        session.copy_ended()
        if not self._copies:
            self._idle.set()

    # time

    async def run(self) -> None:
        """Keep deadlines until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.tier is not None:
                self.tier.scheduler.tick(self.clock())

    async def drained(self) -> None:
        """Admit nobody and wait until no copy is under way."""
        self.draining = True
        await self._idle.wait()

    def withdraw(self) -> int:
        """Say that every block is gone, as they will be when this process ends. Returns how many."""
        if self.tier is None:
            return 0
        commands, removed = self.tier.scheduler.clear()
        self.perform(commands)
        return removed

    async def close(self) -> None:
        """End the workers; what they had queued has been failed or done."""
        if self.tier is not None:
            tasks = self._close_tier(self.tier)
            self.tier = None
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    def _close_tier(self, tier: OpenTier) -> list[asyncio.Task[None]]:
        for task in tier.tasks:
            task.cancel()
        for worker in tier.workers.values():
            worker.close()
            self._bytes_moved += worker.bytes_moved
        return tier.tasks

    # instruments

    def sources(self) -> list[StateSource]:
        """Whatever has blocks that were announced, the fastest tier first."""
        return [] if self.tier is None else [self.tier.scheduler.pool]

    def stats(self) -> dict[str, int]:
        """Counters and gauges of every part."""
        tier = self.tier
        moved = sum(worker.bytes_moved for worker in tier.workers.values()) if tier else 0
        return {
            **(tier.scheduler.stats() if tier else {}),
            **self.publisher.stats(),
            "bytes_moved": self._bytes_moved + moved,
            "sessions": len(self.sessions),
            "copies": self._copies,
        }

    def inspect(self, call_id: int, *, residents: bool) -> Inspected:
        """Counters, and the resident set as of batch `next_seq` - 1."""
        shelves = []
        if residents and self.tier is not None:
            scheduler = self.tier.scheduler
            shelves = [
                Residents(MEDIUM, group, b"".join(name[-KEY_BYTES:] for name in scheduler.pool.ready_names(group)))
                for group in range(len(scheduler.pool.index))
            ]
        return Inspected(call_id, self.publisher.journal.next_seq, KEY_BYTES, self.stats(), shelves)


def _layout(hello: Hello, unit: int) -> Layout:
    groups = tuple((g.index, g.kind, g.block_size, g.sliding_window, g.cacheable) for g in hello.groups)
    sizes = tuple(region.block_bytes for region in hello.regions)
    return Layout(hello.namespace, hello.hash_bytes, groups, sizes, unit)
