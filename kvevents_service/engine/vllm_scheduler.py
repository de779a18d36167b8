"""The connector's half in vLLM's scheduler process: what is offered, looked up and loaded, and what is held.

One thread calls it, in vLLM's order: for every step `find` and `begin_load` of what waits, then `begin_step`; when
its output is there `finish` of what has ended, then `land_step`. Most of these only take a note. Every so many
steps, or at once when there is reason, all notes are taken in, and one message is said to the sidecar.

A block is offered when the step that computed it has been reported by all ranks, never before. From then until the
sidecar has said that no copy touches it any more it is referenced in vLLM's pool: by its request, and when that
lets go of it, by us, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.engine.client import Completions, OffloadClient
from kvevents_service.engine.lazy import LazyPlanner
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.plan import Planner
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.spans import RequestView, Spans
from kvevents_service.engine.vllm_books import Books, NotedStep, StepOutput
from kvevents_service.engine.vllm_flights import Flights
from kvevents_service.engine.vllm_loads import NOTHING, HitRules, LoadEnd, Loads
from kvevents_service.engine.vllm_pool import BlockPool, CacheKey, EnginePool
from kvevents_service.engine.vllm_request import EmbedsDigest, VllmRequest, view_of
from kvevents_service.wire.control import GroupSpec

IDLE_WAIT_S = 0.001
"""How long an empty step waits for the sidecar: vLLM runs empty steps one after another while a hit is loaded."""
LINGER_S = 1.0
"""How long vLLM is asked to run empty steps for stores that are under way."""
RESET_RETRY_S = 1.0
FENCE_S = 1.0
"""How long a step waits for copies of blocks that it may write, behind a reset of running requests alone; and then
again, if they do not end, until what is stored is void."""


class Said(msgspec.Struct, frozen=True):
    """What the workers are told of a step: its number, and loads that have ended, by request."""

    step: int
    ended: dict[str, LoadEnd]


class Rules(NamedTuple):
    """`step_tokens`: what one step may schedule. `held_fraction`: how much of the pool may be held.

    `batch_steps`: so many steps are told to the sidecar at once, where nothing is lost by it. `last_steps`: no
    empty steps follow when the last request has ended. `lent`: this vLLM is known to ask before it preempts.
    """

    lazy: bool
    step_tokens: int
    held_fraction: float
    hits: HitRules
    batch_steps: int = 1
    last_steps: bool = False
    lent: bool = True


class SchedulerHalf:
    """`pool` is vLLM's; `client` has the layout. `news`: counters may have changed since it was set to False."""

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
        self.news = True
        self.batch_steps = batch_steps(rules, groups)
        self._clock = clock
        self._digest = digest
        self._fine_unit = unit if rules.hits.fine else 0
        self._last_steps = rules.last_steps
        spans = [Spans(group, unit) for group in groups]
        stored = [each for each in spans if each.group.cacheable]
        self._spans = spans
        self._waiting: dict[str, VllmRequest] = {}
        asks = rules.lazy or not prefix_only(groups)
        flights = Flights(stored, watch=asks)
        self._pool = EnginePool(pool, flights.written, key, spans)
        self.planner = self._make_planner(rules, asks)
        is_lent = self.planner.book.lends_any_of
        self.loads = Loads(client, groups, unit, self._pool, rules.hits, rules.step_tokens, clock, is_lent)
        self._books = Books(self.planner, flights, self._pool, stored, self._view, record=rules.lazy)
        self._open_steps = self._step = self._due = self._look = 0
        self._landed = -1
        self._said_at = self._reset_at = -LINGER_S
        self._registrations = 0
        self._void = self._orphans = False

    def __repr__(self) -> str:
        return f"<SchedulerHalf {self._books!r}, {self.planner!r}, {self.loads!r}>"

    def _make_planner(self, rules: Rules, asks: bool) -> Planner[Any]:
        layout, pool = self.client.layout, self._pool
        book = OfferBook(pool.touch, pool.free, max(1, int(len(pool) * rules.held_fraction)))
        if rules.lazy:
            order = pool.eviction_order
            return LazyPlanner(layout.groups, layout.hash_tokens, book, order, pool.find, rules.step_tokens)
        return EagerPlanner(layout.groups, layout.hash_tokens, book, pool.find if asks else None, lent=rules.lent)

    def _view(self, request: VllmRequest) -> RequestView:
        return view_of(request, self._digest, self._fine_unit)

    # hits

    def arrive(self, request: VllmRequest) -> None:
        """A request is new."""
        self._waiting[request.request_id] = request
        if not (self._void or request.skip_reading_prefix_cache):
            self.loads.ask_early(request)

    def find(self, request: VllmRequest, local_tokens: int) -> int | None:
        """How many tokens behind its first `local_tokens` can be loaded. None: ask again in a later step."""
        if request.skip_reading_prefix_cache or (self._void and not self._settle_reset()):
            self.loads.release(request.request_id)
            return 0
        return self.loads.find(request, local_tokens)

    def begin_load(self, request: VllmRequest, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The request has its blocks: load so many tokens into them, or none."""
        self._books.requests[request.request_id] = request
        self._waiting.pop(request.request_id, None)
        if tokens:
            self.loads.begin(request.request_id, tables, tokens)
        else:
            self.loads.release(request.request_id)

    # steps

    def begin_step(self, output: StepOutput) -> Said:
        """This is scheduled now. It is in every step, so it calls nothing that it need not."""
        self._step = step = self._step + 1
        loads, tokens = self.loads, output.total_num_scheduled_tokens
        cached, preempted = output.scheduled_cached_reqs, output.preempted_req_ids
        starts = output.scheduled_new_reqs or cached.resumed_req_ids
        quiet = not (starts or preempted or any(cached.new_block_ids))
        self._books.noted.append(NotedStep(step, output, self._books.starts(output) if starts else (), quiet))
        if loads.arrived:
            loads.ask_more()
        if preempted:
            self._fence(preempted)
        if step >= self._due or not tokens or preempted:
            self._take_in(output, 0.0 if tokens else IDLE_WAIT_S)
        elif self._open_steps and step >= self._look and self._short(tokens):
            self._look = 2 * step - self._due + self.batch_steps
            self.collect()
        elif loads.loading or loads.late:
            self.collect()
        return Said(step, loads.take_ended() if loads.ended else NOTHING)

    def secure(self) -> None:
        """Requests may be preempted now: what they lend is held by us, but for what has been copied by now."""
        if self.client.ended:
            self.collect()
        self.planner.book.take_over_all()

    def _fence(self, preempted: set[str]) -> None:
        """vLLM has taken these requests' blocks, and is about to use them anew.

        It asks before it does, `secure`, but for a reset of its prefix cache with its running requests. Then the
        step waits for what is copied; should that take too long, whatever the sidecar has may be wrong. (Loads into
        such blocks are refused: they would begin before this.)
        """
        book = self.planner.book
        if preempted.isdisjoint(book.lenders):
            return
        self._await_ends(FENCE_S)
        if not preempted.isdisjoint(book.lenders):
            self.reset(FENCE_S / 2)

    def _short(self, tokens: int) -> bool:
        """Somebody may wait for blocks, and some may be held for the sidecar alone. `tokens`: of this step.

        It is looked for their end at growing distances: that may make a wait twice as long, not more.
        """
        if not (self._orphans or self._books.let_go):
            return False
        first = next(iter(self._waiting.values()), None)
        wanted = tokens + (0 if first is None else first.num_tokens)
        return self._pool.free_blocks < sum(wanted // each.block_size + 1 for each in self._spans)

    def land_step(self, number: int) -> None:
        """All ranks have computed this step, and its output has been dealt with."""
        if number > self._landed:
            self._landed = number
        if self._last_steps and not self._books.requests and self._books.waiting:
            self._take_in()

    def _take_in(self, output: StepOutput | None = None, wait_s: float = 0.0) -> None:
        """Everything that was noted and that has ended, and say to the sidecar what follows from it."""
        self.news = True
        self.collect(wait_s)
        self._greet()
        self._books.replay(self._landed)
        if output is not None and output.kv_connector_block_state is not None:
            self._hand_off(output.kv_connector_block_state.boundary_state_offloads)
        self._say()
        self._orphans = self._orphans or self._books.let_go
        self._books.let_go = False
        self._due, self._look = self._step + self.batch_steps, self._step + 1

    def collect(self, wait_s: float = 0.0) -> None:
        """Take in what has ended in the sidecar. Waits up to `wait_s` if something is under way."""
        if self._under_way:
            self._settle(self.client.poll(wait_s))

    def _await_ends(self, wait_s: float) -> None:
        """Wait until all stores have ended, if they do within `wait_s`."""
        deadline = self._clock() + wait_s
        while self._open_steps and (left := deadline - self._clock()) > 0:
            done = self.client.poll(left)
            if not (done.steps or done.loads):
                break
            self._settle(done)

    def _greet(self) -> None:
        """Another sidecar is there: it knows none of our blocks."""
        registrations = self.client.counters["registrations"]
        if registrations != self._registrations:
            self._registrations = registrations
            self.planner.offer_all_again()

    @property
    def _under_way(self) -> bool:
        """The sidecar owes us the end of something."""
        return self._open_steps > 0 or self.loads.under_way

    def _settle(self, done: Completions) -> None:
        if done.steps:
            self._open_steps -= len(done.steps)
            self._orphans = self._orphans and self._open_steps > 0
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
            if fresh and plan.preempted:  # at once: these may be looked up again before the courier has gone
                self._open_steps += self.client.step((), (), plan.preempted) is not None
            said = self.client.post_step(plan.makers, plan.finished) if fresh else None
            self._open_steps += said is not None
            self.planner.sent(plan, said)
            self._said_at = self._clock()

    def _hand_off(self, states: dict[str, Sequence[tuple[int, int, int]]]) -> None:
        """States that vLLM wants to have stored. Those of requests that are gone are not in our books."""
        for request_id, handed in states.items():
            for group, block_id, tokens in handed:
                self.planner.hand_off(request_id, group, tokens, block_id)

    # the ends of requests, and of everything

    def finish(self, request: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """It has ended, and its blocks are freed behind this call: those that will be offered are held."""
        self._waiting.pop(request.request_id, None)
        self.loads.forget(request.request_id)
        if self._open_steps and self.client.ended and self.planner.book.lends(request.request_id):
            self.collect()  # what has been copied by now need not be held
        self._books.end(request, tables)
        self._said_at = self._clock()  # its stores may have ended unseen: an idle engine looks for a moment

    @property
    def busy(self) -> bool:
        """Empty steps would bring something to its end."""
        if self._books.waiting:
            return True
        return self._under_way and self._clock() - self._said_at < LINGER_S

    def reset(self, wait_s: float = 1.0) -> bool:
        """Everything that was computed is void. True: nothing of it can be loaded any more."""
        self._books.replay(self._landed)
        self.planner.reset()
        self.loads.reset()
        self._pool.forget()
        self.client.recall()  # another sidecar might be told of it, and know of no reset
        self._void = True
        self._reset_at = -RESET_RETRY_S
        void = self._settle_reset(wait_s)
        if void:
            self.planner.book.void()
        else:
            self.planner.book.take_over_all()
        self._await_ends(wait_s)
        return void or not self.client.connected

    def _settle_reset(self, wait_s: float | None = None) -> bool:
        """False as long as the sidecar may hold blocks from before a reset: it is not asked for any, nor given."""
        if self._void and self._clock() - self._reset_at >= RESET_RETRY_S and self.client.connected:
            self._reset_at = self._clock()
            self._void = self.client.reset(wait_s or self.client.timeouts.lookup_s) is None
        return not self._void

    def close(self) -> None:
        """The engine ends."""
        self.client.close()


def prefix_only(groups: Sequence[GroupSpec]) -> bool:
    """What is stored of a request stays in its table: nothing of it is looked for by name."""
    return all(group.kind in PREFIX_KINDS for group in groups if group.cacheable)


def batch_steps(rules: Rules, groups: Sequence[GroupSpec]) -> int:
    """What is about to be reused, has left a window, or is a state that is handed over must be told of at once."""
    return rules.batch_steps if prefix_only(groups) and not rules.lazy else 1
