"""Loads: from a lookup to a leased hit, and from the lease to a copy back into the engine.

    lookup -> lease -> load -> Copy -> end -> Reply(Loaded)
                  \\-> release, finish, preempt, deadline or engine gone -> unpinned

A lease pins, in a prefix kind, the last block of the hit, which keeps all before it; in other kinds every block
that the hit needs. A load pins what it copies anew, because the engine may accept less than the hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvevents_service.core.commands import Command, Copy, Reply
from kvevents_service.core.groups import PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.prefix import PrefixQuery, Readable, loadable, longest_prefix, slots_of
from kvevents_service.core.requests import Lease, RequestMirror
from kvevents_service.core.slots import READY
from kvevents_service.core.tier import Tier
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec, Hit, Load, Loaded, Lookup, Release


class Loading:
    """A load under way: how many hash units the engine gets, what is pinned for it, and its copies."""

    __slots__ = ("blocks", "copies", "deadline", "good", "load_id", "pins", "session_id", "units")

    def __init__(self, session_id: int, load_id: int, units: int, pins: tuple[int, ...], deadline: float) -> None:
        self.session_id = session_id
        self.load_id = load_id
        self.units = units
        self.pins = pins
        self.deadline = deadline
        self.good = True
        self.blocks = self.copies = 0


class Loads:
    """Every leased hit and every load under way."""

    def __init__(self, tier: Tier, pool: Readable) -> None:
        self.tier = tier
        self.pool = pool
        self.requests = RequestMirror(tier.limits.max_leases)
        self._running: dict[TransferMeta, Loading] = {}
        self._under_way = 0
        self._groups = tuple(group for group in tier.spec.groups if group.cacheable)
        self._step_units = alignment(self._groups) // tier.spec.hash_tokens

    def __len__(self) -> int:
        return self._under_way

    # lookup

    def lookup(self, session_id: int, lookup: Lookup, now: float) -> Hit:
        """The longest prefix every group can serve, pinned until `now` + lease_s."""
        query = self._query(lookup)
        tokens = longest_prefix(self.pool, self._groups, query)
        units = (tokens - query.start_tokens) // query.hash_tokens
        self.tier.counters["lookups"] += 1
        self.tier.counters["lookup_blocks"] += len(lookup.block_hashes) // query.hash_bytes
        pins = self._pins(query, tokens) if units else None
        if pins is None or self.requests.full:
            self.tier.counters["lookups_refused"] += bool(units)
            return Hit(lookup.call_id, 0)
        self.tier.counters["hit_blocks"] += units
        return Hit(lookup.call_id, units, self._grant(session_id, lookup, query, units, pins, now))

    def _query(self, lookup: Lookup) -> PrefixQuery:
        spec = self.tier.spec
        if len(lookup.block_hashes) % spec.hash_bytes:
            raise ControlError("bad_hashes", "block_hashes", f"a multiple of {spec.hash_bytes} bytes")
        if not lookup.lease_s >= 0:
            raise ControlError("bad_lease", "lease_s", "a number of seconds, not negative")
        if lookup.start_tokens < 0 or lookup.start_tokens % spec.hash_tokens:
            raise ControlError(
                "bad_start", "start_tokens", f"a multiple of {spec.hash_tokens} tokens, not negative"
            )
        return PrefixQuery(lookup.block_hashes, lookup.start_tokens, spec.hash_tokens, spec.hash_bytes, lookup.fine)

    def _pins(self, query: PrefixQuery, tokens: int) -> tuple[int, ...] | None:
        """What keeps a prefix of `tokens` loadable; None if the hashes are not what a chain's would be."""
        pins = []
        for group in self._groups:
            wanted = needed_blocks(group, tokens, query.start_tokens)
            for block in wanted[-1:] if group.kind in PREFIX_KINDS else wanted:
                slot = loadable(self.pool, group, query, block, tokens)
                if slot is None:
                    return None
                pins.append(slot)
        return tuple(pins)

    def _grant(
        self,
        session_id: int,
        lookup: Lookup,
        query: PrefixQuery,
        units: int,
        pins: tuple[int, ...],
        now: float,
    ) -> int:
        for slot in pins:
            self.pool.pin(slot)
            self.pool.touch(slot)
        deadline = now + min(lookup.lease_s, self.tier.limits.max_lease_s)
        lease = Lease(self.tier.next_id(), session_id, lookup.request_id, units, pins, query, deadline)
        self.requests.grant(lease)
        return lease.lease_id

    # load

    def begin(self, session_id: int, load: Load, now: float) -> list[Command]:
        """Start copying the start of a leased hit back. A lease that is gone is a load of 0 blocks."""
        ids = self.tier.block_ids(session_id, load.block_ids, "block_ids")
        lease = self.requests.take(session_id, load.lease_id)
        units = 0 if lease is None else self._accepted_units(lease, load, len(ids))
        slots = self._slots(lease, units) if lease is not None and units else None
        if lease is None or slots is None:
            self._unpin(() if lease is None else lease.pins)
            self.tier.counters["loads_refused"] += 1
            return [Reply(session_id, Loaded(load.load_id, 0))]
        deadline = now + self.tier.limits.transfer_deadline_s
        loading = Loading(session_id, load.load_id, units, self._swap_pins(lease, slots), deadline)
        self._under_way += 1
        return self._start(loading, ids, slots)

    def _start(self, loading: Loading, ids: array[int], slots: list[list[int]]) -> list[Command]:
        return [self._copy(loading, ids, array("i", [slot for group in slots for slot in group]))]

    def _copy(self, loading: Loading, ids: array[int], slots: array[int], tier: int = 0) -> Copy:
        transfer = TransferMeta(
            self.tier.next_id(), "load", loading.session_id, loading.load_id, ids, slots, loading.deadline,
            tier=tier,
        )  # fmt: skip
        self._running[transfer] = loading
        loading.copies += 1
        return Copy(transfer)

    def _accepted_units(self, lease: Lease, load: Load, ids: int) -> int:
        """Hash units of the hit that the engine takes; 0 if its block ids do not fit them."""
        units = self._implied_units(ids) if load.units is None else load.units
        if not 0 < units <= lease.units or (units % self._step_units and not lease.query.fine):
            return 0
        return units if ids == sum(len(self._needed(lease, group, units)) for group in self._groups) else 0

    def _implied_units(self, ids: int) -> int:
        """Where every group takes every block, the number of block ids says how many units were taken."""
        if any(group.kind not in PREFIX_KINDS for group in self._groups):
            return 0
        step_tokens = self._step_units * self.tier.spec.hash_tokens
        steps, rest = divmod(ids, sum(step_tokens // group.block_size for group in self._groups))
        return 0 if rest else steps * self._step_units

    def _needed(self, lease: Lease, group: GroupSpec, units: int) -> range:
        query = lease.query
        return needed_blocks(group, query.start_tokens + units * query.hash_tokens, query.start_tokens)

    def _slots(self, lease: Lease, units: int) -> list[list[int]] | None:
        """Slots that are copied, group after group; None if they are not what was looked up.

        A reset since the lookup leaves bytes of an older model under the lease: those are never loaded.
        """
        pool, query = self.pool, lease.query
        if any(pool.state_of(slot) != READY for slot in lease.pins):
            return None
        tokens = query.start_tokens + units * query.hash_tokens
        found = [slots_of(pool, group, query, tokens) for group in self._groups]
        slots = [group for group in found if group is not None]
        return slots if len(slots) == len(found) else None

    def _swap_pins(self, lease: Lease, slots: list[list[int]]) -> tuple[int, ...]:
        """Pin what is copied instead of what was leased."""
        pins = tuple(
            slot
            for group, own in zip(self._groups, slots, strict=True)
            for slot in (self.pool.ends(own) if group.kind in PREFIX_KINDS else own)
        )
        for slot in pins:
            self.pool.pin(slot)
        self._unpin(lease.pins)
        return pins

    def end(self, transfer: TransferMeta, *, good: bool) -> list[Command]:
        """A copy has ended. A bad one makes its load a miss, and so does a reset that met it."""
        loading = self._running.pop(transfer)
        loading.good &= good
        loading.blocks += transfer.blocks
        loading.copies -= 1
        return [] if loading.copies else [self._finish(loading)]

    def void(self) -> None:
        """A reset: the loads under way are misses."""
        for loading in self._running.values():
            loading.good = False

    def _finish(self, loading: Loading) -> Reply:
        self._under_way -= 1
        good = loading.good and all(self.pool.state_of(slot) == READY for slot in loading.pins)
        self._unpin(loading.pins)
        self.tier.counters["blocks_loaded"] += loading.blocks if good else 0
        self.tier.counters["loads_failed"] += not good
        return Reply(loading.session_id, Loaded(loading.load_id, loading.units if good else 0))

    # the ends of leases

    def release(self, session_id: int, release: Release) -> None:
        """The engine will not use this hit."""
        lease = self.requests.take(session_id, release.lease_id)
        self._unpin(() if lease is None else lease.pins)

    def finish(self, session_id: int, request_id: str) -> None:
        """The request ended or lost its blocks: its hits are unpinned. Copies under way need no request."""
        self._unpin_leases(self.requests.take_request(session_id, request_id))

    def goodbye(self, session_id: int) -> None:
        """The engine is gone."""
        self._unpin_leases(self.requests.take_session(session_id))

    def expire(self, now: float) -> None:
        """End the leases whose deadline has passed."""
        expired = self.requests.take_expired(now)
        self.tier.counters["leases_expired"] += len(expired)
        self._unpin_leases(expired)

    def _unpin_leases(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._unpin(lease.pins)

    def _unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.pool.unpin(slot)
