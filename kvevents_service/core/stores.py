"""Stores: from a step's offers to slots and a copy, and from the copy's end to an announcement.

begin -> Copy -> landed -> Reply(StepDone)
"""

from __future__ import annotations

from array import array
from functools import partial

from kvevents_service.core.commands import Command, Copy, Reply
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.landings import Landed, Landings
from kvevents_service.core.metadata import (
    BlockStoreMeta,
    StoreRun,
    TransferMeta,
    inner_snapshot,
    snapshot,
)
from kvevents_service.core.names import Evicted
from kvevents_service.core.offers import chain_fault, parent_slot, runs, shape_fault, split_hashes, tail_of
from kvevents_service.core.tier import Tier
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import Offer, Step, StepDone
from kvevents_service.wire.packing import INT32_BYTES, unpack_int32


class StepTally:
    """Blocks of one step: what became of them, and the runs that need a copy."""

    __slots__ = ("declined", "engine_blocks", "evicted", "known", "runs", "slots")

    def __init__(self) -> None:
        self.known = self.declined = 0
        self.runs: list[StoreRun] = []
        self.evicted: list[Evicted] = []
        self.engine_blocks = array("i")
        self.slots = array("i")


class Stores:
    """What steps offer to a tier."""

    def __init__(self, tier: Tier, landings: Landings) -> None:
        self.tier = tier
        self._landings = landings

    def begin(self, session_id: int, step: Step, now: float) -> list[Command]:
        """Store what is new of a step's offers. ControlError, before anything changed, if one is impossible."""
        self.check(session_id, step)
        tally = StepTally()
        for offer in step.offers:
            self._take_offer(offer, tally)
        commands = self.tier.evicted(tally.evicted)
        if not tally.runs:
            return [*commands, Reply(session_id, StepDone(step.step_id, 0, tally.known, tally.declined))]
        return [*commands, Copy(self._transfer(session_id, step.step_id, tally, now))]

    def check(self, session_id: int, step: Step) -> None:
        """ControlError if an offer is of no group, or of blocks that the engine has not."""
        for offer in step.offers:
            if not 0 <= offer.group < len(self.tier.spec.groups):
                raise ControlError("bad_group", "offers.group", f"below {len(self.tier.spec.groups)}")
            self.tier.block_ids(session_id, offer.block_ids, "offers.block_ids")

    def _take_offer(self, offer: Offer, tally: StepTally) -> None:
        spec = self.tier.spec
        group = spec.groups[offer.group]
        fault = shape_fault(offer, group, spec.hash_bytes, spec.hash_tokens)
        if fault is not None:
            self._decline(tally, fault, len(offer.block_ids) // INT32_BYTES)
            return
        parent = self.tier.pool.own_hash(group.index, offer.parent)
        meta = snapshot(offer, group, spec.medium, spec.hash_bytes, parent)
        hashes = split_hashes(offer.block_hashes, spec.hash_bytes)
        if hashes:
            (self._take_chain if group.kind in PREFIX_KINDS else self._take_loose)(offer, meta, hashes, tally)
        tail = tail_of(offer, spec.hash_bytes)
        if tail is not None:
            self._take_tail(offer, inner_snapshot(offer, tail, group, spec.medium, spec.hash_tokens), tally)

    def _take_chain(self, offer: Offer, meta: BlockStoreMeta, hashes: list[bytes], tally: StepTally) -> None:
        """Blocks behind their parent: what is unknown of the run."""
        pool = self.tier.pool
        known = pool.known_prefix(meta.group.index, hashes)
        parent = parent_slot(pool, meta, hashes, known)
        if parent is not None:
            pool.touch(parent)
        self._count_known(tally, known)
        if known == len(hashes):
            return
        over_limit = self._over_limit(tally, len(hashes) - known)
        fault = "backlog" if over_limit else chain_fault(pool, meta, hashes, known, parent)
        if fault is not None:
            self._decline(tally, fault, len(hashes) - known)
            return
        rest, block_ids = meta.part(known, len(hashes)), offer.block_ids[INT32_BYTES * known :]
        self._store(rest, hashes[known:], parent, block_ids, tally, self._names(offer, known))

    def _names(self, offer: Offer, first: int) -> list[tuple[int, BlockStoreMeta]]:
        """Inner names of an offer's blocks, with the block's place behind block `first`."""
        spec = self.tier.spec
        group = spec.groups[offer.group]
        return [
            (name.block - first, inner_snapshot(offer, name, group, spec.medium, spec.hash_tokens))
            for name in offer.inner or ()
        ]

    def _take_loose(self, offer: Offer, meta: BlockStoreMeta, hashes: list[bytes], tally: StepTally) -> None:
        """Blocks that need no parent: each unknown one is stored, consecutive ones as one run."""
        pool, group = self.tier.pool, meta.group.index
        slots = [pool.slot_of(group, block_hash) for block_hash in hashes]
        pool.touch_all([slot for slot in slots if slot is not None])
        wanted = [position for position, slot in enumerate(slots) if slot is None]
        self._count_known(tally, len(hashes) - len(wanted))
        if not pool.is_fresh_chain(group, [hashes[position] for position in wanted]):
            self._decline(tally, "not_a_chain", len(wanted))
            return
        for start, stop in runs(wanted):
            if self._over_limit(tally, stop - start):
                self._decline(tally, "backlog", stop - start)
            else:
                block_ids = offer.block_ids[INT32_BYTES * start :]
                self._store(meta.part(start, stop), hashes[start:stop], None, block_ids, tally, [])

    def _take_tail(self, offer: Offer, meta: BlockStoreMeta, tally: StepTally) -> None:
        """The last block, filled up to its inner name alone."""
        pool, group = self.tier.pool, meta.group
        slot = pool.inner_slot(group.index, meta.block_hashes)
        if slot is not None:
            pool.touch(slot)
            self._count_known(tally, 1)
            return
        before = offer.block_hashes[-meta.hash_bytes :] or offer.parent
        parent = None if before is None or group.kind not in PREFIX_KINDS else pool.slot_of(group.index, before)
        if pool.slot_of(group.index, meta.block_hashes) is not None:
            self._decline(tally, "not_a_chain", 1)
        elif parent is None and before is not None and group.kind in PREFIX_KINDS:
            self._decline(tally, "parent_absent", 1)
        elif self._over_limit(tally, 1):
            self._decline(tally, "backlog", 1)
        else:
            self._store(meta, [meta.block_hashes], parent, offer.block_ids[-INT32_BYTES:], tally, [])

    def _count_known(self, tally: StepTally, blocks: int) -> None:
        tally.known += blocks
        self.tier.counters["blocks_known"] += blocks

    def _over_limit(self, tally: StepTally, blocks: int) -> bool:
        pending = self._landings.pending_blocks + len(tally.slots)
        return pending + blocks > self.tier.limits.max_pending_blocks

    def _store(
        self,
        meta: BlockStoreMeta,
        hashes: list[bytes],
        parent: int | None,
        block_ids: bytes,
        tally: StepTally,
        names: list[tuple[int, BlockStoreMeta]],
    ) -> None:
        slots, evicted = self.tier.pool.allocate(meta, hashes, parent)
        tally.evicted += evicted
        if len(slots) < len(hashes):
            self._decline(tally, "no_room", len(hashes) - len(slots))
        if slots:
            tally.runs.append(StoreRun(meta.part(0, len(slots)), slots, self._add_names(slots, names)))
            tally.slots.extend(slots)
            tally.engine_blocks += unpack_int32(block_ids[: INT32_BYTES * len(slots)])

    def _add_names(self, slots: list[int], names: list[tuple[int, BlockStoreMeta]]) -> tuple[BlockStoreMeta, ...]:
        """Inner names of the blocks that got slots; returns those that no other block has."""
        own = [(slots[place], meta) for place, meta in names if 0 <= place < len(slots)]
        return tuple(meta for slot, meta in own if self.tier.pool.add_name(slot, meta))

    def _decline(self, tally: StepTally, reason: str, blocks: int) -> None:
        tally.declined += blocks
        self.tier.counters[f"declined_{reason}"] += blocks

    def _transfer(self, session_id: int, step_id: int, tally: StepTally, now: float) -> TransferMeta:
        deadline = now + self.tier.limits.transfer_deadline_s
        transfer = TransferMeta(
            self.tier.next_id(), "store", session_id, step_id, tally.engine_blocks, tally.slots, deadline,
            tuple(tally.runs),
        )  # fmt: skip
        self._landings.begin(transfer, partial(self._step_done, tally))
        return transfer

    def _step_done(self, tally: StepTally, landed: Landed) -> list[Command]:
        transfer, stored = landed
        dropped = transfer.blocks - stored
        self.tier.counters["declined_store_dropped"] += dropped
        done = StepDone(transfer.owner_id, stored, tally.known, tally.declined + dropped)
        return [Reply(transfer.session_id, done)]
