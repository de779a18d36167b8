"""The offload scheduler under every order of events that hypothesis can think of (I1-I4, I6-I9, I12).

Models of one to three groups: full attention beside windows, chunks and states, blocks of one, two or three units.
Engines of one to four ranks, each of which copies in its own time, fails by itself, dies and comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.models import FINE, MODELS, PREFIX, UNIT, Groups, needed, step_tokens
from core.prompts import (
    FULL,
    PATHS,
    Path,
    block_at,
    blocks_of,
    hashes,
    key64,
    named_offers,
    offer,
    units_of,
    with_inner,
)
from core.world import BEHIND, ENGINE_BLOCKS, FILLS, MEDIUM, Grant, World
from kvevents_service.core.cascade import Cascade
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.errors import ControlError
from kvevents_service.wire.control import GroupSpec, Load, Lookup, Offer, Release, Step
from kvevents_service.wire.name_board import NameBoard
from kvevents_service.wire.packing import pack_int32

LIMITS = Limits(max_pending_blocks=24, max_leases=3, max_lease_s=20.0)
MAX_DEPTH = 12

branches = st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), max_size=MAX_DEPTH - 1)
paths = st.builds(lambda root, rest: (root, *rest), st.sampled_from([0, 0, 0, 1, 2, 3]), branches)
whole_paths = st.builds(
    lambda root, rest: (root, *rest), st.sampled_from([0, 0, 1, 2]), st.sampled_from([[0] * 5, [0] * 11])
)
requests = st.sampled_from(["a", "b"])
places = st.integers(0, 1)
few_requests = st.lists(requests, max_size=1)
starts = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 6])
depths = st.integers(0, MAX_DEPTH)
shares = st.sampled_from([99, 99, 1, 2, 3])
holes_s = st.integers(0, 2**MAX_DEPTH - 1)


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive numbers."""
    pairs = enumerate(sorted(numbers))
    return [[number for _, number in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]


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
ranks = st.sampled_from([0, 1, 1, 2, 3])
slices = st.sampled_from([1024, 1024, 1, 3])
leases_s = st.sampled_from([0, 5.0, 1e9, float("inf")])
rarely = st.booleans()
mutations = st.sampled_from([None] * 12 + FAULTS)


class Offloading(RuleBasedStateMachine):
    """Two engines, a tier far too small for them, copies that end in any order."""

    model: Groups
    world: World
    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.cells = memoryview(bytearray(1 << 16))
        self.board = NameBoard(self.cells)

    @initialize(capacity=st.integers(4, 20), ranks=st.integers(1, 4), slices=slices, parts=slices)
    def start(self, capacity: int, ranks: int, slices: int, parts: int) -> None:
        limits = LIMITS._replace(slice_blocks=slices, step_blocks=parts)
        self.begin(OffloadScheduler(self.tier(MEDIUM, capacity), limits), ranks)

    def tier(self, medium: str, capacity: int) -> TierSpec:
        return TierSpec(medium, capacity, 32, self.model, UNIT, board=self.board)

    def begin(self, scheduler: OffloadScheduler, ranks: int) -> None:
        self.world = World(scheduler, ranks)
        self.scheduler = self.world.scheduler
        self.groups = self.world.groups
        self.step_units = step_tokens(self.model) // UNIT
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
        offers = [found for _ in range(data.draw(st.integers(1, 3))) for found in self.some_offer(data)]
        self.say(place, Step(self.next_id(), offers, finished, preempted))

    def say(self, place: int, step: Step) -> None:
        """An engine whose ranks are not all there is not held up: its blocks are declined at once."""
        session_id = self.heard(place)
        present, blocks = self.world.served(session_id), sum(len(offer.block_ids) // 4 for offer in step.offers)
        counts = self.world.step(session_id, step, self.now)
        assert present or counts == [0, 0, blocks]

    def heard(self, place: int) -> int:
        """The session, all that it said so far having been taken."""
        self.world.end_step(self.sessions[place], self.now)
        return self.sessions[place]

    @precondition(lambda self: self.world.under_way)
    @rule(data=st.data())
    def take_more_of_a_step(self, data: Any) -> None:
        self.world.next_part(data.draw(st.sampled_from(sorted(self.world.under_way))), self.now)

    def some_offer(self, data: Any) -> list[Offer]:
        """The end of a prompt's table in some group; it may be bad."""
        path = data.draw(paths)
        group = data.draw(st.sampled_from(self.model))
        blocks = blocks_of(path, group)
        if not blocks:
            return []
        first = data.draw(st.sampled_from([0, 0, blocks // 2, blocks - 1]))
        good = offer(path, self.block_ids(blocks - first), first, group)
        if data.draw(rarely) and group.kind in PREFIX:
            good = with_inner(good, path, group, first, range(1, len(path)))
        mutate = data.draw(mutations)
        if mutate is _foreign_parent and group.kind not in PREFIX:
            return [good]  # only the engine knows the parent of a block that stands for itself
        return [good if mutate is None else mutate(good)]

    @rule(place=places, path=paths, extra=paths)
    def branch_within_a_step(self, place: int, path: Path, extra: Path) -> None:
        """A prompt and another one that leaves it anywhere."""
        both = (path[: len(path) // 2 + 1] + extra)[:MAX_DEPTH]
        self.store(
            place, [found for group in self.groups for whole in (path, both) for found in self.table(whole, group)]
        )

    def store(self, place: int, offers: list[Offer]) -> None:
        self.say(place, Step(self.next_id(), offers))

    def table(self, path: Path, group: GroupSpec, numbers: Iterable[int] | None = None) -> list[Offer]:
        """These logical blocks of a prompt, all of them if not said: one offer a run without null blocks."""
        wanted = range(blocks_of(path, group)) if numbers is None else numbers
        runs = [[number] for number in wanted] if group.kind == "mamba" else _runs(wanted)
        return [offer(path, self.block_ids(len(run)), run[0], group) for run in runs]

    @rule(place=places, path=paths | whole_paths, first=depths, ends=st.sets(depths))
    def store_with_names(self, place: int, path: Path, first: int, ends: set[int]) -> None:
        ids = iter(self.next_id, None)
        self.store(place, [one for group in self.groups for one in named_offers(path, group, first, ends, ids)])

    @rule(place=places, path=paths, holes=holes_s)
    def store_with_holes(self, place: int, path: Path, holes: int) -> None:
        """Full attention has every block; elsewhere some are null by now."""
        offers = []
        for group in self.groups:
            present = [n for n in range(blocks_of(path, group)) if group.kind in PREFIX or not holes >> n & 1]
            offers += self.table(path, group, present)
        self.store(place, offers)

    @rule(place=places, path=paths | whole_paths)
    def store_like_an_engine(self, place: int, path: Path) -> None:
        """What a hit at the last boundary will need, and no more."""
        tokens = len(path) // self.step_units * self.step_units * UNIT
        self.store(place, [one for group in self.groups for one in self.table(path, group, needed(group, tokens))])

    # copies

    @precondition(lambda self: self.world.pending)
    @rule(position=st.integers(0, 63))
    def complete(self, position: int) -> None:
        self.world.settle(position, good=True)

    @precondition(lambda self: self.world.pending)
    @rule(count=st.integers(1, 6), twice=rarely)
    def complete_the_oldest(self, count: int, twice: bool) -> None:
        for _ in range(min(count * len(self.world.ranks), len(self.world.pending))):
            self.world.settle(0, good=True, twice=twice)

    @precondition(lambda self: self.world.pending)
    @rule(position=st.integers(0, 63))
    def fail(self, position: int) -> None:
        self.world.settle(position, good=False)

    @precondition(lambda self: any(copy.transfer.kind not in FILLS for copy in self.world.pending))
    @rule(position=st.integers(0, 63), blocks=st.integers(0, 255))
    def lose(self, position: int, blocks: int) -> None:
        self.world.lose(position, blocks)

    # loads

    @rule(place=places, request_id=requests, path=paths | whole_paths, start=starts, lease_s=leases_s, fine=rarely)
    def lookup(self, place: int, request_id: str, path: Path, start: int, lease_s: float, fine: bool) -> None:
        self.look_up(place, request_id, path, min(start, len(path)), lease_s, fine=fine)

    @precondition(lambda self: len(self.world.fold))
    @rule(place=places, request_id=requests, data=st.data(), start=starts, share=shares)
    def lookup_and_load_residents(self, place: int, request_id: str, data: Any, start: int, share: int) -> None:
        tails = sorted({key for shelf in self.world.fold.shelves.values() for key in shelf})
        path = PATHS[data.draw(st.sampled_from(tails))]
        fine = data.draw(rarely)
        more = data.draw(st.integers(0, 2)) if fine else -len(path) % self.step_units
        self.serve(place, request_id, path + (0,) * more, start, share, fine=fine)

    @rule(place=places, request_id=requests, path=whole_paths, more=branches, start=starts, share=shares)
    def store_and_load(
        self, place: int, request_id: str, path: Path, more: list[int], start: int, share: int
    ) -> None:
        """A prompt and, when it is stored, one that goes on from it."""
        self.store_like_an_engine(place, path)
        while self.world.pending:
            self.world.settle(0, good=True)
        self.serve(place, request_id, (*path, *more), start, share)

    @rule(place=places, request_id=requests, path=paths, ends=st.sets(depths), more=branches)
    def store_and_load_finely(
        self, place: int, request_id: str, path: Path, ends: set[int], more: list[int]
    ) -> None:
        """A prompt with its tail and, when it is stored, one that goes on from it."""
        self.store_with_names(place, path, 0, ends)
        while self.world.pending:
            self.world.settle(0, good=True)
        self.serve(place, request_id, (*path, *more), 0, 99, fine=True)

    def serve(self, place: int, request_id: str, path: Path, start: int, share: int, *, fine: bool = False) -> None:
        """Look up behind a local prefix, and load the first `share` steps of the hit."""
        if start > 1:  # else it may be in the middle of a block
            start = start // self.step_units * self.step_units
        grant = self.look_up(place, request_id, path, start if start < len(path) else 0, 5.0, fine=fine)
        if grant is not None:
            units = min(grant.units, share * (1 if fine else self.step_units))
            self.load_units(grant.session_id, grant, units, said=True, off=0)

    def look_up(
        self, place: int, request_id: str, path: Path, start: int, lease_s: float, *, fine: bool = False
    ) -> Grant | None:
        self.heard(place)
        call = Lookup(self.next_id(), request_id, hashes(path, start), lease_s, start * UNIT, fine)
        nothing = len(self.world.live) >= LIMITS.max_leases or not self.world.served(self.sessions[place])
        hit = self.scheduler.lookup(self.sessions[place], call, self.now)
        assert hit.call_id == call.call_id
        assert hit.blocks == (0 if nothing else self.world.servable(path, start, fine=fine))
        assert (hit.lease_id is None) == (hit.blocks == 0)
        if hit.lease_id is None:
            return None
        deadline = self.now + min(lease_s, LIMITS.max_lease_s)
        grant = Grant(
            hit.lease_id,
            self.sessions[place],
            request_id,
            path,
            start,
            hit.blocks,
            deadline,
            self.world.resets,
            self.world.losses,
            fine,
        )
        self.world.lookup_granted(grant)
        return grant

    @precondition(lambda self: self.world.grants)
    @rule(
        data=st.data(),
        other_session=st.sampled_from([False] * 7 + [True]),
        said=st.booleans(),
        off=st.sampled_from([0] * 6 + [-2, -1, 1]),
    )
    def load(self, data: Any, other_session: bool, said: bool, off: int) -> None:
        """All, fewer, too many or no units, and blocks that do not fit them; of a lease that may have ended."""
        grant = data.draw(st.sampled_from(self.world.grants[-6:]))
        session_id = grant.session_id
        if other_session or session_id not in self.sessions:
            session_id = next(s for s in self.sessions if s != session_id)
        most = grant.units + self.step_units
        units = data.draw(st.sampled_from([grant.units] * 3 + list(range(0, most + 1, self.step_units)) + [1, -1]))
        self.load_units(session_id, grant, units, said=said, off=off)

    def load_units(self, session_id: int, grant: Grant, units: int, *, said: bool, off: int) -> None:
        """A copy starts if, and only if, the lease is alive and every block it takes is there and has its place."""
        self.heard(self.sessions.index(session_id))
        blocks = max(0, self.blocks_for(grant, units) + off)
        if not said:
            units = self.implied_units(grant, blocks)
        alive = grant.lease_id in self.world.live and session_id == grant.session_id
        valid = grant.resets == self.world.resets and self.fits(grant, units, blocks)
        present, under_way = self.world.served(session_id), len(self.scheduler.loads)
        ids = pack_int32(self.block_ids(blocks))
        load = Load(self.next_id(), grant.request_id, grant.lease_id, ids, units if said else None)
        self.world.load(session_id, load, units, self.now)
        started = len(self.scheduler.loads) - under_way
        assert started <= (alive and valid and present)
        assert started == (alive and valid and present) or grant.losses != self.world.losses

    def blocks_for(self, grant: Grant, units: int) -> int:
        """How many blocks the first units of a hit need in all groups."""
        end, start = (grant.start + units) * UNIT, grant.start * UNIT
        return sum(len(needed(group, end, start)) for group in self.groups) if units > 0 else 0

    def implied_units(self, grant: Grant, blocks: int) -> int:
        """Where every group takes every block, their number says the units; 0 where it does not."""
        if any(group.kind not in PREFIX for group in self.groups):
            return 0
        lengths = range(self.step_units, grant.units + 1, self.step_units)
        return next((units for units in lengths if self.blocks_for(grant, units) == blocks), 0)

    def fits(self, grant: Grant, units: int, blocks: int) -> bool:
        if not 0 < units <= grant.units or (units % self.step_units and not grant.fine):
            return False
        end = grant.start + units
        whole = all(group.kind in FINE or end % units_of(group) == 0 for group in self.groups)
        wanted = self.world.needs(end, grant.start)
        return blocks == len(wanted) and whole and self.world.resident(grant.path, end, grant.start)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def load_what_was_looked_up_before_a_reset(self, data: Any) -> None:
        """The same blocks are there again, and it is still not the hit that was promised."""
        grant = self.world.live[data.draw(st.sampled_from(sorted(self.world.live)))]
        self.heard(self.sessions.index(grant.session_id))
        self.world.reset(grant.session_id)
        self.finish()
        self.store_like_an_engine(self.sessions.index(grant.session_id), grant.path)
        while self.world.pending:
            self.world.settle(0, good=True)
        self.load_units(grant.session_id, grant, grant.units, said=True, off=0)

    @precondition(lambda self: self.world.grants)
    @rule(place=places, data=st.data())
    def release(self, place: int, data: Any) -> None:
        grant = data.draw(st.sampled_from(self.world.grants))
        self.heard(place)
        self.world.take(self.sessions[place], grant.lease_id)
        self.scheduler.release(self.sessions[place], Release(grant.lease_id))

    # ends

    @rule(place=places, request_id=requests, preempt=st.booleans())
    def end_request(self, place: int, request_id: str, preempt: bool) -> None:
        self.world.end_request(self.heard(place), request_id, preempt=preempt)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 25.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.world.tick(self.now)

    @rule(place=places, really=rarely)
    def reset(self, place: int, really: bool) -> None:
        if really:
            self.world.reset(self.heard(place))

    @precondition(lambda self: self.scheduler.unfinished)
    @rule(calls=st.integers(1, 4))
    def go_on(self, calls: int) -> None:
        for _ in range(calls):
            self.world.go_on(self.now)

    def finish(self) -> None:
        while self.scheduler.unfinished:
            self.world.go_on(self.now)

    @rule(place=places, really=rarely)
    def engine_restarts(self, place: int, really: bool) -> None:
        if not really:
            return
        self.world.goodbye(self.sessions[place])
        self.sessions[place] = self.next_id() + 100
        self.world.hello(self.sessions[place])

    @rule(place=places, rank=ranks, running=st.integers(0, 3), really=rarely)
    def rank_dies(self, place: int, rank: int, running: int, really: bool) -> None:
        if really and rank in self.world.ranks:
            self.world.rank_dies(self.sessions[place], rank, running)

    @rule(place=places)
    def ranks_return(self, place: int) -> None:
        for rank in self.world.ranks:
            self.world.rank_returns(self.sessions[place], rank)

    # refusals

    @rule(place=places, path=paths, data=st.data())
    def refused_message(self, place: int, path: Path, data: Any) -> None:
        if not self.world.served(self.sessions[place]):
            return  # nothing of it is looked at
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
            self.check_board()

    def check_board(self) -> None:
        """It has every name of every tier, and no more."""
        named = [names for tier in self.scheduler.tiers for names in tier.pool.index]
        assert all(self.board.may_have(name) for names in named for name in names)
        assert sum(self.cells) == sum(map(len, named))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        world = self.world
        for place in range(len(self.sessions)):
            self.heard(place)
        self.finish()
        while world.pending:
            world.settle(len(world.pending) // 2, good=len(world.pending) % 3 != 0)
        self.ranks_return(0)
        for session_id in self.sessions:
            world.end_request(session_id, "a", preempt=False)
        world.tick(self.now + LIMITS.max_lease_s)
        while world.pending:
            world.settle(0, good=True)
        world.check()
        world.check_idle()
        self.fill_the_tier()
        world.reset(self.sessions[0])
        self.finish()
        assert len(world.fold) == 0
        world.check()
        assert all(tier.pool.free_slots == tier.pool.capacity for tier in world.tiers)

    def fill_the_tier(self) -> None:
        """Whatever happened before, every block can still leave: a fresh prompt takes the whole tier."""
        group = next(group for group in self.groups if group.kind in PREFIX)
        capacity = self.world.pool.capacity
        path = (4,) * (capacity * units_of(group))
        self.store(0, self.table(path, group))
        while self.world.pending or self.world.under_way:
            while self.world.pending:
                self.world.settle(0, good=True)
            self.world.next_part(self.sessions[0], self.now)
        self.world.check()
        wanted = {key64(block_at(path, group, number).block_hash) for number in range(capacity)}
        assert self.world.fold.hashes(MEDIUM, group.index) == wanted
        assert sum(len(self.world.fold.hashes(MEDIUM, other.index)) for other in self.groups) == capacity


class Cascading(Offloading):
    """Two tiers, both far too small."""

    @initialize(
        front=st.integers(4, 22),
        back=st.sampled_from([3, 12, 40, 120]),
        part=st.sampled_from([1, 1, 2, 4]),
        ranks=st.integers(1, 3),
        slices=slices,
        parts=slices,
    )
    def start(self, front: int, back: int, part: int, ranks: int, slices: int, parts: int) -> None:
        limits = LIMITS._replace(headroom_divisor=part, slice_blocks=slices, step_blocks=parts)
        self.begin(Cascade(self.tier(MEDIUM, front), self.tier(BEHIND, back), limits), ranks)

    def drain(self) -> None:
        while self.world.pending:
            self.world.settle(0, good=True)

    @rule(place=places, path=paths | whole_paths, kept=st.integers(0, 3))
    def push_behind(self, place: int, path: Path, kept: int) -> None:
        """A prompt is stored, demoted, and has to leave for another one, all of it or nearly."""
        self.store_like_an_engine(place, path)
        for _ in range(4):
            self.drain()
            self.world.tick(self.now)
        self.drain()
        group = next(group for group in self.groups if group.kind in PREFIX)
        other = (5,) * (max(1, self.world.pool.capacity - kept) * units_of(group))
        self.store(place, self.table(other, group))
        self.drain()

    @rule(place=places, request_id=requests, path=paths | whole_paths, more=branches, start=starts, share=shares)
    def push_behind_and_load(
        self, place: int, request_id: str, path: Path, more: list[int], start: int, share: int
    ) -> None:
        self.push_behind(place, path, 1)
        self.serve(place, request_id, (*path, *more), start, share)

    @rule(place=places, request_id=requests, path=paths, ends=st.sets(depths), more=branches)
    def push_behind_and_load_finely(
        self, place: int, request_id: str, path: Path, ends: set[int], more: list[int]
    ) -> None:
        self.store_with_names(place, path, 0, ends)
        self.push_behind(place, path, 1)
        self.serve(place, request_id, (*path, *more), 0, 99, fine=True)


def _bad_step(**fields: Any) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        good = offer(path, list(range(len(path))), group=FULL)
        scheduler.step(session_id, Step(1, [good, msgspec.structs.replace(good, **fields)], ["a"]), now)

    return act


def _bad_lookup(**fields: Any) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        good = Lookup(1, "a", hashes(path))
        scheduler.lookup(session_id, msgspec.structs.replace(good, **fields), now)

    return act


def _bad_load(block_ids: bytes) -> Any:
    def act(scheduler: OffloadScheduler, session_id: int, path: Path, now: float) -> None:
        for lease_id in [*scheduler.loads.requests._leases, 10**9]:
            scheduler.load(session_id, Load(1, "a", lease_id, block_ids), now)

    return act


REFUSED = {
    "step: group": _bad_step(group=9),
    "step: negative group": _bad_step(group=-1),
    "step: block id too high": _bad_step(block_ids=pack_int32([ENGINE_BLOCKS])),
    "step: negative block id": _bad_step(block_ids=pack_int32([-1])),
    "step: not int32": _bad_step(block_ids=b"\0\0\0"),
    "lookup: hashes": _bad_lookup(block_hashes=b"\1" * 33),
    "lookup: nan": _bad_lookup(lease_s=float("nan")),
    "lookup: negative": _bad_lookup(lease_s=-0.001),
    "lookup: start within a unit": _bad_lookup(start_tokens=UNIT + 1),
    "lookup: negative start": _bad_lookup(start_tokens=-UNIT),
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
        [list(names) for names in (*pool.index, *pool.inner)],
        bytes(pool._queue._stamps),
        scheduler.stats(),
        dict(scheduler.loads.requests._leases),
        scheduler.landings.pending_blocks,
    )


PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
"""Not `explain`: it traces every line, outlasts the timeout of a test, and so hides the failure."""

SETTINGS = settings(max_examples=40, stateful_step_count=50, deadline=None, phases=PHASES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["full", "full of two units", "full and coarse", "window and state", "chunks"])
def test_cascading(model: str) -> None:
    machine = type("Cascading", (Cascading,), {"model": MODELS[model]})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.timeout(400)  # shrinking a failure takes up to five minutes
@pytest.mark.parametrize("model", sorted(MODELS))
def test_offloading(model: str) -> None:
    machine = type("Offloading", (Offloading,), {"model": MODELS[model]})
    run_state_machine_as_test(machine, settings=SETTINGS)
