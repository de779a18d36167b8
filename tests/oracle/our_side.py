"""Our side: plays a script on the OffloadScheduler, as the adapter of vLLM's engine would.

The engine is vLLM's: its hashes, extra keys, block tables and confirmed tokens come with vLLM's answers. What the
core decides is ours, and every announcement is encoded and decoded before it counts.
"""

from __future__ import annotations

from typing import Any

from kvevents_service.core.announce import to_event
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.slots import PENDING
from kvevents_service.core.tier import TierSpec
from kvevents_service.engine.offers import make_offer
from kvevents_service.testing import HeldCopies
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.control import (
    GroupSpec,
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
from oracle.plain import hex64, plain_event
from oracle.script import Answer, Op, Script

SESSION = 1
HASH_BYTES = 32


class Breakage:
    """How to break our side on purpose; the default changes nothing."""

    def offer(self, offer: Offer) -> Offer:
        return offer

    def event(self, event: Event) -> Event | None:
        return event


class Mirror:
    """What the adapter knows of a request."""

    def __init__(self, op: Op) -> None:
        self.lora = op["lora"] or {"id": None, "name": None}
        self.hashes: list[bytes] = []
        self.tokens: list[int] = []
        self.extra_keys: list[Any] = []
        self.offered = 0
        self.tracked = False
        self.lease_id: int | None = None
        self.hit = 0
        self.load_id: int | None = None
        self.loading = 0

    def grow(self, news: Answer) -> None:
        self.hashes += [bytes.fromhex(name) for name in news["hashes"]]
        self.tokens += news["tokens"]
        self.extra_keys += [keys and tuple(map(as_key, keys)) for keys in news["extra_keys"]]


def as_key(value: Any) -> Any:
    """An extra key back from JSON."""
    return tuple(value) if isinstance(value, list) else value


class Adapter:
    """Every method named after an operation plays it with vLLM's facts and returns what is to be compared."""

    def __init__(self, script: Script, breakage: Breakage) -> None:
        self.block_size = script["block_size"]
        group = GroupSpec(0, "full_attention", self.block_size)
        self.scheduler = OffloadScheduler(
            TierSpec("CPU", script["cpu_blocks"], HASH_BYTES, (group,), group.block_size)
        )
        self.scheduler.hello(SESSION, script["gpu_blocks"])
        self.copies = HeldCopies(self.scheduler)
        self.breakage = breakage
        self.mirrors: dict[str, Mirror] = {}
        self.flush: list[tuple[str, Mirror, list[int]]] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.offerers: dict[int, list[Mirror]] = {}
        self.steps = self.last_id = 0

    def play(self, op: Op, facts: Answer | None) -> Answer:
        """`facts` is None where the operation made no sense to vLLM; a store may still be ours alone."""
        sensible = facts is not None or op["op"] == "stored"
        result = getattr(self, op["op"])(op, facts or {}) or {} if sensible else {}
        free = self.scheduler.pool.free_slots
        return {**result, "events": self._events(), "pending": self._pending(), "free": free}

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    # operations

    def add(self, op: Op, facts: Answer) -> None:
        self.mirrors[op["request"]] = Mirror(op)
        self.mirrors[op["request"]].grow(facts["grown"])

    def lookup(self, op: Op, facts: Answer) -> Answer:
        mirror = self.mirrors[op["request"]]
        self._release(mirror)
        first, stop = facts["local"] // self.block_size, (facts["tokens"] - 1) // self.block_size
        packed = b"".join(mirror.hashes[first:stop])
        hit = self.scheduler.lookup(SESSION, Lookup(self.next_id(), op["request"], packed), 0.0)
        mirror.lease_id, mirror.hit = hit.lease_id, hit.blocks
        return {"looked_up": [hex64(name) for name in mirror.hashes[first:stop]], "hit": hit.blocks}

    def _release(self, mirror: Mirror) -> None:
        if mirror.lease_id is not None:
            self.scheduler.release(SESSION, Release(mirror.lease_id))
        mirror.lease_id = None

    def admit(self, op: Op, facts: Answer) -> Answer:
        result, mirror = self.lookup(op, facts), self.mirrors[op["request"]]
        if facts["accepted"] is None:
            return result
        mirror.tracked, mirror.offered = True, 0
        blocks = min(mirror.hit, facts["accepted"] // self.block_size)
        first = facts["local"] // self.block_size
        if blocks and mirror.lease_id is not None:
            self._load(op["request"], mirror, facts["blocks"][first : first + blocks])
        self._release(mirror)
        return result

    def _load(self, name: str, mirror: Mirror, blocks: list[int]) -> None:
        assert mirror.lease_id is not None
        mirror.load_id, mirror.loading = self.next_id(), len(blocks)
        load = Load(mirror.load_id, name, mirror.lease_id, pack_int32(blocks))
        mirror.lease_id = None
        self._hear(self.copies.perform(self.scheduler.load(SESSION, load, 0.0)))

    def step(self, op: Op, facts: Answer) -> Answer:
        for item in facts["scheduled"]:
            self.mirrors[item["request"]].tracked |= item["new"]
        running = [(item["request"], self.mirrors[item["request"]], item["blocks"]) for item in facts["scheduled"]]
        claims = [*self.flush, *running]
        offers = [offer for claim in claims if (offer := self._offer(*claim)) is not None]
        message = Step(self.steps, offers, self.finished, self.preempted)
        self.offerers[self.steps] = [mirror for _, mirror, _ in claims]
        self.flush, self.finished, self.preempted = [], [], []
        self.steps += 1
        before = dict(self.scheduler.stats())
        self._hear(self.copies.perform(self.scheduler.step(SESSION, message, 0.0)))
        for name, news in facts["grown"].items():
            self.mirrors[name].grow(news)
        return {"offered": self._offered(offers), "declined": self._declined(offers, before)}

    def _offer(self, name: str, mirror: Mirror, blocks: list[int]) -> Offer | None:
        start, stop, size = mirror.offered, len(blocks), self.block_size
        if not mirror.tracked or stop <= start:
            return None
        mirror.offered = stop
        offer = make_offer(
            name,
            mirror.hashes[start:stop],
            mirror.tokens[start * size : stop * size],
            blocks[start:stop],
            parent=mirror.hashes[start - 1] if start else None,
            lora_id=mirror.lora["id"],
            lora_name=mirror.lora["name"],
            extra_keys=mirror.extra_keys[start:stop] if any(mirror.extra_keys[start:stop]) else None,
        )
        return self.breakage.offer(offer)

    def _offered(self, offers: list[Offer]) -> dict[str, list[str]]:
        return {offer.request_id: [hex64(name) for name in names_of(offer)] for offer in offers}

    def _declined(self, offers: list[Offer], before: dict[str, int]) -> dict[str, list[str]]:
        """Offered blocks that the pool does not know now, and the reasons counted in this step."""
        stats, index = self.scheduler.stats(), self.scheduler.pool.index[0]
        reasons = [key for key in stats if key.startswith("declined_") and stats[key] > before[key]]
        return {hex64(name): reasons for offer in offers for name in names_of(offer) if name not in index}

    def stored(self, op: Op, facts: Answer) -> None:
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
                    mirror.offered = 0
        return replies

    def preempt(self, op: Op, facts: Answer) -> None:
        self.mirrors[op["request"]].tracked = False
        self.preempted.append(op["request"])

    def finish(self, op: Op, facts: Answer) -> None:
        mirror = self.mirrors[op["request"]]
        self.flush.append((op["request"], mirror, facts["blocks"]))
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

    def _pending(self) -> dict[str, str]:
        """Blocks that are being stored; "held" where the copy has ended and the parent's has not."""
        pool = self.scheduler.pool
        names = {slot: name for name, slot in pool.index[0].items() if pool.state_of(slot) == PENDING}
        copying = {slot for transfer in self.copies.pending for slot in stores(transfer)}
        return {hex64(name): "copying" if slot in copying else "held" for slot, name in names.items()}


def stores(transfer: TransferMeta) -> list[int]:
    return list(transfer.slots) if transfer.kind == "store" else []


def names_of(offer: Offer) -> list[bytes]:
    packed = offer.block_hashes
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


def play(script: Script, answers: list[Answer], breakage: Breakage | None = None) -> list[Answer]:
    """Our results, one an operation that vLLM answered."""
    adapter = Adapter(script, breakage or Breakage())
    played = zip(script["ops"], answers, strict=False)
    results = [adapter.play(op, answer["facts"]) for op, answer in played if "facts" in answer]
    adapter.scheduler.pool.check()
    return results
