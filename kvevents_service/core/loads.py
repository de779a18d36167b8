"""Loads: from a lookup to a leased hit, and from the lease to a copy back into the engine.

lookup -> lease -> load -> Copy -> end -> Reply(Loaded)
              \\-> release, finish, preempt, deadline or engine gone -> unpinned
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvevents_service.core.commands import Command, Copy, Reply
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.requests import Lease, RequestMirror
from kvevents_service.core.slots import READY
from kvevents_service.core.tier import Tier
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import Hit, Load, Loaded, Lookup, Release


class Loads:
    """Every leased hit and every load under way."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.requests = RequestMirror(tier.limits.max_leases)
        self._running: dict[TransferMeta, Lease] = {}
        self._groups = tuple(group.index for group in tier.spec.groups if group.cacheable)

    def __len__(self) -> int:
        return len(self._running)

    # lookup

    def lookup(self, session_id: int, lookup: Lookup, now: float) -> Hit:
        """The longest prefix every group can serve, pinned until `now` + lease_s."""
        width, packed = self.tier.spec.hash_bytes, lookup.block_hashes
        if len(packed) % width:
            raise ControlError("bad_hashes", "block_hashes", f"a multiple of {width} bytes")
        if not lookup.lease_s >= 0:
            raise ControlError("bad_lease", "lease_s", "a number of seconds, not negative")
        blocks = min(self.tier.pool.ready_prefix(group, packed, width) for group in self._groups)
        self.tier.counters["lookups"] += 1
        tails = self._tails(packed[(blocks - 1) * width : blocks * width]) if blocks else None
        if tails is None or self.requests.full:
            self.tier.counters["lookups_refused"] += bool(blocks)
            return Hit(lookup.call_id, 0)
        self.tier.counters["hit_blocks"] += blocks
        return Hit(lookup.call_id, blocks, self._grant(session_id, lookup, blocks, tails, now))

    def _tails(self, block_hash: bytes) -> tuple[int, ...] | None:
        """The slot of this block in every group; None if one cannot load it."""
        pool = self.tier.pool
        slots = [pool.slot_of(group, block_hash) for group in self._groups]
        found = tuple(slot for slot in slots if slot is not None and pool.state_of(slot) == READY)
        return found if len(found) == len(slots) else None

    def _grant(self, session_id: int, lookup: Lookup, blocks: int, tails: tuple[int, ...], now: float) -> int:
        for slot in tails:
            self.tier.pool.pin(slot)
            self.tier.pool.touch(slot)
        deadline = now + min(lookup.lease_s, self.tier.limits.max_lease_s)
        first = lookup.block_hashes[: self.tier.spec.hash_bytes]
        lease = Lease(self.tier.next_id(), session_id, lookup.request_id, blocks, tails, first, deadline)
        self.requests.grant(lease)
        return lease.lease_id

    # load

    def begin(self, session_id: int, load: Load, now: float) -> list[Command]:
        """Start copying the first blocks of a leased hit back. A lease that is gone is a load of 0 blocks."""
        ids = self.tier.block_ids(session_id, load.block_ids, "block_ids")
        lease = self.requests.take(session_id, load.lease_id)
        slots = None if lease is None else self._slots(lease, len(ids))
        if lease is None or slots is None:
            self._unpin([] if lease is None else [lease])
            self.tier.counters["loads_refused"] += 1
            return [Reply(session_id, Loaded(load.load_id, 0))]
        deadline = now + self.tier.limits.transfer_deadline_s
        transfer = TransferMeta(self.tier.next_id(), "load", session_id, load.load_id, ids, slots, deadline)
        self._running[transfer] = lease
        return [Copy(transfer)]

    def _slots(self, lease: Lease, wanted: int) -> array[int] | None:
        """Slots of the first blocks of the hit, group after group; None if they are not what was looked up.

        A reset since the lookup leaves bytes of an older model under the lease: those are never loaded.
        """
        blocks, rest = divmod(wanted, len(lease.tails))
        if rest or not 0 < blocks <= lease.blocks:
            return None
        slots = array("i")
        for tail in lease.tails:
            chain = self.tier.pool.chain(tail, lease.blocks)
            if chain is None or self.tier.pool.hash_of(chain[0]) != lease.first_hash:
                return None
            slots.extend(chain[:blocks])
        return slots

    def end(self, transfer: TransferMeta, *, good: bool) -> list[Command]:
        """The copy has ended. A bad one is a miss at once, and so is one that a reset met."""
        lease = self._running.pop(transfer)
        good = good and all(self.tier.pool.state_of(tail) == READY for tail in lease.tails)
        self._unpin([lease])
        self.tier.counters["blocks_loaded"] += transfer.blocks if good else 0
        self.tier.counters["loads_failed"] += not good
        blocks = transfer.blocks // len(lease.tails) if good else 0
        return [Reply(transfer.session_id, Loaded(transfer.owner_id, blocks))]

    # the ends of leases

    def release(self, session_id: int, release: Release) -> None:
        """The engine will not use this hit."""
        lease = self.requests.take(session_id, release.lease_id)
        self._unpin([] if lease is None else [lease])

    def finish(self, session_id: int, request_id: str) -> None:
        """The request ended or lost its blocks: its hits are unpinned. Copies under way need no request."""
        self._unpin(self.requests.take_request(session_id, request_id))

    def goodbye(self, session_id: int) -> None:
        """The engine is gone."""
        self._unpin(self.requests.take_session(session_id))

    def expire(self, now: float) -> None:
        """End the leases whose deadline has passed."""
        expired = self.requests.take_expired(now)
        self.tier.counters["leases_expired"] += len(expired)
        self._unpin(expired)

    def _unpin(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            for slot in lease.tails:
                self.tier.pool.unpin(slot)
