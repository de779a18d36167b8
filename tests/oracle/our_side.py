"""Our side: plays a script on the OffloadScheduler, as the adapter of vLLM's engine would.

The engine is vLLM's: its hashes, extra keys, block tables and confirmed tokens come with vLLM's answers. What the
core decides is ours, and every announcement is encoded and decoded before it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvevents_service.core.announce import to_event
from kvevents_service.core.groups import check_groups
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.offers import runs
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.slots import PENDING
from kvevents_service.core.tier import TierSpec
from kvevents_service.engine.offers import make_offer
from kvevents_service.testing import HeldCopies
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.control import (
    GroupSpec,
    InnerHash,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Reset,
    SidecarMessage,
    Step,
    StepDone,
)
from kvevents_service.wire.events import Event, EventBatch
from kvevents_service.wire.packing import pack_int32
from oracle.known import Known
from oracle.models import PREFIX, SCRATCH, Group, model_of, units_inside
from oracle.plain import hex64, plain_event
from oracle.script import Answer, Op, Script

SESSION = 1
HASH_BYTES = 32

Place = tuple[int, str]
"""Group, and the low 64 bits of a hash in hex."""


class Breakage:
    """How to break our side on purpose; the default changes nothing."""

    def offer(self, offer: Offer) -> Offer:
        return offer

    def event(self, event: Event) -> Event | None:
        return event

    def ranks(self, ranks: int) -> int:
        """How many ranks must report a store."""
        return ranks


class Mirror:
    """What the adapter knows of a request. `offered` counts logical blocks of every group."""

    def __init__(self, name: str, known: Known) -> None:
        self.name = name
        self.known = known
        self.offered: dict[int, int] = {}
        self.tracked = False
        self.lease_id: int | None = None
        self.hit = 0
        self.load_id: int | None = None
        self.loading = 0

    def start_over(self) -> None:
        """Offer every block again: some were declined, or the table is new."""
        self.offered = {}


def as_key(value: Any) -> Any:
    """An extra key back from JSON."""
    return tuple(value) if isinstance(value, list) else value


def spec_of(group: Group) -> GroupSpec:
    """A scratch group is declared and never stored; its kind is of no account."""
    if group.kind == SCRATCH:
        return GroupSpec(group.index, "full_attention", group.block_size, cacheable=False)
    return GroupSpec(group.index, group.kind, group.block_size, group.window)


class Run(NamedTuple):
    """Consecutive blocks of one group of a request: what becomes one offer."""

    mirror: Mirror
    group: Group
    first: int
    block_ids: list[int]
    inner: Sequence[tuple[int, int]] = ()
    """Block of the run, and after how many of its units a prefix may end."""
    tail: int = 0
    """Units of a last block that is not full."""


class Adapter:
    """Every method named after an operation plays it with vLLM's facts and returns what is to be compared."""

    def __init__(self, script: Script, breakage: Breakage) -> None:
        self.model = model_of(script["model"])
        groups = tuple(map(spec_of, self.model.groups))
        unit = self.model.hash_size
        spec = TierSpec("CPU", script["cpu_blocks"], HASH_BYTES, check_groups(groups, unit), unit)
        self.scheduler = OffloadScheduler(spec)
        self.scheduler.hello(SESSION, script["gpu_blocks"])
        self.copies = HeldCopies(self.scheduler)
        self.breakage = breakage
        self.lazy, self.ranks = script["lazy"], breakage.ranks(script["ranks"])
        self.reports: Counter[int] = Counter()
        self.mirrors: dict[str, Mirror] = {}
        self.every_mirror: list[Mirror] = []
        self.flush: list[Run] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.offerers: dict[int, list[Mirror]] = {}
        self.steps = self.last_id = 0

    def play(self, op: Op, facts: Answer | None) -> Answer:
        """`facts` is None where the operation made no sense to vLLM; a store may still be ours alone."""
        sensible = facts is not None or op["op"] in ("stored", "reported")
        result = getattr(self, op["op"])(op, facts or {}) or {} if sensible else {}
        free = self.scheduler.pool.free_slots
        return {**result, "events": self._events(), "pending": self._pending(), "free": free}

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    # operations

    def add(self, op: Op, facts: Answer) -> None:
        mirror = self.mirrors[op["request"]] = Mirror(op["request"], Known(self.model, op["lora"]))
        mirror.known.grow(facts["grown"])
        self.every_mirror.append(mirror)

    def lookup(self, op: Op, facts: Answer) -> Answer:
        mirror, unit = self.mirrors[op["request"]], self.model.hash_size
        self._release(mirror)
        names = mirror.known.hashes[facts["local"] // unit : (facts["tokens"] - 1) // unit]
        packed = bytes.fromhex("".join(names))
        fine, local = self.model.fine_grained and not self.lazy, facts["local"]
        message = Lookup(self.next_id(), op["request"], packed, start_tokens=local, fine=fine)
        hit = self.scheduler.lookup(SESSION, message, 0.0)
        mirror.lease_id, mirror.hit = hit.lease_id, hit.blocks * unit
        return {"request": op["request"], "hit": mirror.hit}

    def _release(self, mirror: Mirror) -> None:
        if mirror.lease_id is not None:
            self.scheduler.release(SESSION, Release(mirror.lease_id))
        mirror.lease_id = None

    def admit(self, op: Op, facts: Answer) -> Answer:
        result, mirror = self.lookup(op, facts), self.mirrors[op["request"]]
        if facts["accepted"] is None:
            return result
        mirror.tracked = True
        mirror.start_over()
        if min(mirror.hit, facts["accepted"]) and mirror.lease_id is not None:
            self._load(op["request"], mirror, facts)
        self._release(mirror)
        return result

    def _load(self, name: str, mirror: Mirror, facts: Answer) -> None:
        """Into the blocks that the accepted prefix needs, group after group."""
        assert mirror.lease_id is not None
        local, tokens = facts["local"], min(mirror.hit, facts["accepted"])
        blocks = [
            facts["tables"][group.index][number]
            for group in self.model.stored
            for number in group.needed(local + tokens, local)
        ]
        units = tokens // self.model.hash_size
        mirror.load_id, mirror.loading = self.next_id(), units
        load = Load(mirror.load_id, name, mirror.lease_id, pack_int32(blocks), units)
        mirror.lease_id = None
        self._hear(self.copies.perform(self.scheduler.load(SESSION, load, 0.0)))

    def step(self, op: Op, facts: Answer) -> Answer:
        for item in facts["scheduled"]:
            self.mirrors[item["request"]].tracked |= item["new"]
        runs = list(self._lazy_runs(facts)) if self.lazy else [*self.flush, *self._eager_runs(facts)]
        offers = [self._offer(run) for run in runs]
        message = Step(self.steps, offers, self.finished, self.preempted)
        self.offerers[self.steps] = [run.mirror for run in runs]
        self.flush, self.finished, self.preempted = [], [], []
        self.steps += 1
        before = dict(self.scheduler.stats())
        self._hear(self.copies.perform(self.scheduler.step(SESSION, message, 0.0)))
        for name, news in facts["grown"].items():
            self.mirrors[name].known.grow(news)
        declined = self._declined(offers, before)
        return {"offered": self._offered(offers), "declined": declined, "named": self._named(offers)}

    # what is offered

    def _eager_runs(self, facts: Answer) -> Iterator[Run]:
        for item in facts["scheduled"]:
            yield from self._confirmed_runs(self.mirrors[item["request"]], item)
        for entry in facts["boundaries"]:
            mirror = self.mirrors.get(entry["request"])
            gone = entry["request"] in (*self.finished, *self.preempted)
            if mirror is not None and mirror.tracked and not gone and entry["hash"] is not None:
                yield self._ending_at(mirror, entry)

    def _ending_at(self, mirror: Mirror, entry: Answer) -> Run:
        """One block that is full, or filled, up to `tokens`."""
        group, tokens = self.model.groups[entry["group"]], entry["tokens"]
        tail = tokens % group.block_size // self.model.hash_size
        number = tokens // group.block_size - (not tail)
        return Run(mirror, group, number, [entry["block"]], [(0, tail)] if tail else (), tail)

    def _confirmed_runs(self, mirror: Mirror, facts: Answer) -> Iterator[Run]:
        """What is new of a request, as dense runs. A block that left its window may have been found by hash."""
        for group in self.model.stored if mirror.tracked else ():
            index = str(group.index)
            first = mirror.offered.get(group.index, 0)
            places = [place for place in facts["blocks"][index] if place[0] >= first]
            mirror.offered[group.index] = max(first, facts["ready"][index])
            for start, stop in runs([place[0] for place in places]):
                own = [place for place in places if start <= place[0] < stop]
                inner = [(place[0] - start, units) for place in own for units in place[3]]
                yield Run(mirror, group, start, [place[1] for place in own], inner)

    def _lazy_runs(self, facts: Answer) -> Iterator[Run]:
        """What vLLM chose near eviction, in a prefix kind with the blocks before it that the engine has."""
        near = facts["near_eviction"] or {"chosen": [], "cached": [], "inner": {}}
        cached = {(index, name): block for index, name, block in near["cached"]}
        for index, name, block in near["chosen"]:
            found = self._find(self.model.groups[index], name)
            if found is None:
                continue
            mirror, number = found
            first = number
            while self._goes_before(mirror, index, first, cached):
                first -= 1
            before = [
                cached[index, hex_name(mirror.known.name(self.model.groups[index], at))]
                for at in range(first, number)
            ]
            inner = self._units_of(mirror, self.model.groups[index], number, near["inner"][str(block)])
            names = [(number - first, units) for units in inner]
            yield Run(mirror, self.model.groups[index], first, [*before, block], names)

    def _find(self, group: Group, name: str) -> tuple[Mirror, int] | None:
        """A request that has the block, and the block's number in it: the engine knows what it has in its cache."""
        for mirror in self.every_mirror:
            for number in range(mirror.known.blocks(group.block_size)):
                if hex_name(mirror.known.name(group, number)) == name:
                    return mirror, number
        return None

    def _units_of(self, mirror: Mirror, group: Group, number: int, names: list[str]) -> list[int]:
        """Where inside a block the prefixes with these names end."""
        start, unit = number * group.block_size, self.model.hash_size
        ends = range(1, units_inside(group, unit))
        return [units for units in ends if hex_name(mirror.known.hash_at(start + units * unit) or "") in names]

    def _goes_before(self, mirror: Mirror, index: int, first: int, cached: dict[tuple[int, str], int]) -> bool:
        """The block before `first` must go along: our tier has not got it, and the engine still has."""
        group = self.model.groups[index]
        if not first or group.kind not in PREFIX:
            return False
        name = mirror.known.name(group, first - 1)
        known = self.scheduler.pool.slot_of(index, bytes.fromhex(name)) is not None
        return not known and (index, hex_name(name)) in cached

    def _offer(self, run: Run) -> Offer:
        known, group, size = run.mirror.known, run.group, run.group.block_size
        numbers = range(run.first, run.first + len(run.block_ids) - bool(run.tail))
        stop = numbers.stop * size + run.tail * self.model.hash_size
        extra_keys = [as_extra_keys(known.extra_keys(size, number)) for number in numbers]
        offer = make_offer(
            run.mirror.name,
            [bytes.fromhex(known.name(group, number)) for number in numbers],
            known.tokens[run.first * size : stop],
            run.block_ids,
            group=group.index,
            parent=as_bytes(known.hash_at(run.first * size)),
            lora_id=known.lora_id,
            lora_name=known.lora_name,
            extra_keys=extra_keys if any(extra_keys) else None,
        )
        inner = [self._inner_hash(run, block, units) for block, units in run.inner]
        return self.breakage.offer(msgspec.structs.replace(offer, inner=inner or None))

    def _inner_hash(self, run: Run, block: int, units: int) -> InnerHash:
        known, unit = run.mirror.known, self.model.hash_size
        end = (run.first + block) * run.group.block_size + units * unit
        name = as_bytes(known.hash_at(end))
        assert name is not None
        keys = as_extra_keys(known.extra_keys(unit, end // unit - 1))
        return InnerHash(block, units, name, as_bytes(known.hash_at(end - unit)), keys)

    def _offered(self, offers: list[Offer]) -> dict[str, list[Place]]:
        names: dict[str, list[Place]] = {}
        for offer in offers:
            names.setdefault(offer.request_id, []).extend(places_of(offer))
        return names

    def _declined(self, offers: list[Offer], before: dict[str, int]) -> list[tuple[Place, list[str]]]:
        """Offered blocks that the pool does not know now, and the reasons counted in this step."""
        stats, pool = self.scheduler.stats(), self.scheduler.pool
        reasons = [key for key in stats if key.startswith("declined_") and stats[key] > before[key]]
        here = [{hex64(name) for name in (*pool.index[at], *pool.inner[at])} for at in range(len(pool.index))]
        return [
            (place, reasons) for offer in offers for place in places_of(offer) if place[1] not in here[place[0]]
        ]

    def _named(self, offers: list[Offer]) -> list[Place]:
        """Inner names of these offers that the tier has now."""
        pool = self.scheduler.pool
        names = [(offer.group, name.block_hash) for offer in offers for name in offer.inner or ()]
        return [(group, hex64(name)) for group, name in names if pool.inner_slot(group, name) is not None]

    # what ends

    def stored(self, op: Op, facts: Answer) -> None:
        self._complete("store", op["step"])

    def reported(self, op: Op, facts: Answer) -> None:
        self.reports[op["step"]] += op["step"] < self.steps
        if self.reports[op["step"]] >= self.ranks:
            self._complete("store", op["step"])

    def loaded(self, op: Op, facts: Answer) -> Answer:
        mirror = self.mirrors[op["request"]]
        if mirror.load_id is None:
            return {}
        replies = self._complete("load", mirror.load_id)
        mirror.load_id = None
        blocks = [reply.blocks for reply in replies if isinstance(reply, Loaded)]
        return {"loaded": blocks, "wanted": mirror.loading}

    def _complete(self, kind: str, owner_id: int) -> list[SidecarMessage]:
        owners = [(transfer.kind, transfer.owner_id) for transfer in self.copies.pending]
        if (kind, owner_id) not in owners:
            return []
        return self._hear(self.copies.complete(owners.index((kind, owner_id))))

    def _hear(self, replies: list[SidecarMessage]) -> list[SidecarMessage]:
        """Where a step's blocks were declined its requests offer all of theirs again."""
        for reply in replies:
            if isinstance(reply, StepDone) and reply.declined:
                for mirror in self.offerers[reply.step_id]:
                    mirror.start_over()
        return replies

    def preempt(self, op: Op, facts: Answer) -> None:
        self.mirrors[op["request"]].tracked = False
        self.preempted.append(op["request"])

    def finish(self, op: Op, facts: Answer) -> None:
        if not self.lazy:
            mirror = self.mirrors[op["request"]]
            self.flush += self._confirmed_runs(mirror, facts)
            if mirror.tracked and facts["tail"] is not None:
                self.flush.append(self._ending_at(mirror, facts["tail"]))
        self.finished.append(op["request"])

    abort = finish

    def forget(self, op: Op, facts: Answer) -> None:
        """The engine's own cache is not ours."""

    def reset(self, op: Op, facts: Answer) -> None:
        """What is computed already may be of older weights: running requests are stored when admitted again."""
        self.copies.perform(self.scheduler.reset(SESSION, Reset(self.next_id())))
        self.flush = []
        if op["running"]:
            self.preempted += [name for name, mirror in self.mirrors.items() if mirror.tracked]
        for mirror in self.mirrors.values():
            mirror.tracked = False

    # what came of it

    def _events(self) -> list[Answer]:
        events = [self.breakage.event(to_event(item)) for item in self.copies.published]
        self.copies.published.clear()
        payload = encode_batch(EventBatch(1.0, [event for event in events if event is not None], 0))
        decoded = decode_batch(payload)
        assert not decoded.skipped
        return [plain_event(event) for event in decoded.batch.events]

    def _pending(self) -> list[tuple[Place, str]]:
        """Blocks that are being stored; "held" where the copy has ended and the parent's has not."""
        pool = self.scheduler.pool
        copying = {slot for transfer in self.copies.pending for slot in stores(transfer)}
        return [
            ((group, hex64(name)), "copying" if slot in copying else "held")
            for group, index in (*enumerate(pool.index), *enumerate(pool.inner))
            for name, slot in index.items()
            if pool.state_of(slot) == PENDING
        ]


def stores(transfer: TransferMeta) -> list[int]:
    return list(transfer.slots) if transfer.kind == "store" else []


def as_extra_keys(keys: Any) -> tuple[Any, ...] | None:
    return keys and tuple(map(as_key, keys))


def as_bytes(full_hash: str | None) -> bytes | None:
    return None if full_hash is None else bytes.fromhex(full_hash)


def hex_name(full_hash: str) -> str:
    """The low 64 bits of a hash in hex."""
    return full_hash[-16:]


def names_of(offer: Offer) -> list[bytes]:
    packed = offer.block_hashes
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


def places_of(offer: Offer) -> list[Place]:
    inner = [name.block_hash for name in offer.inner or ()]
    return [(offer.group, hex64(name)) for name in (*names_of(offer), *inner)]


def play(script: Script, answers: list[Answer], breakage: Breakage | None = None) -> list[Answer]:
    """Our results, one an operation that vLLM answered."""
    adapter = Adapter(script, breakage or Breakage())
    played = zip(script["ops"], answers, strict=False)
    results = [adapter.play(op, answer["facts"]) for op, answer in played if "facts" in answer]
    adapter.scheduler.pool.check()
    return results
