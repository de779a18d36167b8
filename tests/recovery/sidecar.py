"""One process of the sidecar on sockets that are none: tiers, journal, publisher, outputs, renderer, cursors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from typing import NamedTuple

from core.models import UNIT
from core.prompts import Path, key64, named_offers

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.journal import Journal, JournalLimits
from kvevents_service.core.metadata import Cleared
from kvevents_service.core.replay import Recovery, ReplayLimits, Reply
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.snapshot import MessageLimits, PartLimits
from kvevents_service.core.telling import Teller, TellingLimits
from kvevents_service.core.tier import Limits, TierSpec
from kvevents_service.service.cursor import Cursor
from kvevents_service.service.outputs import Output
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.renderer import Renderer
from kvevents_service.testing import HeldCopies, ManualClock
from kvevents_service.wire.control import GroupSpec, Reset, Step
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.frames import REPLAY_END, SNAPSHOT_EMPTY, SNAPSHOT_UNAVAILABLE, Payload, snapshot_reply
from recovery.network import Network, PubSocket, Request, RouterSocket

MODELS = (
    (GroupSpec(0, "full_attention", 2 * UNIT, main=True), GroupSpec(1, "sliding_window", UNIT, 4)),
    (GroupSpec(0, "mamba", 2 * UNIT), GroupSpec(1, "full_attention", UNIT, main=True)),
)
MEDIA = ("CPU", "STORAGE")
DIALECT_OF = ("vllm", "vllm-router", "dynamo", "vllm")
VLLM, ROUTER, DYNAMO, SNAPSHOTS = range(4)
"""Outputs. The last has a snapshot endpoint, and its batches say the publisher's id."""
REACH, EXACT_REACH = 25, 40
TELLING = TellingLimits(0.1, 0.5, 2.0)
BYTES_OF_WEIGHT = 25
"""No part has more bytes for each unit of its weight."""
RESERVE = 5
LIFE_S = 1_000_000.0
"""Time stamps of batches say which life made them."""


class Name(NamedTuple):
    """Something that can be loaded: a block, or what ends inside one."""

    medium: str
    group: int
    key: int


State = frozenset[Name]


class Shape(NamedTuple):
    """What is small in this run, and how small."""

    model: int
    capacity: int
    pending: int
    retained: int
    retained_bytes: int
    part_weight: int
    reply_queue: int
    exact_bytes: int


class Reservation:
    """A `SequenceStore` without a file: it outlives the process."""

    def __init__(self, first_seq: int) -> None:
        self.reserved = first_seq

    def cover(self, seq: int) -> None:
        if seq >= self.reserved:
            self.reserved = seq + RESERVE


class Copies(HeldCopies):
    """Copies that end when told; announcements go to the publisher as they come."""

    def __init__(self, scheduler: OffloadScheduler, publisher: Publisher) -> None:
        super().__init__(scheduler)
        self.publisher = publisher

    def perform(self, commands: object) -> list[object]:  # type: ignore[override]
        said = len(self.published)
        replies = super().perform(commands)  # type: ignore[arg-type]
        if said < len(self.published):
            self.publisher.publish(tuple(self.published[said:]))
        return replies  # type: ignore[return-value]


class Client:
    """A request as the replayer, or the snapshot endpoint, serves it: a turn at a time."""

    def __init__(self, sidecar: Sidecar, request: Request, identity: bytes) -> None:
        self.request = request
        self.over = False
        self._sidecar = sidecar
        self._identity = identity
        self._output = sidecar.outputs[request.output]
        self._reply: Reply | None = None
        self._cursor: Cursor | None = None

    def turn(self) -> None:
        (self._snapshot_turn if self.request.kind == "snapshot" else self._replay_turn)()
        if self.over and self._reply is not None:
            self._reply.close()

    def _replay_turn(self) -> None:
        if self._cursor is None:
            self._reply = self._answer()
            if self._reply is None:
                return
            self._cursor = Cursor(self._sidecar.router, self._identity, self._output, self._reply)  # type: ignore[arg-type]
        assert self._reply is not None
        self._cursor.send_some()
        self.over = self._cursor.over
        if self.over:
            self._sidecar.renderer.ended(self._reply, self._output)
        sent = max(self._reply.first, self._sidecar.journal.unsent_from)
        assert self._reply.seq <= sent, "a number that is not sent yet"

    def _answer(self) -> Reply | None:
        newest = self._sidecar.journal.next_seq - 1
        start = self.request.number
        reply = self._sidecar.answer(start, self._output)
        if reply is not None and reply.snapshot is not None:
            assert reply.first == (start if self._output.exact else max(start, newest - REACH + 1))
        return reply

    def _snapshot_turn(self) -> None:
        if self._sidecar.renderer.is_empty:
            self._say(SNAPSHOT_EMPTY, [])
            return
        self._reply = self._reply or self._sidecar.renderer.whole(self._output)
        if self._reply is not None and self._reply.ready:
            payloads = self._reply.payloads()
            if payloads is None:
                self._say(SNAPSHOT_UNAVAILABLE, [])
            else:
                self._say(self._reply.end, payloads)

    def _say(self, seq: int, payloads: list[Payload]) -> None:
        self.request.inbox.append([*map(bytes, snapshot_reply(seq, self._sidecar.publisher_id, payloads))])
        self.over = True

    @property
    def _half_told(self) -> bool:
        return self._reply is not None and self._reply.half_told

    def hang_up(self) -> None:
        """It took too long."""
        if self.request.kind == "snapshot":
            self._say(SNAPSHOT_UNAVAILABLE, [])
        elif len(self.request.inbox) < self._sidecar.shape.reply_queue and not self._half_told:
            self.request.inbox.append(list(REPLAY_END))
        else:
            self.request.dead = True
        self.over = True
        if self._reply is not None:
            self._reply.close()
        if self.request.kind == "replay":
            self._sidecar.renderer.ended(None, self._output)


class Sidecar:
    """One life, and what was resident after each of its numbers."""

    def __init__(self, life: int, shape: Shape, first_seq: int, disk: Reservation | None, network: Network) -> None:
        self.life, self.shape, self.network = life, shape, network
        self.model = MODELS[shape.model]
        self.publisher_id = b"%016d" % life
        self.clock = ManualClock()
        self._ticks = count()
        encodings = [Encoding(name) for name in DIALECT_OF[:-1]]
        encodings.append(Encoding(DIALECT_OF[-1], 0, self.publisher_id))
        limits = JournalLimits(shape.pending, 12, shape.retained, shape.retained_bytes)
        self.journal = Journal(limits, first_seq)
        self.first_seq = first_seq
        self.pubs = [PubSocket(network, place) for place in range(len(DIALECT_OF))]
        self.outputs = [
            Output(pub, encoding=place, exact=DIALECTS[DIALECT_OF[place]].contiguous_from_request)  # type: ignore[arg-type]
            for place, pub in enumerate(self.pubs)
        ]
        self.publisher = Publisher(
            self.journal, self.outputs, encodings=encodings, numbers=disk, wall_clock=self._now  # type: ignore[arg-type]
        )  # fmt: skip
        parts = PartLimits(min(shape.part_weight, shape.exact_bytes // BYTES_OF_WEIGHT), 20)
        replies = ReplayLimits(REACH, EXACT_REACH, 2, 5.0, parts, MessageLimits(shape.exact_bytes))
        self.recovery = Recovery(
            self.journal, encodings, clock=self.clock, wall_clock=self._now, limits=replies
        )  # fmt: skip
        self.teller = Teller(self.recovery, clock=self.clock, wall_clock=self._now, limits=TELLING)
        self.renderer = Renderer(self.recovery, self.teller, self.publisher)
        self.router = RouterSocket(shape.reply_queue)
        self.clients: list[Client] = []
        self.tiers: list[Copies] = []
        for medium in MEDIA:
            spec = TierSpec(medium, shape.capacity, 32, self.model, UNIT)
            scheduler = OffloadScheduler(spec, Limits())
            scheduler.hello(1, 1_000_000)
            self.tiers.append(Copies(scheduler, self.publisher))
        self.recovery.sources = lambda: [tier.scheduler.pool for tier in self.tiers]
        self.truth: dict[int, State] = {first_seq - 1: frozenset()}
        if first_seq:
            self.publisher.publish((Cleared(),))
        self.note()

    def _now(self) -> float:
        return self.life * LIFE_S + next(self._ticks)

    # what is resident

    @property
    def resident(self) -> State:
        return frozenset(
            Name(medium, group.index, key64(name))
            for medium, tier in zip(MEDIA, self.tiers, strict=True)
            for group in self.model
            for name in tier.scheduler.pool.ready_names(group.index)
        )

    def note(self) -> None:
        """Whatever was numbered since is told by now."""
        newest, resident = max(self.truth), self.resident
        self.truth.update((seq, resident) for seq in range(newest + 1, self.journal.next_seq))

    def blocks_of_main(self) -> State:
        """What dialects of one group are told."""
        (main,) = (group.index for group in self.model if group.main)
        return frozenset(
            Name(medium, 0, key64(name))
            for medium, tier in zip(MEDIA, self.tiers, strict=True)
            for name in tier.scheduler.pool.ready_hashes(main)
        )

    # tiers

    def store(self, place: int, path: Path, first: int, ends: set[int], ids: Iterator[int]) -> None:
        offers = [one for group in self.model for one in named_offers(path, group, first, ends, ids)]
        tier = self.tiers[place]
        tier.perform(tier.scheduler.step(1, Step(next(ids), offers), 0.0))
        self.note()

    def end_copies(self, place: int, most: int, *, good: bool) -> None:
        tier = self.tiers[place]
        for _ in range(min(most, len(tier.pending))):
            (tier.complete if good else tier.fail)()
            self.note()

    def reset(self, place: int) -> None:
        tier = self.tiers[place]
        tier.perform(tier.scheduler.reset(1, Reset(1)))
        self.note()

    # events

    def beat(self) -> None:
        self.publisher.heartbeat()
        self.note()

    def send(self, most: int | None = None) -> None:
        self.publisher.send_pending(most)
        self.note()

    def send_surely(self) -> None:
        self.network.surely = True
        self.send()
        self.beat()
        self.send()
        self.network.surely = False

    def lose_next(self) -> None:
        """A batch that cannot be encoded."""
        batch = self.journal.take_pending()
        if batch is not None:
            self.journal.lose(batch.seq)

    def check_numbers(self) -> None:
        """I5: every number is said by all outputs, waits, or is a counted hole."""
        journal = self.journal
        sent, *others = (pub.sent for pub in self.pubs)
        assert all(other == sent for other in others)
        assert all(before < after for before, after in pairwise(sent))
        assert not sent or self.first_seq <= sent[0] <= sent[-1] < journal.unsent_from
        holes = journal.dropped_batches + journal.lost_batches
        assert len(sent) + holes + journal.stats()["batches_pending"] == journal.next_seq - self.first_seq

    # answers

    def answer(self, number: int, output: Output) -> Reply | None:
        reply = self.renderer.answer(number, output)
        self.note()
        return reply

    def take_requests(self) -> None:
        while self.network.waiting:
            request = self.network.waiting.popleft()
            identity = b"%d" % len(self.router.clients)
            self.router.clients[identity] = request
            self.clients.append(Client(self, request, identity))

    def turn(self, place: int) -> None:
        client = self.clients[place % len(self.clients)]
        client.turn()
        self.clients = [one for one in self.clients if not one.over]

    def hang_up(self, place: int) -> None:
        self.clients.pop(place % len(self.clients)).hang_up()

    def render(self, most: int) -> None:
        for _ in range(most):
            self.teller.poll()
            if self.recovery.rendering is not None:
                self.recovery.rendering.render_next()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.recovery.forget_old()

    def die(self) -> None:
        for client in self.clients:
            client.request.dead = True
