"""The reference engine: everything an engine does around attention, and nothing of attention.

    python -m kvevents_service.engine.reference --engine-socket PATH --trace FILE

It schedules chunked prefill and decode over a paged cache, caches prefixes, preempts when blocks run out, looks up
each new request's prefix in the sidecar, loads hits and verifies every loaded byte, offers confirmed blocks, and
holds every block that a pending copy touches. After each finished request it prints its counters as one JSON line.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator

import msgspec

from kvevents_service.core.groups import PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.engine.block_tables import GroupTable, content_names
from kvevents_service.engine.client import OffloadClient, PrefixHit
from kvevents_service.engine.model import Model
from kvevents_service.engine.offers import OfferBook, make_offer
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.request import EngineCounts, Request
from kvevents_service.engine.trace import TraceLine
from kvevents_service.wire.control import Loaded, Offer
from kvevents_service.wire.packing import pack_int32, unpack_int32


class EngineSettings(msgspec.Struct, frozen=True):
    """Sizes of the engine. Tokens a step are shared by all running requests. `forward_s`
    stands for the forward pass: an engine whose steps take no time at all outruns any sidecar."""

    max_running: int = 8
    step_tokens: int = 2048
    decode_tokens: int = 16
    forward_s: float = 0.002


class ReferenceEngine:
    """One engine with one sidecar. `run` serves the lines to the end."""

    def __init__(self, cache: PagedCache, client: OffloadClient, model: Model, settings: EngineSettings) -> None:
        self.cache = cache
        self.model = model
        self.client = client
        self.settings = settings
        self.counts = EngineCounts()
        self.book = OfferBook(cache.touch, cache.free, cache.blocks // 2)
        self.waiting: deque[Request] = deque()
        self.loading: dict[int, Request] = {}
        self.running: list[Request] = []
        self._done: set[int] = set()
        self._ending: list[Request] = []
        self._preempted: list[str] = []

    def __repr__(self) -> str:
        return f"<ReferenceEngine running={len(self.running)} loading={len(self.loading)} {self.cache!r}>"

    def run(self, lines: Iterator[TraceLine], first: int = 0) -> Iterator[EngineCounts]:
        """Serve every line; yields the counts after each step that finished a request."""
        self.counts.low_water = first
        for number, line in enumerate(lines, first):
            self.waiting.append(Request(number, line, self.model))
            while len(self.running) + len(self.loading) + len(self.waiting) >= self.settings.max_running:
                yield from self._counted_step()
        while self.running or self.loading or self.waiting:
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

    # completions

    def _poll(self, wait_s: float) -> None:
        completions = self.client.poll(wait_s)
        self.book.settle(completions.steps)
        stored = sum(done.stored for done in completions.steps)
        self.counts.blocks_stored += stored
        self.counts.bytes_moved += stored * self.cache.block_bytes
        for loaded in completions.loads:
            self._end_load(self.loading.pop(loaded.load_id), loaded)
        registrations = self.client.counters["registrations"]
        if registrations != self.counts.registrations:
            self._offer_all_again()
            self.counts.registrations = registrations

    def _offer_all_again(self) -> None:
        """A new sidecar knows none of our blocks: without their parents later ones could not be stored."""
        for request in (*self.running, *self.loading.values()):
            for table in request.tables:
                table.offered = table.trimmed

    def _end_load(self, request: Request, loaded: Loaded) -> None:
        end = request.hit_start + request.hit.blocks * self.model.hash_tokens
        if loaded.blocks == request.hit.blocks:
            for table in request.tables:
                self._verify_load(request, table, needed_blocks(table.group, end, request.hit_start))
            self.counts.hit_tokens += end - request.hit_start
            request.computed = request.confirmed = end
            self.running.append(request)
        else:  # a miss after all: it is computed instead, from the start
            self.counts.loads_failed += 1
            self.cache.free(request.held())
            request.reset()
            self.waiting.appendleft(request)

    def _verify_load(self, request: Request, table: GroupTable, numbers: range) -> None:
        blocks = [block for block in table.blocks[numbers.start : numbers.stop] if block is not None]
        names = content_names(table.group, table.hashes(request.hashes, numbers.start, numbers.stop))
        loaded_bytes = len(blocks) * self.cache.block_bytes
        self.counts.corrupt_blocks += self.cache.corrupt(blocks, names)
        self.counts.bytes_verified += loaded_bytes
        self.counts.bytes_moved += loaded_bytes
        self.cache.cache(blocks, names)

    # offers

    def _send_step(self) -> None:
        """Offer what the last step finished. Requests that ended in it keep their blocks until this is sent."""
        room = self.book.room
        offers: list[Offer] = []
        held = array("i")
        for request in (*self._ending, *self.running):
            request.confirmed = request.computed
            for table in request.tables:
                for offer in self._offers(request, table, room - len(held)):
                    offers.append(offer)
                    held += unpack_int32(offer.block_ids)
        if offers or self._ending or self._preempted:
            finished = [request.request_id for request in self._ending]
            self.book.hold(self.client.step(offers, finished, self._preempted), held)
        self._let_go()

    def _let_go(self) -> None:
        """Blocks of requests that ended, and blocks that left a window: the book holds what is pending."""
        for request in self._ending:
            self.counts.offers_skipped += sum(
                table.full(request.confirmed) - table.offered for table in request.tables
            )
            self.cache.free(request.held())
        for request in self.running:
            for table in request.tables:
                self.cache.free(table.trim(request.confirmed))
        self._ending, self._preempted = [], []

    def _offers(self, request: Request, table: GroupTable, room: int) -> Iterator[Offer]:
        """Full blocks of confirmed tokens: those that the step being scheduled will fill are never among them."""
        start, stop = table.offered, min(table.full(request.confirmed), table.offered + room)
        if stop <= start:
            return
        table.offered = stop
        size, identity = table.group.block_size, request.identity
        for first, blocks in table.runs(start, stop):
            last = first + len(blocks)
            self.counts.blocks_offered += len(blocks)
            yield make_offer(
                request.request_id,
                table.hashes(request.hashes, first, last),
                request.tokens[first * size : last * size],
                blocks,
                group=table.group.index,
                parent=table.parent(request.hashes, first),
                lora_id=identity.lora_id,
                lora_name=identity.lora_name,
                extra_keys=identity.extra_keys(first, last),
            )

    # scheduling

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
        before = request.computed
        request.computed += count
        if request.computed > len(request.tokens):
            request.grow(request.computed - len(request.tokens))
        for table in request.tables:
            self._fill(request, table, table.full(before), table.full(request.computed))

    def _fill(self, request: Request, table: GroupTable, start: int, stop: int) -> None:
        blocks = [block for block in table.blocks[start:stop] if block is not None]
        names = content_names(table.group, table.hashes(request.hashes, start, stop))
        self.cache.fill(blocks, names)
        self.cache.cache(blocks, names)

    def _preempt(self, request: Request) -> None:
        self.counts.preemptions += 1
        self.running.remove(request)
        self._preempted.append(request.request_id)
        self.cache.free(request.held())
        request.reset()
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        for table in request.tables:
            for first, blocks in table.runs(0, table.full(request.computed)):
                names = table.hashes(request.hashes, first, first + len(blocks))
                self.counts.corrupt_blocks += self.cache.corrupt(blocks, content_names(table.group, names))
        self.counts.requests += 1
        self._done.add(request.number)
        while self.counts.low_water in self._done:
            self._done.discard(self.counts.low_water)
            self.counts.low_water += 1
        self.counts.prompt_tokens += request.prompt_length
        self.counts.output_tokens += request.final_length - request.prompt_length
        self.running.remove(request)
        self._ending.append(request)

    # admission

    def _admit(self, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) + len(self.loading) < self.settings.max_running:
            request = self.waiting[0]
            units = (request.prompt_length - 1) // self.model.hash_tokens  # one token is left to compute
            local = self._use_local_prefix(request, units * self.model.hash_tokens)
            hashes = request.hashes[local // self.model.hash_tokens : units]
            hit = self.client.lookup(request.request_id, hashes, local)
            end = local + hit.blocks * self.model.hash_tokens
            wanted = sum(len(needed_blocks(group, end, local)) for group in self.model.groups)
            if not self.cache.can_allocate(max(wanted, 1) + self._headroom()):
                self.client.release(hit)
                self.cache.free(request.held())
                request.reset()
                return
            self.waiting.popleft()
            self._begin(request, local, hit, end)
            budget -= self.settings.step_tokens // 4

    def _headroom(self) -> int:
        """Blocks kept for requests that are already running, unless none is."""
        return self.cache.blocks // 8 if self.running or self.loading else 0

    def _use_local_prefix(self, request: Request, most: int) -> int:
        """Fill the tables with the longest prefix that is in our own cache; returns its tokens."""
        step = alignment(self.model.groups)
        tokens = most // step * step
        while tokens > 0:
            missing = next(filter(None, (self._last_missing(request, t, tokens) for t in request.tables)), None)
            if missing is None:
                break
            tokens = (missing - 1) // step * step
        for table in request.tables:
            numbers = needed_blocks(table.group, tokens)
            found = [self.cache.find(name) for name in self._names(request, table, numbers)]
            self.cache.touch([block for block in found if block is not None])
            table.blocks = [*([None] * numbers.start), *found]
            table.trimmed = numbers.start
        return tokens

    def _last_missing(self, request: Request, table: GroupTable, tokens: int) -> int | None:
        """The end, in tokens, of the block that rules out a prefix of `tokens` from our own cache."""
        numbers = needed_blocks(table.group, tokens)
        names = self._names(request, table, numbers)
        lacking = [number for number, name in zip(numbers, names, strict=True) if self.cache.find(name) is None]
        if not lacking:
            return None
        first = lacking[0] if table.group.kind in PREFIX_KINDS else lacking[-1]
        return (first + 1) * table.group.block_size

    def _names(self, request: Request, table: GroupTable, numbers: range) -> list[bytes]:
        return content_names(table.group, table.hashes(request.hashes, numbers.start, numbers.stop))

    def _begin(self, request: Request, local: int, hit: PrefixHit, end: int) -> None:
        request.computed = request.confirmed = local
        self.counts.local_hit_tokens += local
        if not hit.blocks or not self._load(request, local, hit, end):
            self.running.append(request)

    def _load(self, request: Request, local: int, hit: PrefixHit, end: int) -> bool:
        """Bring a hit in; False if the sidecar went away meanwhile."""
        fresh: list[list[int]] = []
        for table in request.tables:
            numbers = needed_blocks(table.group, end, local)
            fresh.append(self.cache.allocate(len(numbers)))
        block_ids = pack_int32([block for blocks in fresh for block in blocks])
        load_id = self.client.load(request.request_id, hit, block_ids, hit.blocks)
        if load_id is None:
            self.cache.free([block for blocks in fresh for block in blocks])
            return False
        for table, blocks in zip(request.tables, fresh, strict=True):
            numbers = needed_blocks(table.group, end, local)
            table.blocks += [None] * (numbers.start - len(table.blocks))
            table.blocks += blocks
        request.hit, request.hit_start = hit, local
        self.loading[load_id] = request
        return True

    # the end

    def settle(self, wait_s: float) -> None:
        """Send what is left to say and wait until no copy touches our memory."""
        self._send_step()
        deadline = time.monotonic() + wait_s
        while self.client.outstanding and time.monotonic() < deadline:
            self._poll(0.1)
