"""The offload scheduler under every order of events that hypothesis can think of (I1-I4, I6-I9, I12)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.prompts import FULL, LATENT, MAX_DEPTH, SCRATCH, Path, block, chain, chain_to, offer
from core.world import ENGINE_BLOCKS, MEDIUM, Grant, World
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import Load, Lookup, Offer, Release, Step
from kvevents_service.wire.packing import pack_int32

LIMITS = Limits(max_pending_blocks=14, max_leases=3, max_lease_s=20.0)
MODELS = {"one group": (FULL, SCRATCH), "two groups": (FULL, LATENT, msgspec.structs.replace(SCRATCH, index=2))}

paths = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=MAX_DEPTH).map(tuple)
requests = st.sampled_from(["a", "b"])
places = st.integers(0, 1)
few_requests = st.lists(requests, max_size=1)


def _cut_tokens(good: Offer) -> Offer:
    return msgspec.structs.replace(good, token_ids=good.token_ids[:-4])


def _cut_hash(good: Offer) -> Offer:
    return msgspec.structs.replace(good, block_hashes=good.block_hashes[:-32])


def _odd_hash(good: Offer) -> Offer:
    return msgspec.structs.replace(good, block_hashes=good.block_hashes[:-1])


def _extra_keys(good: Offer) -> Offer:
    return msgspec.structs.replace(good, extra_keys=[None] * (len(good.block_ids) // 4 + 1))


def _short_parent(good: Offer) -> Offer:
    return msgspec.structs.replace(good, parent=b"short")


def _foreign_parent(good: Offer) -> Offer:
    return msgspec.structs.replace(good, parent=b"\xee" * 32)


def _twice(good: Offer) -> Offer:
    """Each block once more: hashes that repeat are no chain."""
    doubled = {name: getattr(good, name) * 2 for name in ("block_hashes", "token_ids", "block_ids")}
    return msgspec.structs.replace(good, **doubled, extra_keys=good.extra_keys and good.extra_keys * 2)


FAULTS = [_cut_tokens, _cut_hash, _odd_hash, _extra_keys, _short_parent, _foreign_parent, _twice]
leases_s = st.sampled_from([0, 5.0, 1e9, float("inf")])
rarely = st.booleans()
mutations = st.sampled_from([None] * 12 + FAULTS)


class Offloading(RuleBasedStateMachine):
    """Two engines, a tier far too small for them, copies that end in any order."""

    world: World
    now = 0.0

    @initialize(capacity=st.integers(4, 12), model=st.sampled_from(sorted(MODELS)))
    def start(self, capacity: int, model: str) -> None:
        self.groups = len(MODELS[model])
        spec = TierSpec(MEDIUM, capacity, 32, MODELS[model], FULL.block_size)
        self.world = World(OffloadScheduler(spec, LIMITS))
        self.scheduler = self.world.scheduler
        self.sessions = [1, 2]
        for session_id in self.sessions:
            self.world.hello(session_id)

    def next_id(self) -> int:
        self.world.last_id += 1
        return self.world.last_id

    def block_ids(self, count: int) -> list[int]:
        return [self.next_id() for _ in range(count)]

    # stores

    @rule(place=places, data=st.data(), finished=few_requests, preempted=few_requests)
    def step(self, place: int, data: Any, finished: list[str], preempted: list[str]) -> None:
        offers = [self.offer(data) for _ in range(data.draw(st.integers(1, 3)))]
        step = Step(self.next_id(), offers, finished, preempted)
        self.world.step(self.sessions[place], step, self.now)

    @rule(place=places, path=paths, extra=paths)
    def branch_within_a_step(self, place: int, path: Path, extra: Path) -> None:
        """A prompt and another one that leaves it anywhere."""
        both = (path[: len(path) // 2 + 1] + extra)[:MAX_DEPTH]
        offers = [offer(whole, self.block_ids(len(whole)), group=0) for whole in (path, both)]
        self.world.step(self.sessions[place], Step(self.next_id(), offers), self.now)

    def offer(self, data: Any) -> Offer:
        path = data.draw(paths)
        start = data.draw(st.sampled_from([0, 0, len(path) // 2, len(path) - 1]))
        group = data.draw(st.integers(0, self.groups - 1))
        good = offer(path, self.block_ids(len(path) - start), start, group)
        mutate = data.draw(mutations)
        return good if mutate is None else mutate(good)

    @rule(place=places, path=paths)
    def store_in_every_group(self, place: int, path: Path) -> None:
        offers = [offer(path, self.block_ids(len(path)), group=group) for group in self.world.cacheable]
        self.world.step(self.sessions[place], Step(self.next_id(), offers), self.now)

    # copies

    @precondition(lambda self: self.world.pending)
    @rule(position=st.integers(0, 63))
    def complete(self, position: int) -> None:
        self.world.settle(position, good=True)

    @precondition(lambda self: self.world.pending)
    @rule(count=st.integers(1, 6))
    def complete_the_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self.world.pending))):
            self.world.settle(0, good=True)

    @precondition(lambda self: self.world.pending)
    @rule(position=st.integers(0, 63))
    def fail(self, position: int) -> None:
        self.world.settle(position, good=False)

    # loads

    @rule(place=places, request_id=requests, path=paths, start=st.sampled_from([0, 0, 0, 1]), lease_s=leases_s)
    def lookup(self, place: int, request_id: str, path: Path, start: int, lease_s: float) -> None:
        self.look_up(place, request_id, [item.block_hash for item in chain(path)[start:]], lease_s)

    @precondition(lambda self: len(self.world.fold))
    @rule(place=places, request_id=requests, data=st.data())
    def lookup_and_load_residents(self, place: int, request_id: str, data: Any) -> None:
        tail = data.draw(st.sampled_from(sorted(self.world.fold.hashes(MEDIUM, 0)) or [block((0,)).key64]))
        grant = self.look_up(place, request_id, [item.block_hash for item in chain_to(tail)], 5.0)
        if grant is not None:
            blocks = data.draw(st.integers(1, len(grant.hashes)))
            self.load_blocks(grant.session_id, grant, blocks * len(self.world.cacheable))

    def look_up(self, place: int, request_id: str, names: list[bytes], lease_s: float) -> Grant | None:
        call = Lookup(self.next_id(), request_id, b"".join(names), lease_s)
        full = len(self.world.live) >= LIMITS.max_leases
        hit = self.scheduler.lookup(self.sessions[place], call, self.now)
        assert hit.call_id == call.call_id
        assert hit.blocks == (0 if full else self.world.ready_depth(names))
        assert (hit.lease_id is None) == (hit.blocks == 0)
        if hit.lease_id is None:
            return None
        deadline = self.now + min(lease_s, LIMITS.max_lease_s)
        granted = tuple(names[: hit.blocks])
        grant = Grant(hit.lease_id, self.sessions[place], request_id, granted, deadline, self.world.resets)
        self.world.lookup_granted(grant)
        return grant

    @precondition(lambda self: self.world.grants)
    @rule(data=st.data(), other_session=st.sampled_from([False] * 7 + [True]))
    def load(self, data: Any, other_session: bool) -> None:
        """All, fewer, too many, none, or an odd number of blocks; of a lease that may have ended."""
        grant = data.draw(st.sampled_from(self.world.grants[-6:]))
        session_id = grant.session_id
        if other_session or session_id not in self.sessions:
            session_id = next(s for s in self.sessions if s != session_id)
        every = len(grant.hashes) * len(self.world.cacheable)
        blocks = data.draw(st.sampled_from([every] * 3 + list(range(every + 3))))
        self.load_blocks(session_id, grant, blocks)

    def load_blocks(self, session_id: int, grant: Grant, blocks: int) -> None:
        """A copy starts if, and only if, the lease is alive and the blocks are some of the hit's in every group."""
        each, odd = divmod(blocks, len(self.world.cacheable))
        alive = grant.lease_id in self.world.live and session_id == grant.session_id
        valid = grant.resets == self.world.resets and 0 < each <= len(grant.hashes) and not odd
        under_way = len(self.scheduler.loads)
        load = Load(self.next_id(), grant.request_id, grant.lease_id, pack_int32(self.block_ids(blocks)))
        self.world.load(session_id, load, self.now)
        assert len(self.scheduler.loads) - under_way == (alive and valid)

    @precondition(lambda self: self.world.grants)
    @rule(place=places, data=st.data())
    def release(self, place: int, data: Any) -> None:
        grant = data.draw(st.sampled_from(self.world.grants))
        self.world.take(self.sessions[place], grant.lease_id)
        self.scheduler.release(self.sessions[place], Release(grant.lease_id))

    # ends

    @rule(place=places, request_id=requests, preempt=st.booleans())
    def end_request(self, place: int, request_id: str, preempt: bool) -> None:
        self.world.end_request(self.sessions[place], request_id, preempt=preempt)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 25.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.world.tick(self.now)

    @rule(place=places, really=rarely)
    def reset(self, place: int, really: bool) -> None:
        if really:
            self.world.reset(self.sessions[place])

    @rule(place=places, really=rarely)
    def engine_restarts(self, place: int, really: bool) -> None:
        if not really:
            return
        self.world.goodbye(self.sessions[place])
        self.sessions[place] = self.next_id() + 100
        self.world.hello(self.sessions[place])

    # refusals

    @rule(place=places, path=paths, data=st.data())
    def refused_message(self, place: int, path: Path, data: Any) -> None:
        before = _fingerprint(self.scheduler)
        act = data.draw(st.sampled_from(sorted(REFUSED)))
        with pytest.raises(ControlError):
            REFUSED[act](self.scheduler, self.sessions[place], path, self.now)
        assert _fingerprint(self.scheduler) == before

    # always

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        world = self.world
        while world.pending:
            world.settle(len(world.pending) // 2, good=len(world.pending) % 3 != 0)
        for session_id in self.sessions:
            world.end_request(session_id, "a", preempt=False)
        world.tick(self.now + LIMITS.max_lease_s)
        world.check()
        world.check_idle()
        self.fill_the_tier()
        world.reset(self.sessions[0])
        world.check()
        assert world.pool.free_slots == world.pool.capacity

    def fill_the_tier(self) -> None:
        """Whatever happened before, every block can still leave: a fresh prompt takes the whole tier."""
        capacity = self.world.pool.capacity
        fresh = offer((2,) * capacity, self.block_ids(capacity))
        self.world.step(self.sessions[0], Step(self.next_id(), [fresh]), self.now)
        self.world.settle(0, good=True)
        self.world.check()
        assert self.world.fold.hashes(MEDIUM, 0) == {item.key64 for item in chain((2,) * capacity)}


def _bad_step(**fields: Any) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        good = offer(path, list(range(len(path))))
        scheduler.step(session_id, Step(1, [good, msgspec.structs.replace(good, **fields)], ["a"]), now)

    return act


def _bad_lookup(**fields: Any) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        good = Lookup(1, "a", b"".join(item.block_hash for item in chain(path)))
        scheduler.lookup(session_id, msgspec.structs.replace(good, **fields), now)

    return act


def _bad_load(block_ids: bytes) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        for lease_id in [*scheduler.loads.requests._leases, 10**9]:
            scheduler.load(session_id, Load(1, "a", lease_id, block_ids), now)

    return act


REFUSED = {
    "step: group": _bad_step(group=3),
    "step: negative group": _bad_step(group=-1),
    "step: block id too high": _bad_step(block_ids=pack_int32([ENGINE_BLOCKS])),
    "step: negative block id": _bad_step(block_ids=pack_int32([-1])),
    "step: not int32": _bad_step(block_ids=b"\0\0\0"),
    "lookup: hashes": _bad_lookup(block_hashes=b"\1" * 33),
    "lookup: nan": _bad_lookup(lease_s=float("nan")),
    "lookup: negative": _bad_lookup(lease_s=-0.001),
    "load: block id too high": _bad_load(pack_int32([ENGINE_BLOCKS])),
    "load: not int32": _bad_load(b"\0\0"),
}


def _fingerprint(scheduler: OffloadScheduler) -> tuple[Any, ...]:
    pool = scheduler.pool
    columns = [bytes(column) for column in (pool._state, pool._parent, pool._children, pool._pins, pool._group)]
    return (
        columns,
        list(pool._free),
        list(pool._hash),
        [list(index) for index in pool.index],
        bytes(pool._queue._stamps),
        scheduler.stats(),
        dict(scheduler.loads.requests._leases),
        scheduler.stores.pending_blocks,
    )


Offloading.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
TestOffloading = Offloading.TestCase
