"""The shell around the scheduler, simulated down to the bytes: engines, an arena, copies that end when told.

Each engine has one or more ranks with memory of their own, and the tier has an arena for each. A rank can die; it
comes back with empty memory.

`World.perform` is the judge. Whatever the scheduler commands is checked against what is true at that moment:
what is announced is there, what is copied is free to be written, what is answered was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from core.models import PREFIX, UNIT, cacheable, needed, step_tokens
from core.prompts import PATHS, Block, Path, block, key64, unit_hash, units_of
from kvevents_service.core.announce import to_event
from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.metadata import Announcement, RemovedRun, TransferMeta
from kvevents_service.core.ranks import RankReports
from kvevents_service.core.residency import Residency
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.slots import PENDING, READY
from kvevents_service.core.step_parts import StepParts
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.control import GroupSpec, Load, Loaded, Reset, ResetDone, Step, StepDone
from kvevents_service.wire.events import BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.packing import unpack_int32

ENGINE_BLOCKS = 1_000_000
MEDIUM = "CPU"
BEHIND = "STORAGE"
FILLS = ("store", "demote")
"""Kinds of copies from memory into `slots`; the others go the other way."""


class Content(NamedTuple):
    """The bytes of one block: a group's KV of exactly one hash."""

    group: int
    block_hash: bytes


class Need(NamedTuple):
    """A logical block that a prefix needs."""

    group: GroupSpec
    number: int


class Bytes(NamedTuple):
    """What a rank holds of a block: its own part, which is no other rank's."""

    rank: int
    content: Content


Memory = dict[int, Bytes | None]
"""Blocks of one rank of an engine, or of the host tier."""

Place = tuple[int, int]
"""A tier and a slot in it."""


def places(transfer: TransferMeta) -> set[Place]:
    return {(transfer.tier, slot) for slot in transfer.slots}


def host_places(transfer: TransferMeta) -> set[Place]:
    """Where the host tier stands in for an engine."""
    return set() if transfer.session_id else {(0, slot) for slot in transfer.engine_blocks}


def written(transfer: TransferMeta) -> set[Place]:
    return places(transfer) if transfer.kind in FILLS else host_places(transfer)


def read(transfer: TransferMeta) -> set[Place]:
    return host_places(transfer) if transfer.kind in FILLS else places(transfer)


class RankCopy(NamedTuple):
    """A transfer as one rank's worker has it, with the memory it was given."""

    transfer: TransferMeta
    rank: int
    memory: Memory


class Grant(NamedTuple):
    """A lease as the engine knows it: units [start, start + units) of a prompt."""

    lease_id: int
    session_id: int
    request_id: str
    path: Path
    start: int
    units: int
    deadline: float
    resets: int
    losses: int
    fine: bool = False


class Order(NamedTuple):
    """A load that the engine waits for: the lease it was made with, if that lived, and the blocks it goes to."""

    grant: Grant | None
    units: int
    block_ids: list[int]


class Writer:
    """A copy into slots: which ranks have made it, and whether it may be announced."""

    def __init__(self, transfer: TransferMeta) -> None:
        self.transfer = transfer
        self.ranks_copied: set[int] = set()
        self.void = self.ended = False


class World:
    """One scheduler with its engines, each of as many ranks."""

    def __init__(self, scheduler: OffloadScheduler, ranks: int = 1) -> None:
        self.scheduler = scheduler
        self.ranks = range(ranks)
        self.reports = RankReports()
        self.pool = scheduler.pool
        self.tiers = scheduler.tiers
        self.media = {tier.spec.medium: number for number, tier in enumerate(self.tiers)}
        self.model = scheduler.tier.spec.groups
        self.groups = cacheable(self.model)
        self.arenas: list[list[Memory]] = [
            [dict.fromkeys(range(tier.pool.capacity)) for _ in self.ranks] for tier in self.tiers
        ]
        self.engines: dict[int, dict[int, Memory]] = {}
        self.fold = Residency({group.index: group.block_size for group in self.model})
        self.located: dict[tuple[int, int, int], int] = {}
        self.writers: dict[Place, Writer] = {}
        self.pending: list[RankCopy] = []
        self.lost: set[tuple[int, int]] = set()
        """Ranks and slots of the last tier."""
        self.started: Counter[str] = Counter()
        self.doomed: set[TransferMeta] = set()
        self.steps: dict[tuple[int, int], int] = {}
        self.long: dict[tuple[int, int], StepParts] = {}
        """By session and the id of their parts."""
        self.under_way: dict[int, tuple[StepParts, Iterator[Step]]] = {}
        """Long steps of which parts have not been taken, by session."""
        self.loads: dict[tuple[int, int], Order] = {}
        self.live: dict[int, Grant] = {}
        self.grants: list[Grant] = []
        self.resets = self.losses = self.stored = self.last_id = self.to_remove = 0
        self.clearing: list[int] = []
        """Sessions that wait for their reset."""

    # what engines say

    def hello(self, session_id: int) -> None:
        self.engines[session_id] = {rank: {} for rank in self.ranks}
        self.scheduler.hello(session_id, ENGINE_BLOCKS)

    def present(self, session_id: int) -> bool:
        """Every rank has registered its memory."""
        return len(self.engines[session_id]) == len(self.ranks)

    def served(self, session_id: int) -> bool:
        """It can store and load: no reset is under way either."""
        return self.present(session_id) and not self.clearing

    def rank_dies(self, session_id: int, rank: int, running: int) -> None:
        """What is queued on its memory fails at once; `running`: a bit for each copy that goes on."""
        memory = self.engines[session_id].pop(rank, None)
        if memory is None:
            return
        self.doomed |= {copy.transfer for copy in self.pending if copy.transfer.session_id == session_id}
        for writer in self._unannounced():
            writer.void |= writer.transfer in self.doomed
        self.scheduler.rank_gone(session_id)
        self.reports.lose(session_id)
        mine = [copy for copy in self.pending if copy.memory is memory]
        for copy in [copy for number, copy in enumerate(mine) if not running >> number & 1]:
            self.settle(self.pending.index(copy), good=False)

    def rank_returns(self, session_id: int, rank: int) -> None:
        """With empty memory, and not before the connection it had has ended: its last copy, that is."""
        theirs = [copy.rank for copy in self.pending if copy.transfer.session_id == session_id]
        if rank in self.engines[session_id] or rank in theirs:
            return
        self.engines[session_id][rank] = {}
        if self.present(session_id):
            self.scheduler.hello(session_id, ENGINE_BLOCKS)

    def goodbye(self, session_id: int) -> None:
        """What has not been taken of a long step never will be."""
        for part in self.under_way.pop(session_id, (None, iter(())))[1]:
            blocks = sum(len(offer.block_ids) // 4 for offer in part.offers)
            self._step_done(session_id, StepDone(part.step_id, 0, 0, blocks))
        for writer in self._unannounced():
            writer.void |= writer.transfer.session_id == session_id
        self.live = {k: grant for k, grant in self.live.items() if grant.session_id != session_id}
        self.scheduler.goodbye(session_id)

    def step(self, session_id: int, step: Step, now: float) -> list[int]:
        """Returns [stored, known, declined] if the step has ended already."""
        self.steps[session_id, step.step_id] = sum(len(offer.block_ids) // 4 for offer in step.offers)
        for offer in step.offers:
            for place, block_id in enumerate(unpack_int32(offer.block_ids)):
                name = offer.block_hashes[32 * place : 32 * place + 32]
                if not name and offer.inner:
                    name = offer.inner[-1].block_hash
                for rank, memory in self.engines[session_id].items():
                    memory[block_id] = Bytes(rank, Content(offer.group, name))
        parts = self.scheduler.long_step(session_id, step)
        if parts is None:
            return self._take_step(session_id, step, now)
        self.long[session_id, parts.part_id] = parts
        self.under_way[session_id] = parts, parts.parts(self.scheduler.tier.limits.step_blocks)
        return self.next_part(session_id, now)

    def _take_step(self, session_id: int, step: Step, now: float, *, void: bool = False) -> list[int]:
        commands = self.scheduler.step(session_id, step, now, void=void)
        for request_id in [*step.finished, *step.preempted]:
            self._forget_request(session_id, request_id)
        return self.perform(commands)

    def next_part(self, session_id: int, now: float) -> list[int]:
        """As `step`, of the next part of a long one that is under way, if one is."""
        parts, left = self.under_way.get(session_id, (None, iter(())))
        part = next(left, None)
        if parts is None or part is None:
            self.under_way.pop(session_id, None)
            return []
        return self._take_step(session_id, part, now, void=parts.void)

    def end_step(self, session_id: int, now: float) -> None:
        """Whatever else an engine says waits for all parts."""
        while session_id in self.under_way:
            self.next_part(session_id, now)

    def lookup_granted(self, grant: Grant) -> None:
        self.live[grant.lease_id] = grant
        self.grants.append(grant)

    def take(self, session_id: int, lease_id: int) -> Grant | None:
        grant = self.live.get(lease_id)
        return self.live.pop(lease_id) if grant is not None and grant.session_id == session_id else None

    def load(self, session_id: int, load: Load, units: int, now: float) -> None:
        """`units` is what the engine means, whether it says so or not."""
        ids = unpack_int32(load.block_ids).tolist()
        commands = self.scheduler.load(session_id, load, now)
        self.loads[session_id, load.load_id] = Order(self.take(session_id, load.lease_id), units, ids)
        self.perform(commands)

    def end_request(self, session_id: int, request_id: str, *, preempt: bool) -> None:
        self._forget_request(session_id, request_id)
        (self.scheduler.preempt if preempt else self.scheduler.finish)(session_id, request_id)

    def _forget_request(self, session_id: int, request_id: str) -> None:
        gone = (session_id, request_id)
        self.live = {k: grant for k, grant in self.live.items() if (grant.session_id, grant.request_id) != gone}

    def reset(self, session_id: int) -> None:
        """Removes a slice; `go_on` the rest."""
        if not self.clearing:
            self.to_remove = len(self.fold)
        self.resets += 1
        self.clearing.append(session_id)
        for writer in self._unannounced():
            writer.void = True
        self._cleared(self.scheduler.reset(session_id, Reset(7)))

    def go_on(self, now: float) -> None:
        commands = self.scheduler.go_on(now)
        if self.clearing:
            self._cleared(commands)
        else:
            self.perform(commands)

    def _cleared(self, commands: list[Command]) -> None:
        """Nothing but removals, and the answers once nothing is left."""
        removals = [command for command in commands if isinstance(command, Publish)]
        assert all(isinstance(item, RemovedRun) for command in removals for item in command.announcements)
        self.perform(removals)
        replies = [command for command in commands if not isinstance(command, Publish)]
        done = [Reply(session_id, ResetDone(7, self.to_remove)) for session_id in self.clearing]
        assert replies == ([] if len(self.fold) or self.scheduler.clearing.under_way else done)
        if replies:
            self.clearing.clear()

    def tick(self, now: float) -> None:
        self.live = {k: grant for k, grant in self.live.items() if grant.deadline > now}
        self.perform(self.scheduler.tick(now))

    # what the scheduler commands

    def perform(self, commands: Iterable[Command]) -> list[int]:
        counts: list[int] = []
        for command in commands:
            match command:
                case Publish(announcements):
                    self._publish(announcements)
                case Copy(transfer):
                    self._start(transfer)
                case Reply(session_id, StepDone() as done):
                    counts = self._step_done(session_id, done)
                case Reply(session_id, Loaded() as loaded):
                    self._loaded(session_id, loaded)
                case _:
                    raise AssertionError(f"nobody asked for {command}")
        return counts

    def _publish(self, announcements: tuple[Announcement, ...]) -> None:
        assert announcements
        events: list[Event] = [to_event(item) for item in announcements]
        batch, skipped = decode_batch(encode_batch(EventBatch(1.0, events, 0)))
        assert not skipped
        for event in batch.events:
            self.fold.apply([event])
            self.fold.check()
            if isinstance(event, BlockStored):
                self._check_stored(event)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    del self.located[self.media[event.medium or ""], event.group_idx or 0, int(key)]

    def _check_stored(self, event: BlockStored) -> None:
        """I7: complete and true. I1, I2: the bytes are there, from a copy that ended well and still counts."""
        assert event.group_idx is not None
        spec = self.model[event.group_idx]
        inner = event.block_size != spec.block_size
        assert event.block_size == (UNIT if inner else spec.block_size)
        assert event.locality == "LOCAL"
        tier = self.media[event.medium or ""]
        window = None if spec.kind == "chunked_local_attention" else spec.sliding_window
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (spec.kind, window)
        assert spec.cacheable
        assert event.block_hashes
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        parent = event.parent_block_hash
        for place, key in enumerate(event.block_hashes):
            truth = self.truth(spec, int(key))
            assert inner == (truth.units != units_of(spec))
            assert parent == (truth.parent and key64(truth.parent))
            tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            assert tuple(tokens) == truth.token_ids
            assert (event.lora_id, event.lora_name) == (truth.lora_id, truth.lora_name)
            extra = event.extra_keys[place] if event.extra_keys is not None else None
            assert _as_given(extra) == truth.extra_key
            self._check_bytes(tier, spec.index, truth.block_hash)
            assert not self.writers[tier, self.located[tier, spec.index, int(key)]].void
            parent = key
        self.stored += len(event.block_hashes)

    def truth(self, group: GroupSpec, key: int) -> Block:
        """What is so of the block of this group that a hash names; of its last unit, if it ends inside a block."""
        whole = len(PATHS[key]) % units_of(group) == 0
        return block(PATHS[key], units_of(group) if whole else 1)

    def _check_bytes(self, tier: int, group: int, block_hash: bytes) -> None:
        pool = self.tiers[tier].pool
        slot = pool.slot_of(group, block_hash)
        if slot is None:
            slot = pool.inner_slot(group, block_hash)
        assert slot is not None
        path = PATHS[key64(block_hash)]
        need = Need(self.model[group], self.number_of(group, path))
        assert all(self.holds(self.arenas[tier][rank][slot], rank, need, path, len(path)) for rank in self.ranks)
        writer = self.writers[tier, slot]
        assert writer.ranks_copied == set(self.ranks)
        self.located[tier, group, key64(block_hash)] = slot

    def _start(self, transfer: TransferMeta) -> None:
        assert 0 < len(transfer.slots) == len(transfer.engine_blocks) == len(set(transfer.slots))
        under_way = {copy.transfer for copy in self.pending}
        busy = {place for other in under_way for place in written(other)}
        assert busy.isdisjoint(written(transfer) | read(transfer)), "a slot that is being written"
        reading = {place for other in under_way for place in read(other)}
        assert reading.isdisjoint(written(transfer)), "a slot that is being read"
        resident = {(tier, slot) for (tier, _, _), slot in self.located.items()}
        assert resident.isdisjoint(written(transfer)), "rewritten before its removal (I3)"
        writer = Writer(transfer)
        for tier, slot in written(transfer):
            self.writers[tier, slot] = writer
            for rank, arena in enumerate(self.arenas[tier]):
                arena[slot] = None
                if tier == len(self.tiers) - 1:
                    self.lost.discard((rank, slot))
        self.reports.begin(transfer, len(self.ranks))
        self.started[transfer.kind] += 1
        self.pending += [RankCopy(transfer, rank, self._memory(transfer, rank)) for rank in self.ranks]

    def _memory(self, transfer: TransferMeta, rank: int) -> Memory:
        """The engine's, or the host tier's in its place."""
        if transfer.kind not in ("store", "load"):
            assert not transfer.session_id
            return self.arenas[0][rank]
        assert self.present(transfer.session_id), "a copy that not every rank can do"
        return self.engines[transfer.session_id][rank]

    def _step_done(self, session_id: int, done: StepDone) -> list[int]:
        owner_id = done.step_id
        parts = self.long.get((session_id, owner_id))
        if parts is not None:
            whole = parts.ended(done)
            if whole is None:
                return []
            done = whole
            del self.long[session_id, owner_id]
        offered = self.steps.pop((session_id, done.step_id))
        assert done.stored + done.known + done.declined == offered
        assert min(done.stored, done.known, done.declined) >= 0
        self._check_no_copy("store", session_id, owner_id)
        for writer in self.writers.values():
            whose = (writer.transfer.session_id, writer.transfer.owner_id)
            writer.ended |= whose == (session_id, owner_id)
        return [done.stored, done.known, done.declined]

    def _loaded(self, session_id: int, loaded: Loaded) -> None:
        grant, units, ids = self.loads.pop((session_id, loaded.load_id))
        self._check_no_copy("load", session_id, loaded.load_id)
        if not loaded.blocks:
            return
        assert grant is not None
        assert loaded.blocks == units
        assert grant.resets == self.resets, "bytes from before a reset"
        assert self.present(session_id), "bytes for a rank that is gone"
        end = grant.start + units
        for rank, memory in self.engines[session_id].items():
            for block_id, need in zip(ids, self.needs(end, grant.start), strict=True):
                assert self.holds(memory[block_id], rank, need, grant.path, end), "wrong KV bytes"

    def _check_no_copy(self, kind: str, session_id: int, owner_id: int) -> None:
        """I9: the engine was told that no copy touches its blocks any more."""
        owner = (kind, session_id, owner_id)
        under_way = [copy.transfer for copy in self.pending]
        assert owner not in [(transfer.kind, transfer.session_id, transfer.owner_id) for transfer in under_way]

    # copies

    def lose(self, position: int, blocks: int) -> None:
        """A rank's load from the last tier finds bytes that are gone for good; `blocks`: a bit for each."""
        numbered = [(number, copy) for number, copy in enumerate(self.pending) if copy.transfer.kind not in FILLS]
        loads = [(number, copy) for number, copy in numbered if copy.transfer.tier == len(self.tiers) - 1]
        if loads:
            number, copy = loads[position % len(loads)]
            slots = [slot for place, slot in enumerate(copy.transfer.slots) if blocks >> place % 8 & 1]
            self.lost.update((copy.rank, slot) for slot in slots)
            self.settle(number, good=True)

    def _find_lost(self, copy: RankCopy) -> bool:
        """Whoever reads what is lost finds it so, and says so."""
        transfer = copy.transfer
        if transfer.kind in FILLS or transfer.tier < len(self.tiers) - 1:
            return False
        lost = [slot for slot in transfer.slots if (copy.rank, slot) in self.lost]
        for slot in lost:
            self.arenas[transfer.tier][copy.rank][slot] = None
        self.losses += bool(lost)
        before = len(self.fold)
        self.perform(self.scheduler.lose(transfer, lost))
        self.to_remove -= before - len(self.fold)
        return bool(lost)

    def settle(self, position: int, *, good: bool, twice: bool = False) -> None:
        """A rank's copy ends. `twice`: it says so again, and that means nothing."""
        copy = self.pending.pop(position % len(self.pending))
        good = good and not self._find_lost(copy)
        transfer, arena = copy.transfer, self.arenas[copy.transfer.tier][copy.rank]
        for block_id, slot in zip(transfer.engine_blocks, transfer.slots, strict=True):
            if transfer.kind in FILLS:
                arena[slot] = copy.memory[block_id] if good else None
            else:
                copy.memory[block_id] = arena[slot] if good else None
        for place in list(written(transfer))[:1]:
            writer = self.writers[place]
            writer.ranks_copied |= {copy.rank} if good else set()
            writer.void |= not good
        self.doomed |= set() if good else {transfer}
        self._report(copy, good=good)
        if twice:
            self._report(copy, good=not good)

    def _report(self, copy: RankCopy, *, good: bool) -> None:
        end = self.reports.report(copy.transfer, copy.rank, good=good)
        if end is None:
            return
        assert not any(other.transfer is copy.transfer for other in self.pending), "ended before its last rank"
        assert end == (copy.transfer not in self.doomed), "a rank failed or died in the middle of it, or none did"
        self.doomed.discard(copy.transfer)
        self.perform((self.scheduler.complete if end else self.scheduler.fail)(copy.transfer))

    def _unannounced(self) -> list[Writer]:
        return [writer for writer in self.writers.values() if not writer.ended]

    # what must always be so

    def check(self) -> None:
        """Stream == pools == arenas, and the counters say so."""
        self.fold.check()
        stats = self.scheduler.stats()
        for tier in range(len(self.tiers)):
            self._check_tier(tier, stats)
        promised = [(grant, grant.units) for grant in self.live.values()]
        promised += [(grant, units) for grant, units, _ in self.loads.values() if grant]
        for grant, units in promised:
            kept = self.resident(grant.path, grant.start + units, grant.start)
            void = (grant.resets, grant.losses) != (self.resets, self.losses)
            assert kept or void, "a hit that was promised has left"
        assert stats["blocks_stored"] + stats.get("disk_blocks_stored", 0) == self.fold.stored == self.stored
        assert stats["blocks_removed"] + stats.get("disk_blocks_removed", 0) == self.fold.removed
        assert stats["leases"] == len(self.live)
        owed, more = len(self.loads) + len(self.steps) - len(self.long), len(self.tiers) > 1 or self.long
        assert stats["transfers"] == owed or (more and stats["transfers"] > owed)
        under_way = self.pending or self.scheduler.unfinished  # of a long promotion there may be just a rest
        assert under_way or not stats["transfers"]
        waited_for = owed or (self.long and not self.under_way)
        assert under_way or not waited_for, "nothing is under way, yet somebody is still waited for"
        assert len(self.reports) == len({copy.transfer for copy in self.pending})

    def _check_tier(self, tier: int, stats: dict[str, int]) -> None:
        pool, name = self.tiers[tier].pool, ("blocks_", "disk_blocks_")[tier]
        pool.check()
        for group in self.model:
            self._check_group(tier, group)
        slots = {(group, slot) for (where, group, _), slot in self.located.items() if where == tier}
        assert stats[f"{name}resident"] == len(slots) == pool.count(READY)
        landings = (self.scheduler.landings, getattr(self.scheduler, "back_landings", None))[tier]
        assert stats[f"{name}pending"] == pool.count(PENDING) <= landings.pending_blocks
        assert stats[f"{name}free"] == pool.free_slots

    def _check_group(self, tier: int, group: GroupSpec) -> None:
        """I4: stream == pool. I6: prefix-closed where the kind asks for it, every block for itself elsewhere."""
        pool = self.tiers[tier].pool
        ready = pool.ready_names(group.index)
        resident = self.fold.hashes(self.tiers[tier].spec.medium, group.index)
        assert {key64(name) for name in ready} == resident
        assert group.cacheable or not pool.index[group.index]
        for name in ready:
            truth = self.truth(group, key64(name))
            self._check_bytes(tier, group.index, name)
            if pool.slot_of(group.index, name) is not None:
                self._check_snapshot(tier, group, truth)
            if group.kind in PREFIX:
                path = PATHS[key64(name)]
                before = path[: self.number_of(group.index, path) * units_of(group)]
                assert not before or key64(unit_hash(before)) in resident
            else:
                assert pool.parent_of(self.located[tier, group.index, key64(name)]) is None

    def _check_snapshot(self, tier: int, group: GroupSpec, truth: Block) -> None:
        """What can be told of a resident block long after it was announced."""
        meta = self.tiers[tier].pool.meta_of(self.located[tier, group.index, key64(truth.block_hash)])
        assert meta is not None
        assert (meta.group, meta.medium) == (group, self.tiers[tier].spec.medium)
        extra = meta.extra_keys[0] if meta.extra_keys else None
        assert (meta.block_hashes, meta.parent_block_hash) == (truth.block_hash, truth.parent)
        assert (meta.lora_id, meta.lora_name, extra) == (truth.lora_id, truth.lora_name, truth.extra_key)
        assert tuple(unpack_int32(meta.token_ids)) == truth.token_ids

    # what is served

    def number_of(self, group: int, path: Path) -> int:
        """The logical block that a prompt ends in."""
        return (len(path) - 1) // units_of(self.model[group])

    def needs(self, end: int, start: int) -> list[Need]:
        """What a prefix of `end` units needs that begins behind `start` local ones, group after group."""
        return [Need(group, number) for group in self.groups for number in needed(group, end * UNIT, start * UNIT)]

    def holds(self, held: Bytes | None, rank: int, need: Need, path: Path, end: int) -> bool:
        """Whether these bytes are a rank's part of a prompt's block, up to unit `end` at least."""
        group, number = need
        if held is None or (held.rank, held.content.group) != (rank, group.index):
            return False
        own, units = PATHS[key64(held.content.block_hash)], units_of(group)
        stop = min(end, (number + 1) * units)
        enough = len(own) >= stop if group.kind in PREFIX else len(own) == stop
        return enough and self.number_of(group.index, own) == number and own[:stop] == path[:stop]

    def resident(self, path: Path, end: int, start: int) -> bool:
        """The stream says that all of this can be loaded, each block from some tier."""
        shelves = [
            set().union(*(self.fold.hashes(medium, group) for medium in self.media))
            for group in range(len(self.model))
        ]
        return all(
            any(key64(unit_hash(path[:stop])) in shelves[need.group.index] for stop in self.ends(need, path, end))
            for need in self.needs(end, start)
        )

    def ends(self, need: Need, path: Path, end: int) -> list[int]:
        """Where a block may end that serves a prefix of `end` units: at its own end, or inside, at the prefix's."""
        own = (need.number + 1) * units_of(need.group)
        if own <= end:
            return [own]
        return [end, own] if need.group.kind in PREFIX and own <= len(path) else [end]

    def servable(self, path: Path, start: int = 0, *, fine: bool = False) -> int:
        """Units behind `start` that every group can serve: the longest of all lengths, each one tried."""
        step = step_tokens(self.model) // UNIT
        if start % step:
            return 0
        fine = fine and all(group.kind in (*PREFIX, "mamba") for group in self.groups)
        lengths = [end for end in range(len(path), start, -1) if fine or end % step == 0]
        return next((end - start for end in lengths if self.resident(path, end, start)), 0)

    def check_idle(self) -> None:
        """I12: with everything ended, nothing is held."""
        scheduler = self.scheduler
        assert not any((self.pending, self.doomed, len(self.reports), self.steps, self.loads, self.live))
        assert not any(map(len, (scheduler.landings, scheduler.loads, scheduler.loads.requests)))
        assert not scheduler.landings.pending_blocks
        for tier in self.tiers:
            assert not tier.pool.pinned()
            assert tier.pool.free_slots + tier.pool.count(READY) == tier.pool.capacity


def _as_given(extra: Any) -> Any:
    """An entry of extra_keys with the tuples that msgpack made lists of."""
    return extra and tuple(tuple(value) if isinstance(value, list) else value for value in extra)
