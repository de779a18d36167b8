"""The shell around the scheduler, simulated down to the bytes: engines, an arena, copies that end when told.

Each engine has one or more ranks with memory of their own, and the tier has an arena for each. A rank can die; it
comes back with empty memory.

`World.perform` is the judge. Whatever the scheduler commands is checked against what is true at that moment:
what is announced is there, what is copied is free to be written, what is answered was asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from core.models import PREFIX, UNIT, cacheable, needed, step_tokens
from core.prompts import PATHS, Block, Path, block, key64, unit_hash, units_of
from kvevents_service.core.announce import to_event
from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.metadata import Announcement, TransferMeta
from kvevents_service.core.ranks import RankReports
from kvevents_service.core.residency import Residency
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.slots import PENDING, READY
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.control import GroupSpec, Load, Loaded, Reset, ResetDone, Step, StepDone
from kvevents_service.wire.events import BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.packing import unpack_int32

ENGINE_BLOCKS = 1_000_000
MEDIUM = "CPU"


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
"""Blocks of one rank of an engine."""


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
    """A store copy: what it means to write, and whether that may be announced."""

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
        self.model = scheduler.tier.spec.groups
        self.groups = cacheable(self.model)
        self.arenas: list[list[Bytes | None]] = [[None] * self.pool.capacity for _ in self.ranks]
        self.engines: dict[int, dict[int, Memory]] = {}
        self.fold = Residency({group.index: group.block_size for group in self.model})
        self.located: dict[tuple[int, int], int] = {}
        self.writers: dict[int, Writer] = {}
        self.pending: list[RankCopy] = []
        self.doomed: set[TransferMeta] = set()
        self.steps: dict[tuple[int, int], int] = {}
        self.loads: dict[tuple[int, int], Order] = {}
        self.live: dict[int, Grant] = {}
        self.grants: list[Grant] = []
        self.resets = self.losses = self.stored = self.last_id = 0

    # what engines say

    def hello(self, session_id: int) -> None:
        self.engines[session_id] = {rank: {} for rank in self.ranks}
        self.scheduler.hello(session_id, ENGINE_BLOCKS)

    def present(self, session_id: int) -> bool:
        """Every rank has registered its memory."""
        return len(self.engines[session_id]) == len(self.ranks)

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
        commands = self.scheduler.step(session_id, step, now)
        for request_id in [*step.finished, *step.preempted]:
            self._forget_request(session_id, request_id)
        return self.perform(commands)

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
        self.resets += 1
        resident = len(self.fold)
        for writer in self._unannounced():
            writer.void = True
        commands = self.scheduler.reset(session_id, Reset(7))
        assert commands[-1] == Reply(session_id, ResetDone(7, resident))
        self.perform(commands[:-1])
        assert len(self.fold) == 0

    def tick(self, now: float) -> None:
        self.live = {k: grant for k, grant in self.live.items() if grant.deadline > now}
        self.scheduler.tick(now)

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
                    del self.located[event.group_idx or 0, int(key)]

    def _check_stored(self, event: BlockStored) -> None:
        """I7: complete and true. I1, I2: the bytes are there, from a copy that ended well and still counts."""
        assert event.group_idx is not None
        spec = self.model[event.group_idx]
        inner = event.block_size != spec.block_size
        assert event.block_size == (UNIT if inner else spec.block_size)
        assert (event.medium, event.locality) == (MEDIUM, "LOCAL")
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
            self._check_bytes(spec.index, truth.block_hash)
            parent = key
        self.stored += len(event.block_hashes)

    def truth(self, group: GroupSpec, key: int) -> Block:
        """What is so of the block of this group that a hash names; of its last unit, if it ends inside a block."""
        whole = len(PATHS[key]) % units_of(group) == 0
        return block(PATHS[key], units_of(group) if whole else 1)

    def _check_bytes(self, group: int, block_hash: bytes) -> None:
        slot = self.pool.slot_of(group, block_hash)
        if slot is None:
            slot = self.pool.inner_slot(group, block_hash)
        assert slot is not None
        path = PATHS[key64(block_hash)]
        need = Need(self.model[group], self.number_of(group, path))
        assert all(self.holds(self.arenas[rank][slot], rank, need, path, len(path)) for rank in self.ranks)
        assert self.writers[slot].ranks_copied == set(self.ranks)
        assert not self.writers[slot].void
        self.located[group, key64(block_hash)] = slot

    def _start(self, transfer: TransferMeta) -> None:
        assert 0 < len(transfer.slots) == len(transfer.engine_blocks) == len(set(transfer.slots))
        assert self.present(transfer.session_id), "a copy that not every rank can do"
        under_way = {copy.transfer for copy in self.pending}
        busy = {slot for other in under_way if other.kind == "store" for slot in other.slots}
        assert busy.isdisjoint(transfer.slots), "a slot that is being written"
        if transfer.kind == "store":
            read = {slot for other in under_way for slot in other.slots}
            assert read.isdisjoint(transfer.slots), "a slot that is being read"
            assert set(self.located.values()).isdisjoint(transfer.slots), "rewritten before its removal (I3)"
            writer = Writer(transfer)
            for slot in transfer.slots:
                self.writers[slot] = writer
                for arena in self.arenas:
                    arena[slot] = None
        self.reports.begin(transfer, len(self.ranks))
        self.pending += [RankCopy(transfer, rank, self.engines[transfer.session_id][rank]) for rank in self.ranks]

    def _step_done(self, session_id: int, done: StepDone) -> list[int]:
        offered = self.steps.pop((session_id, done.step_id))
        assert done.stored + done.known + done.declined == offered
        assert min(done.stored, done.known, done.declined) >= 0
        self._check_no_copy("store", session_id, done.step_id)
        for writer in self.writers.values():
            whose = (writer.transfer.session_id, writer.transfer.owner_id)
            writer.ended |= whose == (session_id, done.step_id)
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
        """A rank's load finds that some of its bytes are gone for good; `blocks`: a bit for each."""
        loads = [number for number, copy in enumerate(self.pending) if copy.transfer.kind == "load"]
        if not loads:
            return
        number = loads[position % len(loads)]
        copy = self.pending[number]
        lost = [slot for place, slot in enumerate(copy.transfer.slots) if blocks >> place % 8 & 1]
        for slot in lost:
            self.arenas[copy.rank][slot] = None
        self.losses += bool(lost)
        self.perform(self.scheduler.lose(copy.transfer, lost))
        self.settle(number, good=False)

    def settle(self, position: int, *, good: bool, twice: bool = False) -> None:
        """A rank's copy ends. `twice`: it says so again, and that means nothing."""
        copy = self.pending.pop(position % len(self.pending))
        transfer, arena = copy.transfer, self.arenas[copy.rank]
        for block_id, slot in zip(transfer.engine_blocks, transfer.slots, strict=True):
            if transfer.kind == "load":
                copy.memory[block_id] = arena[slot] if good else None
            else:
                arena[slot] = copy.memory[block_id] if good else None
        if transfer.kind == "store":
            writer = self.writers[transfer.slots[0]]
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
        """Stream == pool == arena, and the counters say so."""
        self.pool.check()
        self.fold.check()
        stats = self.scheduler.stats()
        for group in self.model:
            self._check_group(group)
        promised = [(grant, grant.units) for grant in self.live.values()]
        promised += [(grant, units) for grant, units, _ in self.loads.values() if grant]
        for grant, units in promised:
            kept = self.resident(grant.path, grant.start + units, grant.start)
            void = (grant.resets, grant.losses) != (self.resets, self.losses)
            assert kept or void, "a hit that was promised has left"
        blocks = {(key, slot) for (key, _), slot in self.located.items()}
        assert stats["blocks_resident"] == len(blocks) == self.pool.count(READY)
        assert stats["blocks_stored"] == self.fold.stored == self.stored
        assert stats["blocks_removed"] == self.fold.removed
        assert stats["leases"] == len(self.live)
        assert stats["blocks_pending"] == self.pool.count(PENDING) <= self.scheduler.landings.pending_blocks
        owed = len(self.loads) + len(self.steps)
        assert stats["transfers"] == owed
        assert self.pending or not owed, "nothing is under way, yet somebody is still waited for"
        assert len(self.reports) == len({copy.transfer for copy in self.pending})

    def _check_group(self, group: GroupSpec) -> None:
        """I4: stream == pool. I6: prefix-closed where the kind asks for it, every block for itself elsewhere."""
        ready = self.pool.ready_names(group.index)
        resident = self.fold.hashes(MEDIUM, group.index)
        assert {key64(name) for name in ready} == resident
        assert group.cacheable or not self.pool.index[group.index]
        for name in ready:
            truth = self.truth(group, key64(name))
            self._check_bytes(group.index, name)
            if self.pool.slot_of(group.index, name) is not None:
                self._check_snapshot(group, truth)
            if group.kind in PREFIX:
                path = PATHS[key64(name)]
                before = path[: self.number_of(group.index, path) * units_of(group)]
                assert not before or key64(unit_hash(before)) in resident
            else:
                assert self.pool.parent_of(self.located[group.index, key64(name)]) is None

    def _check_snapshot(self, group: GroupSpec, truth: Block) -> None:
        """What can be told of a resident block long after it was announced."""
        meta = self.pool.meta_of(self.located[group.index, key64(truth.block_hash)])
        assert meta is not None
        assert meta.group == group
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
        """The stream says that all of this can be loaded."""
        shelves = [self.fold.hashes(MEDIUM, group) for group in range(len(self.model))]
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
        scheduler, pool = self.scheduler, self.pool
        assert not any((self.pending, self.doomed, len(self.reports), self.steps, self.loads, self.live))
        assert not any((pool.pinned(), scheduler.landings.pending_blocks))
        assert not any(map(len, (scheduler.landings, scheduler.loads, scheduler.loads.requests)))
        assert pool.free_slots + pool.count(READY) == pool.capacity


def _as_given(extra: Any) -> Any:
    """An entry of extra_keys with the tuples that msgpack made lists of."""
    return extra and tuple(tuple(value) if isinstance(value, list) else value for value in extra)
