"""The sidecar itself: performs what the core decides. The tiers, the publisher, the sessions.

The first engine's hello names the tier's layout; the memory of all its ranks sizes it. A later engine with the same
layout shares it; one with another gets it emptied if no engine is left, else an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable

from kvevents_service.config import ServeConfig
from kvevents_service.core.commands import Command, Copy, Keep, Publish, Reply
from kvevents_service.core.cut import StateSource
from kvevents_service.core.groups import check_groups
from kvevents_service.core.metadata import NO_SESSION, TransferMeta
from kvevents_service.errors import ControlError
from kvevents_service.service.copies import Copies
from kvevents_service.service.copy_meter import CopyMeter
from kvevents_service.service.disk_watch import DiskWatch
from kvevents_service.service.inspection import Inspection
from kvevents_service.service.open_tier import BlockSizes, OpenTier, Tiers, carry_on
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.roster import Engine, Head, Roster, Session
from kvevents_service.transfer.cuda_device import device_stats
from kvevents_service.transfer.memory import SessionMemory
from kvevents_service.transfer.worker import CLOSE_S
from kvevents_service.wire.control import PROTOCOL_VERSION, Hello, Reset, Welcome

log = logging.getLogger(__name__)

TICK_S = 1.0
HASH_BYTES = range(8, 65)


class Sidecar:
    """Everything between the engine plane and the event plane."""

    def __init__(self, config: ServeConfig, publisher: Publisher, clock: Callable[[], float]) -> None:
        self.config = config
        self.publisher = publisher
        self.clock = clock
        self.boot_id = uuid.uuid4().hex
        self.roster = Roster()
        self.tier: OpenTier | None = None
        self.draining = False
        self.errors: Counter[str] = Counter()
        self.meter = CopyMeter(clock)
        self.rota = publisher.rota
        self.copies = Copies(self.perform, self.meter, self.rota)
        self._tiers = Tiers(config, clock)
        self.names = self._tiers.names
        self._watch = DiskWatch(self._of_disk)
        self._freezes = bool(gc.get_freeze_count())  # as `kvevents serve` did at its start; it takes 20 ms to ask
        self._bytes_moved = 0
        self._more = asyncio.Event()
        self._hung = False

    def __repr__(self) -> str:
        return f"<Sidecar {self.boot_id[:8]} {self.roster!r} {self.copies!r}>"

    # sessions

    def admit(self, session: Session, hello: Hello) -> Welcome:
        """Register a session. ControlError if it cannot share the tier that is in use; `dismiss` it then."""
        match hello.role:
            case "engine":
                self._admit_engine(session, hello)
            case "worker":
                self._admit_worker(session, hello)
        tier = self.tier
        if tier is None or hello.role == "observer":
            return Welcome(PROTOCOL_VERSION, self.boot_id, session.session_id, 0, 0)
        capacity = tier.scheduler.tier.spec.capacity_blocks
        board_bytes = self.names.size_bytes if hello.role == "engine" else 0
        return Welcome(PROTOCOL_VERSION, self.boot_id, session.session_id, capacity, tier.block_bytes, board_bytes)

    def _admit_engine(self, session: Session, hello: Hello) -> None:
        self.check_open()
        engine = Engine(session, hello.engine_id, _head(hello))
        self._check_head(engine.head)
        self.roster.add_engine(engine)
        self._join(engine)

    def _admit_worker(self, session: Session, hello: Hello) -> None:
        self.check_open()
        self.roster.add_worker(session, hello)
        engine = self.roster.engine_named(hello.engine_id)
        if engine is not None:
            self._join(engine)

    def check_open(self) -> None:
        """ControlError while draining: copies under way could else never come to an end."""
        if self.draining:
            raise ControlError("draining", "message", "a sidecar that is not shutting down")

    def _check_head(self, head: Head) -> None:
        if any(other.head != head for other in self.roster.engines.values()):
            raise ControlError("other_layout", "namespace", "the namespace and layout of the running engine")

    def _join(self, engine: Engine) -> None:
        """An engine or a rank of it has come: if that was the last one, its memory takes part from now on."""
        holders = self.roster.holders(engine)
        memories = {rank: holder.memory for rank, holder in holders.items() if holder.memory is not None}
        self._check_sizes(engine, memories)
        whole = len(memories) == engine.head.ranks
        sizes = tuple(memories[rank].block_sizes for rank in range(engine.head.ranks)) if whole else ()
        tier = self._tier_for(engine.head, sizes)
        if whole:
            tier.scheduler.hello(engine.session_id, min(memory.blocks for memory in memories.values()))

    def _check_sizes(self, engine: Engine, memories: dict[int, SessionMemory]) -> None:
        """A rank of a tier that engines use has one layout. Nobody uses it: it may be taken anew."""
        tier = self.tier
        if tier is None or tier.head != engine.head or not tier.scheduler.in_use:
            return
        for rank, memory in memories.items():
            if memory.block_sizes != tier.sizes[rank]:
                sizes = ", ".join(map(str, tier.sizes[rank]))
                raise ControlError("other_layout", "regions", f"those of rank {rank}: block_bytes {sizes}")

    def dismiss(self, session: Session) -> None:
        """An engine or a worker is gone. Blocks stay in the tier; what is queued on its memory fails."""
        engine, tier = self.roster.remove(session), self.tier
        if tier is None:
            return
        if engine is not None and engine.session is session:
            tier.scheduler.goodbye(session.session_id)
        elif engine is not None:
            tier.scheduler.rank_gone(engine.session_id)
            self.copies.reports.lose(engine.session_id)
        if session.memory is not None:
            for lanes in tier.all_lanes:
                lanes.drop(session.memory)

    # the tier

    def _tier_for(self, head: Head, sizes: BlockSizes) -> OpenTier:
        """The tier with this layout; without sizes, whatever sizes it has. It is made if it is another one."""
        tier = self.tier
        if tier is not None and tier.head == head and sizes in ((), tier.sizes):
            return tier
        capacities = self._tiers.capacities([sum(of_rank) for of_rank in sizes]) if sizes else []
        if self.copies.running:
            raise ControlError("busy", "namespace", "to come again when the copies of the last engine have ended")
        if tier is not None:
            self.perform(tier.scheduler.clear()[0])
            self._close_tier(tier)
        self.tier = self._next_tier(self._tiers.empty(head))
        if sizes:
            self.tier = self._next_tier(self._tiers.open(head, sizes, capacities))
            self.perform(self._tiers.adopt(self.tier))
            if self._freezes:
                gc.freeze()  # the columns are never garbage, and a pass over a million slots would hold the loop
        return self.tier

    def _next_tier(self, tier: OpenTier) -> OpenTier:
        if self.tier is not None:
            carry_on(self.tier, tier)
        return tier

    # commands

    def perform(self, commands: Iterable[Command]) -> None:
        """Do what the core decided, in its order."""
        for command in commands:
            match command:
                case Publish(announcements):
                    self.publisher.publish(announcements)
                case Copy(transfer):
                    self._start(transfer)
                case Keep(runs):
                    self._tiers.keep(runs)
                case Reply(session_id, message):
                    if session_id in self.roster.engines:
                        self.roster.engines[session_id].session.send(message)
        if self.tier is not None and self.tier.scheduler.unfinished:
            self._more.set()

    def _start(self, transfer: TransferMeta) -> None:
        """The scheduler asks for an engine's copies only while all of its ranks are there."""
        if self.tier is None:  # closed while the first half of a load was ending: nobody waits for the other
            return
        if transfer.session_id == NO_SESSION:
            self.copies.start(transfer, self.tier, None, {})
        else:
            engine = self.roster.engines[transfer.session_id]
            self.copies.start(transfer, self.tier, engine.session, self.roster.holders(engine))

    def reset(self, session_id: int, reset: Reset) -> None:
        """Forget every block, for good: a disk that keeps its blocks has forgotten them before the answer.

        ControlError if it has not; they are forgotten here all the same.
        """
        assert self.tier is not None, "an engine session has opened the tier"
        scheduler = self.tier.scheduler
        try:
            self._tiers.void()
        except ControlError:
            self.perform(scheduler.reset(NO_SESSION, reset))
            raise
        self.perform(scheduler.reset(session_id, reset))

    # time

    async def run(self) -> None:
        """Keep deadlines, and do in slices what is long, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._go_on())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._watch.look()
            if self.tier is not None and not self.draining:
                self.perform(self.tier.scheduler.tick(self.clock()))

    async def _go_on(self) -> None:
        """Slice by slice: lookups come in between, and what the last slice said is sent."""
        while True:
            await self._more.wait()
            self._more.clear()
            await self.rota.run(self._slice)

    def _slice(self) -> bool:
        if self.tier is None or self.draining or not self.tier.scheduler.unfinished:
            return False
        self.perform(self.tier.scheduler.go_on(self.clock()))
        return True

    async def drained(self) -> None:
        """Admit nobody and wait until no copy is under way."""
        self.draining = True
        await self.copies.idle.wait()

    def withdraw(self) -> int:
        """Say that every block is gone: nobody can load one while no process serves it. What a disk keeps is
        announced again by the next one. Returns how many."""
        if self.tier is None:
            return 0
        commands, removed = self.tier.scheduler.clear()
        self.perform(commands)
        return removed

    async def close(self) -> None:
        """End the workers; what they had queued has been failed or done."""
        if self.tier is not None:
            tier, self.tier = self.tier, None
            self._close_tier(tier)
            tasks = [task for lanes in tier.all_lanes for task in lanes.tasks]
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
            self.rota.finish()  # the ends of the last copies
        self._watch.look()
        if not self._hung:  # else something still reads or writes there
            self._tiers.close()

    def _close_tier(self, tier: OpenTier) -> None:
        until = self.clock() + CLOSE_S
        for lanes in tier.all_lanes:
            if not lanes.close(until):
                self._hung = True
                log.error("a copy hangs: it was waited for %g s, and is left alone (%r)", CLOSE_S, lanes.arena)
            self._bytes_moved += lanes.bytes_moved

    # instruments

    def sources(self) -> list[StateSource]:
        """Whatever has blocks that were announced, the fastest tier first."""
        return [] if self.tier is None else [tier.pool for tier in self.tier.scheduler.tiers]

    def stats(self) -> dict[str, int]:
        """Counters and gauges of every part."""
        tier = self.tier
        moved = sum(lanes.bytes_moved for lanes in tier.all_lanes) if tier else 0
        return {
            **(tier.scheduler.stats() if tier else {}),
            **self.publisher.stats(),
            **self._tiers.stats(),
            "bytes_moved": self._bytes_moved + moved,
            **self.copies.reports.counters,
            **device_stats(),
            "sessions": len(self.roster.engines),
            "workers": self.roster.workers,
            "copies": self.copies.running,
            "copies_failed": self.copies.failed,
        }

    def _of_disk(self) -> dict[str, int]:
        """What is watched for the log."""
        unsaved = self.tier.scheduler.tier.counters["evicted_unsaved"] if self.tier is not None else 0
        return {**self._tiers.stats(), "evicted_unsaved": unsaved}

    def inspect(self, call_id: int, *, residents: bool) -> Inspection:
        """Counters, and the resident set as of batch `next_seq` - 1."""
        tiers = self.tier.scheduler.tiers if residents and self.tier is not None else ()
        return Inspection(call_id, self.publisher.journal.next_seq, self.stats(), tiers)


def _head(hello: Hello) -> Head:
    if hello.hash_bytes not in HASH_BYTES:
        raise ControlError("bad_hello", "hash_bytes", f"{HASH_BYTES.start} to {HASH_BYTES.stop - 1}")
    groups = check_groups(hello.groups, hello.hash_tokens)
    unit = hello.hash_tokens or next(group.block_size for group in groups if group.cacheable)
    return Head(hello.namespace, hello.hash_bytes, groups, unit, hello.ranks)
