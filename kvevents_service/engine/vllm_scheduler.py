"""The connector's half in vLLM's scheduler process: what is offered, looked up and loaded, and what is held.

One thread calls it, in vLLM's order: for every step `find` and `begin_load` of what waits, then `begin_step`, which
says one message to the sidecar; when its output is there `finish` of what has ended, then `land_step`.

A block is offered when the step that computed it has been reported by all ranks, never before. It is referenced in
vLLM's pool from then until the sidecar has said that no copy touches it any more, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple, Protocol

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.engine.client import Completions, OffloadClient
from kvevents_service.engine.lazy import BlockRecord, LazyPlanner
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.plan import Planner
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.spans import Spans
from kvevents_service.engine.vllm_flights import Ending, Flights, Life, Share
from kvevents_service.engine.vllm_loads import HitRules, LoadEnd, Loads
from kvevents_service.engine.vllm_pool import NULL_BLOCK, BlockPool, CacheKey, EnginePool
from kvevents_service.engine.vllm_request import EmbedsDigest, VllmRequest, known_tokens, view_of

IDLE_WAIT_S = 0.001
"""How long an empty step waits for the sidecar: vLLM runs empty steps one after another while a hit is loaded."""
LINGER_S = 1.0
"""How long vLLM is asked to run empty steps for stores that are under way."""
RESET_RETRY_S = 1.0
LOOK_STEPS = 4
"""Every so many steps it is looked which stores have ended: one look takes in several."""


class StepOutput(Protocol):
    """The part of `vllm.v1.core.sched.output.SchedulerOutput` that is read."""

    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None
    kv_connector_block_state: Any


class Said(NamedTuple):
    """What the workers are told of a step: its number, and loads that have ended, by request."""

    step: int
    ended: dict[str, LoadEnd]


class Rules(NamedTuple):
    """`step_tokens`: what one step may schedule. `held_fraction`: how much of the pool may be held."""

    lazy: bool
    step_tokens: int
    held_fraction: float
    hits: HitRules


class SchedulerHalf:
    """`pool` is vLLM's; `client` has the layout."""

    def __init__(
        self,
        client: OffloadClient,
        pool: BlockPool,
        rules: Rules,
        key: CacheKey,
        digest: EmbedsDigest,
        clock: Callable[[], float],
    ) -> None:
        groups, unit = client.layout.groups, client.layout.hash_tokens
        self.client = client
        self.stored_blocks = self.declined_blocks = 0
        self._clock = clock
        self._digest = digest
        self._fine_unit = unit if rules.hits.fine else 0
        spans = [Spans(group, unit) for group in groups]
        self._stored = [each for each in spans if each.group.cacheable]
        self._step_blocks = sum(rules.step_tokens // each.block_size + 1 for each in spans)
        self._lazy = rules.lazy
        self._prefix_only = all(each.group.kind in PREFIX_KINDS for each in self._stored)
        self._grain = gcd(*(each.block_size for each in self._stored))
        asks = rules.lazy or not self._prefix_only
        self._flights = Flights(self._stored, watch=asks)
        self._pool = EnginePool(pool, self._flights.written, key, spans)
        self.planner = self._make_planner(rules, asks)
        self.loads = Loads(client, groups, unit, self._pool, rules.hits, clock)
        self._requests: dict[str, VllmRequest] = {}
        self._lives: dict[str, Life] = {}
        self._ending: dict[str, Life] = {}
        self._open_steps = self._step = 0
        self._said_at = self._reset_at = -LINGER_S
        self._registrations = 0
        self._void = False

    def __repr__(self) -> str:
        return f"<SchedulerHalf {len(self._lives)} requests, {self._flights!r}, {self.planner!r}, {self.loads!r}>"

    def _make_planner(self, rules: Rules, asks: bool) -> Planner[Any]:
        layout, pool = self.client.layout, self._pool
        book = OfferBook(pool.touch, pool.free, max(1, int(len(pool) * rules.held_fraction)))
        if rules.lazy:
            order = pool.eviction_order
            return LazyPlanner(layout.groups, layout.hash_tokens, book, order, pool.find, rules.step_tokens)
        return EagerPlanner(layout.groups, layout.hash_tokens, book, pool.find if asks else None)

    # hits

    def arrive(self, request: VllmRequest) -> None:
        """A request is new."""
        if not (self._void or request.skip_reading_prefix_cache):
            self.loads.ask_early(request)

    def find(self, request: VllmRequest, local_tokens: int) -> int:
        """How many tokens behind its first `local_tokens` can be loaded."""
        if request.skip_reading_prefix_cache or not self._settle_reset():
            self.loads.release(request.request_id)
            return 0
        return self.loads.find(request, local_tokens)

    def begin_load(self, request: VllmRequest, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The request has its blocks: load so many tokens into them, or none."""
        self._requests[request.request_id] = request
        if tokens:
            self.loads.begin(request.request_id, tables, tokens)
        else:
            self.loads.release(request.request_id)

    # steps

    def begin_step(self, output: StepOutput) -> Said:
        """This is scheduled now. Says to the sidecar what earlier steps have computed."""
        self._step += 1
        if not output.total_num_scheduled_tokens:
            self.collect(IDLE_WAIT_S)
        elif self._under_way and self._look_due():
            self.collect()
        self._greet()
        for request_id in output.preempted_req_ids or ():
            self._preempt(request_id)
        self._flights.begin(self._step, list(self._shares(output)))
        self._hand_off(output)
        self._say()
        return Said(self._step, self.loads.take_ended())

    def collect(self, wait_s: float = 0.0) -> None:
        """Take in what has ended in the sidecar. Waits up to `wait_s` if something is under way."""
        if self._under_way:
            self._settle(self.client.poll(wait_s))

    def _greet(self) -> None:
        """Another sidecar is there: it knows none of our blocks."""
        registrations = self.client.counters["registrations"]
        if registrations != self._registrations:
            self._registrations = registrations
            self.planner.offer_all_again()

    def _look_due(self) -> bool:
        """Somebody waits for a load or for blocks, or it has been a while."""
        if self._step % LOOK_STEPS == 0 or self.loads.under_way or self.planner.book.crowded:
            return True
        return self._pool.free_blocks < self._step_blocks

    @property
    def _under_way(self) -> bool:
        """The sidecar owes us the end of something."""
        return self._open_steps > 0 or self.loads.under_way

    def _settle(self, done: Completions) -> None:
        if done.steps:
            self._open_steps -= len(done.steps)
            self.planner.settle(done.steps)
            self.stored_blocks += sum(end.stored for end in done.steps)
            self.declined_blocks += sum(end.declined for end in done.steps)
        if self.loads.under_way:
            self.loads.settle(done.loads)
            self.loads.expire()

    def _say(self) -> None:
        """One message. What it offers is held from here on."""
        plan = None if self.planner.idle else self.planner.plan()
        if plan is not None and not plan.empty:
            fresh = self._settle_reset()
            said = self.client.step(plan.offers, plan.finished, plan.preempted) if fresh else None
            self._open_steps += said is not None
            self.planner.sent(plan, said)
            self._said_at = self._clock()

    def _shares(self, output: StepOutput) -> Iterator[Share]:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            life = self._start(new.req_id, new.block_ids)
            if life is not None:
                start = new.num_computed_tokens
                yield Share(life, start, start + scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            life = self._start(request_id, blocks) if request_id in resumed else self._lives.get(request_id)
            if life is not None:
                if blocks is not None and request_id not in resumed:
                    life.grow(blocks)
                yield Share(life, start, start + scheduled[request_id])

    def _start(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> Life | None:
        """It is scheduled for the first time, or again after a preemption."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request_id in self._ending:  # the id is in use again: nothing more is offered of its first request
            self._close(self._ending[request_id], 0, 0)
        life = self._lives[request_id] = Life(request, [[] for _ in block_ids])
        life.grow(block_ids)
        self.planner.admit(view_of(request, self._digest, self._fine_unit), life.tables)
        return life

    def _hand_off(self, output: StepOutput) -> None:
        """States that vLLM wants to have stored. Those of requests that are gone are not in our books."""
        state = output.kv_connector_block_state
        for request_id, handed in () if state is None else state.boundary_state_offloads.items():
            for group, block_id, tokens in handed:
                self.planner.hand_off(request_id, group, tokens, block_id)

    def land_step(self, number: int) -> None:
        """All ranks have computed this step, and its output has been dealt with."""
        for life, _, stop in self._flights.land(number):
            if life.ending is not None:
                self._end(life)
            elif not life.over and (stop // self._grain > life.confirmed // self._grain or not self._prefix_only):
                self._confirm(life, stop)

    def _confirm(self, life: Life, stop: int) -> None:
        request = life.request
        there = life.confirmed = min(stop, known_tokens(request))
        self.planner.confirm(request.request_id, there, request.num_computed_tokens)
        if self._lazy:
            self._record(life, there)

    def _record(self, life: Life, tokens: int) -> None:
        """What its blocks are, for the day when the engine is about to reuse them."""
        view = None
        for spans in self._stored:
            table, first = life.tables[spans.group.index], life.recorded[spans.group.index]
            stop = min(spans.full(tokens), spans.named(life.request.block_hashes), len(table))
            if stop > first:
                view = view or view_of(life.request, self._digest, self._fine_unit)
                life.recorded[spans.group.index] = stop
                self._pool.record(table[first:stop], BlockRecord(view, spans.group.index, first))

    # the ends of requests

    def _preempt(self, request_id: str) -> None:
        life = self._lives.pop(request_id, None)
        if life is not None:
            life.over = True
        self.planner.preempt(request_id)

    def finish(self, request: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """It has ended, and its blocks are freed behind this call: those that will be offered are held."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._said_at = self._clock()  # its stores may have ended unseen: an idle engine looks for a moment
        self.loads.forget(request_id)
        life = self._lives.pop(request_id, None)
        if life is None:
            self.planner.finish(request_id)
            return
        life.over = True
        held = self._still_needed(request_id, tables) if life.flights else []
        life.ending = Ending(known_tokens(request), request.num_computed_tokens, held)
        self._ending[request_id] = life
        self._end(life)

    def _still_needed(self, request_id: str, tables: Sequence[Sequence[int]]) -> list[int]:
        """Hold the blocks that will be offered at the request's end."""
        firsts = self.planner.ending(request_id) or [0] * len(tables)
        held = [
            block
            for table, first in zip(tables, firsts, strict=False)  # a preempted one has no tables
            for block in table[first:]
            if block != NULL_BLOCK
        ]
        self._pool.touch(held)
        return held

    def _end(self, life: Life) -> None:
        """Offer what is left of it, once no running step writes to it any more."""
        if life.ending is not None and not life.flights:
            tokens, computed, _ = life.ending
            if self._lazy:
                self._record(life, tokens)
            self._close(life, tokens, computed)

    def _close(self, life: Life, tokens: int, computed: int) -> None:
        """Offer what is left of so many tokens, and hold no more than that."""
        request_id, ending, life.ending = life.request.request_id, life.ending, None
        del self._ending[request_id]
        self.planner.finish(request_id, tokens, computed)
        if ending is not None:
            self._pool.free(ending.block_ids[::-1])

    # all of it

    @property
    def busy(self) -> bool:
        """Empty steps would bring something to its end."""
        if self._ending:
            return True
        return self._under_way and self._clock() - self._said_at < LINGER_S

    def reset(self, wait_s: float = 1.0) -> bool:
        """Everything that was computed is void. True: nothing of it can be loaded any more."""
        self.planner.reset()
        self.loads.reset()
        self._pool.forget()
        self._void = True
        self._reset_at = -RESET_RETRY_S
        return self._settle_reset(wait_s) or not self.client.connected

    def _settle_reset(self, wait_s: float | None = None) -> bool:
        """False as long as the sidecar may hold blocks from before a reset: it is not asked for any, nor given."""
        if self._void and self._clock() - self._reset_at >= RESET_RETRY_S and self.client.connected:
            self._reset_at = self._clock()
            self._void = self.client.reset(wait_s or self.client.timeouts.lookup_s) is None
        return not self._void

    def close(self) -> None:
        """The engine ends."""
        self.client.close()
