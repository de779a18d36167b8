"""The books of vLLM's steps: which request is where, and what of it the planner may offer.

    (begin | end | a step is noted)* -> replay(landed) -> the planner plans

What happens is noted and no more: vLLM's scheduler waits. `replay` takes it in, several steps at once, in order.
Nothing may be offered between a note and its replay: a request that was preempted has lost its blocks. One that
runs holds its blocks itself, and of one that ends those that will be offered are held from its end on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple, Protocol

import msgspec

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.engine.lazy import BlockRecord
from kvevents_service.engine.plan import Planner
from kvevents_service.engine.spans import RequestView, Spans
from kvevents_service.engine.vllm_flights import Ending, Flights, Life, Share
from kvevents_service.engine.vllm_pool import NULL_BLOCK, EnginePool
from kvevents_service.engine.vllm_request import VllmRequest, known_tokens

UNBOUNDED = 1 << 62


class StepOutput(Protocol):
    """The part of `vllm.v1.core.sched.output.SchedulerOutput` that is read."""

    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None
    kv_connector_block_state: Any


class Started(NamedTuple):
    """A request that is scheduled for the first time, or again. `tables` are ours: a worker extends vLLM's."""

    request: VllmRequest
    tables: list[list[int]]
    start: int


class NotedStep(msgspec.Struct):
    """What goes on in it with more blocks stands in `output`: no worker changes the lists of these.

    `quiet`: no request has started, was preempted, or has more blocks. Once it has landed there is nothing in it.
    """

    number: int
    output: StepOutput
    started: Sequence[Started]
    quiet: bool


class NotedEnd(NamedTuple):
    """No `ending`: it had no blocks, or none any more."""

    request_id: str
    ending: Ending | None


class Books:
    """`requests` are those that have been given blocks. `view` is what the planner is to know of one.

    `noted`: a step is added to it when it is scheduled, with what it `starts`.
    `let_go`: a request may have given blocks up since it was set to False.
    """

    def __init__(
        self,
        planner: Planner[Any],
        flights: Flights,
        pool: EnginePool,
        stored: Sequence[Spans],
        view: Callable[[VllmRequest], RequestView],
        *,
        record: bool,
    ) -> None:
        self.requests: dict[str, VllmRequest] = {}
        self.noted: list[NotedStep | NotedEnd] = []
        self._planner = planner
        self._flights = flights
        self._pool = pool
        self._stored = stored
        self._view = view
        self._records = record
        self._prefix_only = all(each.group.kind in PREFIX_KINDS for each in stored)
        self._grain = gcd(*(each.block_size for each in stored))
        self._lives: dict[str, Life] = {}
        self._ending: dict[str, Life] = {}
        self._started: set[str] = set()
        self._landed = -1
        self.let_go = False

    def __repr__(self) -> str:
        return f"<Books {len(self._lives)} requests, {len(self.noted)} noted, {self._flights!r}>"

    @property
    def waiting(self) -> bool:
        """Something was noted, or a request that has ended waits for its last step."""
        return bool(self.noted or self._ending)

    # notes

    def starts(self, output: StepOutput) -> Sequence[Started]:
        """What is scheduled for the first time in a step, or again."""
        return list(self._starts(output))

    def _starts(self, output: StepOutput) -> Iterator[Started]:
        cached, resumed = output.scheduled_cached_reqs, output.scheduled_cached_reqs.resumed_req_ids
        begun = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        if resumed:
            rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
            begun += [row for row in rows if row[0] in resumed]
        for request_id, block_ids, start in begun:
            request = self.requests.get(request_id)
            if request is not None:
                self._started.add(request_id)
                yield Started(request, [list(ids) for ids in block_ids], start)

    def end(self, request: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """It has ended, and its blocks are freed behind this call: those that will be offered are held."""
        request_id, ending = request.request_id, None
        self.let_go = True
        self.requests.pop(request_id, None)
        self._planner.book.take_over(request_id)
        if any(tables) and (request_id in self._started or request_id in self._lives):
            tokens = known_tokens(request)
            held = [] if self._records else self._still_needed(request_id, tables, tokens)
            self._pool.touch(held)
            ending = Ending(tokens, request.num_computed_tokens, held)
        self.noted.append(NotedEnd(request_id, ending))

    def _still_needed(self, request_id: str, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """Blocks of these tables that the planner will offer at the request's end."""
        firsts = None if request_id in self._started else self._planner.ending(request_id)
        needed: list[int] = []
        for spans in self._stored:
            index = spans.group.index
            first = firsts[index] if firsts else 0
            needed += tables[index][first : -(-tokens // spans.block_size)]
        return [block for block in needed if block != NULL_BLOCK] if NULL_BLOCK in needed else needed

    # replay

    def replay(self, landed: int) -> None:
        """Take in what was noted. All ranks have computed step `landed`, and so all before it."""
        noted, self.noted, self._landed = self.noted, [], landed
        self._started.clear()
        for note in noted:
            if isinstance(note, NotedStep):
                if not (note.quiet and note.number <= landed):
                    self._step(note)
            else:
                self._ended(note)
        self._land()
        self._confirm_all()

    def _step(self, note: NotedStep) -> None:
        output = note.output
        for request_id in output.preempted_req_ids or ():
            self._preempt(request_id)
        for started in note.started:
            self._start(started, note.number)
        if any(output.scheduled_cached_reqs.new_block_ids):
            self._grow(output.scheduled_cached_reqs)
        if note.number > self._landed and output.total_num_scheduled_tokens:
            self._flights.begin(note.number, list(self._shares(note)))

    def _grow(self, cached: Any) -> None:
        """Requests that go on with more blocks. Those that are resumed have started anew."""
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and request_id not in cached.resumed_req_ids:
                life = self._lives.get(request_id)
                if life is not None:
                    life.grow(block_ids)

    def _start(self, started: Started, number: int) -> None:
        request, tables, _ = started
        request_id = request.request_id
        if request_id in self._ending:
            self._land()
        if request_id in self._ending:  # the id is in use again: nothing more is offered of its first request
            self._close(self._ending[request_id], 0, 0)
        life = self._lives[request_id] = Life(request, [[] for _ in tables], number)
        life.grow(tables)
        self._planner.admit(self._view(request), life.tables)

    def _shares(self, note: NotedStep) -> Iterator[Share]:
        """What a step that still runs computes of each request."""
        cached, scheduled = note.output.scheduled_cached_reqs, note.output.num_scheduled_tokens
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((started.request.request_id, started.start) for started in note.started)
        for request_id, start in starts.items():
            life = self._lives.get(request_id)
            if life is not None:
                yield Share(life, start, start + scheduled[request_id])

    def _land(self) -> None:
        for life in self._flights.land(self._landed):
            self._end(life)

    def _confirm_all(self) -> None:
        """What no running step computes is there.

        But for a request's own hits in vLLM's cache: its first step, or one before, may have to write them still.
        """
        starts = self._flights.starts()
        for life in self._lives.values():
            if life.since > self._landed:
                continue
            there = min(known_tokens(life.request), starts.get(life, UNBOUNDED))
            if there // self._grain > life.confirmed // self._grain or not self._prefix_only:
                self._confirm(life, there)

    def _confirm(self, life: Life, tokens: int) -> None:
        request, life.confirmed = life.request, tokens
        self._planner.confirm(request.request_id, tokens, request.num_computed_tokens)
        if self._records:
            self._record(life, tokens)

    def _record(self, life: Life, tokens: int) -> None:
        """What its blocks are, for the day when the engine is about to reuse them."""
        view = None
        for spans in self._stored:
            table, first = life.tables[spans.group.index], life.recorded[spans.group.index]
            stop = min(spans.full(tokens), spans.named(life.request.block_hashes), len(table))
            if stop > first:
                view = view or self._view(life.request)
                life.recorded[spans.group.index] = stop
                self._pool.record(table[first:stop], BlockRecord(view, spans.group.index, first))

    # the ends of requests

    def _preempt(self, request_id: str) -> None:
        life = self._lives.pop(request_id, None)
        self.let_go = True
        if life is not None:
            life.over = True
        self._planner.preempt(request_id)

    def _ended(self, note: NotedEnd) -> None:
        request_id, ending = note
        if ending is None and request_id in self._lives:
            self._preempt(request_id)
        life = self._lives.pop(request_id, None)
        if life is not None:
            life.over, life.ending = True, ending
            self._ending[request_id] = life
            self._end(life)
        elif request_id not in self._ending:
            self._planner.finish(request_id)
        if life is None and ending is not None:
            self._pool.free(ending.block_ids)

    def _end(self, life: Life) -> None:
        """Offer what is left of it, once no running step writes to it any more."""
        if life.ending is not None and not life.flights:
            tokens, computed, _ = life.ending
            if self._records:
                self._record(life, tokens)
            self._close(life, tokens, computed)

    def _close(self, life: Life, tokens: int, computed: int) -> None:
        """Offer what is left of so many tokens, and hold no more than that."""
        request_id, ending, life.ending = life.request.request_id, life.ending, None
        del self._ending[request_id]
        held = [] if ending is None else ending.block_ids
        kept = self._planner.finish(request_id, tokens, computed, held)
        if len(held) > kept:
            self._pool.free(held[kept:][::-1])
