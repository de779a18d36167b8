"""The reference engine: everything an engine does around attention, and nothing of attention.

    python -m kvevents_service.engine --engine-socket PATH --trace FILE

It schedules chunked prefill and decode over a paged cache, caches prefixes, preempts when blocks run out, loads
hits, verifies every loaded byte, and tells its planner what happened: that one decides what is offered, and when.
After each finished request it prints its counters as one JSON line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from kvevents_service.core.groups import STATE_KIND
from kvevents_service.engine.admission import Admission
from kvevents_service.engine.block_tables import GroupTable, content_name
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.lazy import EvictionOrder, LazyPlanner
from kvevents_service.engine.model import Model
from kvevents_service.engine.offers import OfferBook
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.plan import Planner
from kvevents_service.engine.planner import EagerPlanner
from kvevents_service.engine.request import EngineCounts, Request
from kvevents_service.engine.trace import TraceLine


class EngineSettings(msgspec.Struct, frozen=True):
    """Sizes of the engine. Tokens a step are shared by all running requests. `forward_s`
    stands for the forward pass: an engine whose steps take no time at all outruns any sidecar."""

    max_running: int = 8
    step_tokens: int = 2048
    decode_tokens: int = 16
    forward_s: float = 0.002


def make_planner(cache: PagedCache, model: Model, settings: EngineSettings, lazy: bool) -> Planner[Any]:
    """What decides about offers, over this cache."""
    book = OfferBook(cache.touch, cache.free, cache.blocks // 2)

    def find(group: int, block_hash: bytes) -> int | None:
        return cache.find(content_name(group, block_hash))

    if not lazy:
        return EagerPlanner(model.groups, model.hash_tokens, book, find)
    order = EvictionOrder(cache.free_after, cache.describe)
    return LazyPlanner(model.groups, model.hash_tokens, book, order, find, settings.step_tokens)


class ReferenceEngine:
    """One engine with one sidecar. `run` serves the lines to the end."""

    def __init__(
        self,
        cache: PagedCache,
        client: OffloadClient,
        model: Model,
        settings: EngineSettings,
        planner: Planner[Any],
    ) -> None:
        self.cache = cache
        self.client = client
        self.model = model
        self.settings = settings
        self.planner = planner
        self.counts = EngineCounts()
        self.admission = Admission(cache, client, model, self.counts)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._done: set[int] = set()

    def __repr__(self) -> str:
        return f"<ReferenceEngine running={len(self.running)} {self.admission!r} {self.cache!r}>"

    @property
    def admitted(self) -> int:
        """Requests that have blocks."""
        return len(self.running) + len(self.admission.loading)

    def run(self, lines: Iterator[TraceLine], first: int = 0) -> Iterator[EngineCounts]:
        """Serve every line; yields the counts after each step that finished a request."""
        self.counts.low_water = first
        for number, line in enumerate(lines, first):
            self.waiting.append(Request(number, line, self.model))
            while self.admitted + len(self.waiting) >= self.settings.max_running:
                yield from self._counted_step()
        while self.admitted or self.waiting:
            yield from self._counted_step()
        self.settle(10.0)
        self.counts.done = True
        yield self.counts

    def _counted_step(self) -> Iterator[EngineCounts]:
        before = self.counts.requests
        self.step()
        if self.counts.requests != before:
            yield self.counts

    def step(self) -> None:
        """One scheduler step: completions in, confirmed blocks out, then schedule and compute."""
        self.counts.steps += 1
        time.sleep(self.settings.forward_s)
        self._poll(0.0)
        self._send_step()
        budget = self._schedule_running(self.settings.step_tokens)
        self._admit(budget)

    # the sidecar

    def _poll(self, wait_s: float) -> None:
        completions = self.client.poll(wait_s)
        self.planner.settle(completions.steps)
        stored = sum(done.stored for done in completions.steps)
        self.counts.blocks_stored += stored
        self.counts.bytes_moved += stored * self.cache.block_bytes
        for loaded in completions.loads:
            request, good = self.admission.end_load(loaded)
            if good:
                self._start(request)
            else:
                self.waiting.appendleft(request)
        registrations = self.client.counters["registrations"]
        if registrations != self.counts.registrations:
            self.planner.offer_all_again()
            self.counts.registrations = registrations

    def _send_step(self) -> None:
        plan = self.planner.plan()
        if not plan.empty:
            self.planner.sent(plan, self.client.step(plan.offers(), plan.finished, plan.preempted))
        counts, planned = self.counts, self.planner.counts
        counts.blocks_offered, counts.offers_skipped = planned.offered, planned.skipped
        counts.blocks_recovered, counts.blocks_undescribed = planned.recovered, planned.undescribed

    # scheduling

    def _start(self, request: Request) -> None:
        self.running.append(request)
        self.planner.admit(request.view, [table.blocks for table in request.tables])
        self.planner.confirm(request.request_id, request.computed)

    def _schedule_running(self, budget: int) -> int:
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for an earlier one
            count = min(budget, self._wanted(request))
            if count and self._make_room(request, request.computed + count):
                self._compute(request, count)
                budget -= count
            if request.computed >= request.final_length:
                self._finish(request)
        return budget

    def _wanted(self, request: Request) -> int:
        prefill = request.prompt_length - request.computed
        return prefill if prefill > 0 else min(self.settings.decode_tokens, request.final_length - request.computed)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Extend the block tables; preempts the newest requests where needed. False if it cannot be helped now."""
        while not self.cache.can_allocate(sum(table.missing(tokens) for table in request.tables)):
            if self.running[-1] is request:
                return False
            self._preempt(self.running[-1])
        for table in request.tables:
            table.blocks += self.cache.allocate(table.missing(tokens))
        return True

    def _compute(self, request: Request, count: int) -> None:
        """The forward pass: at its end the tokens are confirmed. Blocks that left a window are free at once."""
        before = request.computed
        request.computed += count
        if request.computed > len(request.tokens):
            request.grow(request.computed - len(request.tokens))
        self.planner.confirm(request.request_id, request.computed)
        for table in request.tables:
            self._fill(request, table, range(table.spans.full(before), table.spans.full(request.computed)))
            self.cache.free(table.trim(request.computed))

    def _fill(self, request: Request, table: GroupTable, numbers: range) -> None:
        contents = table.contents(request.view, numbers)
        self.cache.fill(contents.blocks, contents.names)
        self.cache.cache(*contents)
        if table.group.kind == STATE_KIND:
            for number, block in zip(numbers, contents.blocks, strict=True):
                end = (number + 1) * table.group.block_size
                self.planner.hand_off(request.request_id, table.group.index, end, block)

    def _preempt(self, request: Request) -> None:
        self.counts.preemptions += 1
        self.running.remove(request)
        self.planner.preempt(request.request_id)
        self.cache.free(request.held())
        request.reset()
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        for table in request.tables:
            contents = table.contents(request.view, range(table.spans.full(request.computed)))
            self.counts.corrupt_blocks += self.cache.corrupt(contents.blocks, contents.names)
        self.counts.requests += 1
        self._done.add(request.number)
        while self.counts.low_water in self._done:
            self._done.discard(self.counts.low_water)
            self.counts.low_water += 1
        self.counts.prompt_tokens += request.prompt_length
        self.counts.output_tokens += request.final_length - request.prompt_length
        self.running.remove(request)
        self.planner.finish(request.request_id, request.computed)
        self.cache.free(request.held())

    def _admit(self, budget: int) -> None:
        while self.waiting and budget > 0 and self.admitted < self.settings.max_running:
            if not self.admission.admit(self.waiting[0], self._headroom()):
                return
            request = self.waiting.popleft()
            if request not in self.admission.loading.values():
                self._start(request)
            budget -= self.settings.step_tokens // 4

    def _headroom(self) -> int:
        """Blocks kept for requests that are already running, unless none is."""
        return self.cache.blocks // 8 if self.admitted else 0

    # the end

    def settle(self, wait_s: float) -> None:
        """Send what is left to say and wait until no copy touches our memory."""
        self._send_step()
        deadline = time.monotonic() + wait_s
        while self.client.outstanding and time.monotonic() < deadline:
            self._poll(0.1)
