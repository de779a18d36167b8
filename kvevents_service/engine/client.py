"""The client inside an engine: small, synchronous, thread safe, and never in the way.

Every call has a deadline. While the sidecar is away, lookups say 0 and steps are dropped at once; a background
thread dials again and registers anew. Nothing is raised into the engine's step loop: an error is a miss, counted.

The contract for memory (I9): every step and load that is accepted (a number was returned) ends exactly once in
`poll`. Until then its blocks must be neither reused nor freed, also when a deadline has passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvevents_service.engine.courier import Courier, Parcel
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.plan import MakeOffer
from kvevents_service.engine.registration import ENGINE_FAULTS, Registration, Timeouts
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    Hello,
    Hit,
    Inspect,
    Inspected,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Reset,
    ResetDone,
    Step,
    StepDone,
)


class PrefixHit(NamedTuple):
    """`blocks` leading hash units can be loaded, pinned until loaded, released, or the lease runs out."""

    blocks: int
    lease_id: int | None = None


class Completions(NamedTuple):
    """What has ended since the last poll, in order of arrival."""

    steps: list[StepDone]
    loads: list[Loaded]


NO_HIT = PrefixHit(0)


class OffloadClient(Registration):
    """An engine's side of the engine protocol.

    `landed`, `begun`: the marks that steps and loads name which are given none.
    """

    landed: int | None = None
    begun: int | None = None

    def __init__(self, socket_path: str, layout: EngineLayout, timeouts: Timeouts | None = None) -> None:
        self.layout = layout
        super().__init__(socket_path, layout.fds, timeouts)
        self._courier = Courier(self._line, partial(self._forgive, "post"))
        self._posted: set[int] = set()

    @property
    def outstanding(self) -> int:
        """Steps and loads that have not been returned by `poll` yet."""
        return len(self._posted) + self._line.outstanding

    @property
    def ended(self) -> bool:
        """Some of them have been heard of, and `poll` returns them at once."""
        return self._line.has_ended

    # the step loop

    def step(
        self,
        offers: Sequence[Offer],
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        mark: int | None = None,
    ) -> int | None:
        """Tell what one scheduler step finished. Returns the step's number; None: dropped, nothing is held.

        The offered blocks must stay as they are until `poll` returns this number. `mark`: the blocks are computed
        when every rank's device has got there; its client tells (`mark`), before or after this.
        """
        return self._number(
            "steps", lambda number: Step(number, list(offers), list(finished), list(preempted), self._landed(mark))
        )

    def post_step(
        self,
        makers: Sequence[MakeOffer],
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        mark: int | None = None,
    ) -> int | None:
        """As `step`, but its offers are made, and it is sent, by another thread: this returns at once.

        If it cannot be sent after all it ends in `poll`, and nothing of it is stored. Steps go in their order, and
        after a `reset` none of before.
        """
        number = self._line.next_id()
        make = partial(_made_step, number, makers, finished, preempted, self._landed(mark))
        self._posted.add(number)
        if self._line.usable and self._courier.post(Parcel(make, partial(self._sent_step, number))):
            return number
        self._posted.discard(number)
        self._count_step(sent=False)
        return None

    def _landed(self, mark: int | None) -> int | None:
        return self.landed if mark is None else mark

    def _sent_step(self, number: int, sent: bool) -> None:
        if not sent:
            self._line.end(StepDone(number, 0, 0, 0))
        self._posted.discard(number)
        self._count_step(sent)

    def _count_step(self, sent: bool) -> None:
        with self._line.lock:  # two threads count
            self.counters["steps_sent" if sent else "steps_dropped"] += 1

    def may_have(self, block_hash: bytes) -> bool:
        """False: the sidecar has no block of this name, by its board. Asks nobody, and costs next to nothing."""
        link = self._line.link
        return link is None or link.board is None or link.board.may_have(block_hash)

    def lookup(
        self,
        request_id: str,
        block_hashes: bytes | Sequence[bytes],
        start_tokens: int = 0,
        *,
        fine: bool = False,
    ) -> PrefixHit:
        """How much can be loaded of a prompt that is in the engine up to `start_tokens`.

        `block_hashes`: those of the hash units from there on, packed, or one by one. `fine`: a hit may end inside a
        block, and be loaded up to there.
        """
        call_id = self.begin_lookup(request_id, block_hashes, start_tokens, fine=fine)
        return NO_HIT if call_id is None else self.end_lookup(call_id)

    def begin_lookup(
        self,
        request_id: str,
        block_hashes: bytes | Sequence[bytes],
        start_tokens: int = 0,
        *,
        fine: bool = False,
    ) -> int | None:
        """Ask, and go on: a number for `end_lookup` or `drop_lookup`. None: it is a miss already."""
        begun = self.begin_lookups([(request_id, block_hashes)], start_tokens, fine=fine)
        return begun[0] if begun else None

    def begin_lookups(
        self,
        prompts: Sequence[tuple[str, bytes | Sequence[bytes]]],
        start_tokens: int = 0,
        *,
        fine: bool = False,
        post: bool = False,
    ) -> list[int]:
        """Ask for several at once, by request and hashes: a number each. None at all: they are misses already.

        `post`: another thread sends them, and this returns at once.
        """
        self.counters["lookups"] += len(prompts)
        numbers = [self._line.next_id() for _ in prompts]
        lease_s = self.timeouts.lease_s

        def make() -> list[Lookup]:
            return [
                Lookup(number, request_id, packed_hashes(hashes), lease_s, start_tokens, fine)
                for number, (request_id, hashes) in zip(numbers, prompts, strict=True)
            ]

        try:
            if self._line.usable and (self._post_lookups(numbers, make) if post else self._line.begin(*make())):
                return numbers
        except ENGINE_FAULTS as error:
            self._forgive("lookup", error)
        return []

    def _post_lookups(self, numbers: Sequence[int], make: Callable[[], list[Lookup]]) -> bool:
        self._line.expect(numbers)
        posted = self._courier.post(Parcel(make, partial(self._line.left, numbers)))
        if not posted:
            self._line.left(numbers, sent=False)
        return posted

    def end_lookup(self, call_id: int) -> PrefixHit:
        """What was found. A miss if the answer does not come within the deadline, from now on.

        Of several that wait for a sidecar that has fallen silent only the first one waits.
        """
        answer = self._line.answered(call_id)
        if answer is None:
            if not self._line.usable:
                self._line.give_up(call_id)
                return NO_HIT
            answer = self._line.answer(call_id, self.timeouts.lookup_s)
        return PrefixHit(answer.blocks, answer.lease_id) if isinstance(answer, Hit) else NO_HIT

    def drop_lookup(self, call_id: int) -> None:
        """Nobody wants to know any more. What was found, or will be, is released."""
        self._line.give_up(call_id)

    def load(
        self, request_id: str, hit: PrefixHit, block_ids: bytes, units: int | None = None, mark: int | None = None
    ) -> int | None:
        """Start loading a hit, or its first `units`, into these blocks (packed int32). None: refused, recompute.

        The blocks must not be touched until `poll` returns this number. `mark`: what used them before is computed
        when every rank's device has got there.
        """
        try:
            lease_id = hit.lease_id
        except ENGINE_FAULTS as error:
            self._forgive("load", error)
            return None
        if lease_id is None:
            return None
        waits_for = self.begun if mark is None else mark
        return self._number("loads", lambda number: Load(number, request_id, lease_id, block_ids, units, waits_for))

    def release(self, hit: PrefixHit) -> None:
        """Do not load this hit after all."""
        try:
            if hit.lease_id is not None:
                self._line.send(Release(hit.lease_id))
        except ENGINE_FAULTS as error:
            self._forgive("release", error)

    def poll(self, wait_s: float = 0.0) -> Completions:
        """Steps and loads that have ended. Waits up to `wait_s` for a first one."""
        done = Completions([], [])
        for end in self._line.take_ended(wait_s):
            if isinstance(end, StepDone):
                done.steps.append(end)
            else:
                done.loads.append(end)
        return done

    def _number(self, what: str, message: Callable[[int], Step | Load]) -> int | None:
        """Send what takes a number; returns the number if it was sent: not to a sidecar that has fallen silent.

        What it is given now might be held for as long as it is silent.
        """
        sent, number = False, self._line.next_id()
        try:
            sent = self._line.usable and self._line.send(message(number))
        except ENGINE_FAULTS as error:
            self._forgive(what, error)
        self.counters[f"{what}_sent" if sent else f"{what}_dropped"] += 1
        return number if sent else None

    def _forgive(self, what: str, error: Exception) -> None:
        """An argument that cannot be meant is counted, and the call does nothing: it never ends a step."""
        self.counters["client_errors"] += 1
        self._line.last_error = f"{what}: {type(error).__name__}: {error}"

    # rare calls

    def recall(self) -> None:
        """What was posted and is not sent is not sent any more: it ends in `poll`, unsent."""
        with self._line.lock:
            self._courier.recall()

    def reset(self, wait_s: float = 1.0) -> int | None:
        """Forget every stored block. Returns how many were removed; None: no answer in time."""
        call = Reset(self._line.next_id())
        with self._line.lock:
            self._courier.recall()
            begun = self._line.begin(call)
        answer = self._line.answer(call.call_id, wait_s) if begun else None
        return answer.removed if isinstance(answer, ResetDone) else None

    def inspect(self, *, residents: bool = False, wait_s: float = 5.0) -> Inspected | None:
        """The sidecar's counters and resident set; None: no answer in time."""
        call = Inspect(self._line.next_id(), residents)
        answer = self._line.ask(call, wait_s)
        return answer if isinstance(answer, Inspected) else None

    def close(self, wait_s: float = 1.0) -> bool:
        """As ever; what was posted and is not sent ends, unsent."""
        self._courier.close(wait_s)
        return super().close(wait_s)

    def _hello(self) -> Hello:
        layout = self.layout
        return Hello(
            PROTOCOL_VERSION,
            "engine" if layout.groups else "observer",
            layout.engine_id or f"pid-{os.getpid()}",
            layout.namespace,
            layout.hash_bytes,
            list(layout.groups),
            list(layout.memories),
            list(layout.regions),
            layout.hash_tokens,
            layout.ranks,
            events=list(layout.events),
        )


def _made_step(
    number: int, makers: Sequence[MakeOffer], finished: Sequence[str], preempted: Sequence[str], mark: int | None
) -> tuple[Step]:
    return (Step(number, [make() for make in makers], list(finished), list(preempted), mark),)


def packed_hashes(block_hashes: bytes | bytearray | memoryview | Sequence[bytes]) -> bytes:
    """Hashes as the protocol packs them. TypeError for what holds no hashes."""
    if isinstance(block_hashes, bytes | bytearray | memoryview):
        return bytes(block_hashes)
    return b"".join(block_hashes)
