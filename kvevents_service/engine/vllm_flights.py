"""Steps that run, and the requests in them: what a step computes is there when every rank has reported the step.

    begin(number, shares) -> land(number) -> the requests in that step, and in every one before

A request may be in several running steps at once, and may end or be preempted while it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from kvevents_service.engine.plan import Tables
from kvevents_service.engine.spans import Spans
from kvevents_service.engine.vllm_pool import NULL_BLOCK
from kvevents_service.engine.vllm_request import VllmRequest


class Ending(NamedTuple):
    """A request has ended while steps of it run: so many tokens of it will be there, in blocks that are held."""

    tokens: int
    computed: int
    block_ids: list[int]


class Life:
    """A request from when it is scheduled until it is preempted or has ended.

    `since`: its first step. `flights`: running steps it is in. `confirmed`: tokens of it that are computed, as far
    as anybody was told.
    """

    __slots__ = ("confirmed", "ending", "flights", "over", "recorded", "request", "since", "tables")

    def __init__(self, request: VllmRequest, tables: list[list[int | None]], since: int) -> None:
        self.request = request
        self.since = since
        self.tables = tables
        self.recorded = [0] * len(tables)
        self.flights = self.confirmed = 0
        self.over = False
        self.ending: Ending | None = None

    def grow(self, block_ids: Sequence[Sequence[int] | None]) -> None:
        """More blocks, one list for each group that has any."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            if ids and NULL_BLOCK in ids:
                table += [None if block_id == NULL_BLOCK else block_id for block_id in ids]
            elif ids:
                table += ids

    def __repr__(self) -> str:
        return f"<Life {self.request.request_id} flights={self.flights} over={self.over}>"


class Share(NamedTuple):
    """A request's part of a step: its tokens [start, stop)."""

    life: Life
    start: int
    stop: int


class Flight(NamedTuple):
    number: int
    shares: Sequence[Share]
    written: Sequence[int]


class Flights:
    """Running steps in order. With `watch`, `written` counts the blocks that they write."""

    def __init__(self, spans: Sequence[Spans], *, watch: bool) -> None:
        self._spans = spans if watch else ()
        self._running: deque[Flight] = deque()
        self._written: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Flights {len(self._running)} running>"

    def __len__(self) -> int:
        return len(self._running)

    @property
    def written(self) -> Collection[int]:
        return self._written.keys()

    def begin(self, number: int, shares: Sequence[Share]) -> None:
        """A step goes to the workers."""
        written: list[int] = []
        for life, start, stop in shares:
            life.flights += 1
            if self._spans:
                written += self._blocks(life.tables, start, stop)
        if written:
            self._written.update(written)
        self._running.append(Flight(number, shares, written))

    def land(self, number: int) -> list[Life]:
        """Every rank has computed this step, and so all before it: the requests in them, once for each step."""
        landed: list[Life] = []
        while self._running and self._running[0].number <= number:
            flight = self._running.popleft()
            self._unwrite(flight.written)
            for life, _, _ in flight.shares:
                life.flights -= 1
                landed.append(life)
        return landed

    def starts(self) -> dict[Life, int]:
        """The first token of each request that a running step computes: what a rejected draft left, once more."""
        starts: dict[Life, int] = {}
        for flight in self._running:
            for life, start, _ in flight.shares:
                starts[life] = min(start, starts.get(life, start))
        return starts

    def _blocks(self, tables: Tables, start: int, stop: int) -> Iterator[int]:
        for spans in self._spans:
            table = tables[spans.group.index]
            yield from filter(None, table[start // spans.block_size : -(-stop // spans.block_size)])

    def _unwrite(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._written[block_id] -= 1
            if not self._written[block_id]:
                del self._written[block_id]
