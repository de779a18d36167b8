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

from kvevents_service.engine.client import OffloadClient, PrefixHit
from kvevents_service.engine.offers import OfferBook, make_offer
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.trace import TraceLine, chain_hashes, derived_tokens, prompt_tokens
from kvevents_service.wire.control import Loaded, Offer
from kvevents_service.wire.packing import pack_int32, unpack_int32


class EngineCounts(msgspec.Struct):
    """What the engine did so far. Every request of the trace before number `low_water` is finished."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    local_hit_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    blocks_offered: int = 0
    blocks_stored: int = 0
    offers_skipped: int = 0
    loads_failed: int = 0
    bytes_moved: int = 0
    bytes_verified: int = 0
    corrupt_blocks: int = 0
    registrations: int = 0
    low_water: int = 0
    done: bool = False


class EngineSettings(msgspec.Struct, frozen=True):
    """Sizes of the engine. Tokens a step are shared by all running requests. `forward_s`
    stands for the forward pass: an engine whose steps take no time at all outruns any sidecar."""

    block_size: int = 16
    max_running: int = 8
    step_tokens: int = 2048
    decode_tokens: int = 16
    forward_s: float = 0.002


class Request:
    """One request: tokens and hashes grow, the block table follows, `computed` counts tokens with KV."""

    def __init__(self, number: int, line: TraceLine, block_size: int) -> None:
        self.number = number
        self.request_id = f"req-{number}"
        self.seed = 1_000_000_007 + number
        self.tokens = prompt_tokens(line)
        self.prompt_length = len(self.tokens)
        self.final_length = self.prompt_length + line.output_length
        self.block_size = block_size
        self.hashes: list[bytes] = chain_hashes(self.tokens, block_size, [])
        self.reset()

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.computed}/{self.final_length} blocks={len(self.blocks)}>"

    def reset(self) -> None:
        """It has no blocks: new, or preempted."""
        self.blocks: list[int] = []
        self.computed = self.confirmed = self.offered = 0
        self.hit = PrefixHit(0)
        self.load_id: int | None = None

    def grow(self, count: int) -> None:
        """`count` more tokens were generated."""
        self.tokens += derived_tokens(self.seed + len(self.tokens), count)
        self.hashes += chain_hashes(self.tokens, self.block_size, self.hashes)

    def blocks_for(self, tokens: int) -> int:
        """How many more blocks the table needs to hold so many tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))


class ReferenceEngine:
    """One engine with one sidecar. `run` serves the lines to the end."""

    def __init__(self, cache: PagedCache, client: OffloadClient, settings: EngineSettings) -> None:
        self.cache = cache
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
            self.waiting.append(Request(number, line, self.settings.block_size))
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
            request.offered = 0

    def _end_load(self, request: Request, loaded: Loaded) -> None:
        start = len(request.blocks) - request.hit.blocks
        blocks, hashes = request.blocks[start:], request.hashes[start : len(request.blocks)]
        if loaded.blocks == len(blocks):
            loaded_bytes = len(blocks) * self.cache.block_bytes
            self.counts.corrupt_blocks += self.cache.corrupt(blocks, hashes)
            self.counts.bytes_verified += loaded_bytes
            self.counts.bytes_moved += loaded_bytes
            self.counts.hit_tokens += len(blocks) * self.settings.block_size
            self.cache.cache(blocks, hashes)
            request.computed = request.confirmed = len(request.blocks) * self.settings.block_size
        else:  # a miss after all: these blocks are computed instead
            self.counts.loads_failed += 1
        request.load_id = None
        self.running.append(request)

    # offers

    def _send_step(self) -> None:
        """Offer what the last step finished. Requests that ended in it keep their blocks until this is sent."""
        room = self.book.room
        offers, held = [], array("i")
        for request in (*self._ending, *self.running):
            request.confirmed = request.computed
            offer = self._offer(request, room - len(held))
            if offer is not None:
                offers.append(offer)
                held += unpack_int32(offer.block_ids)
        if offers or self._ending or self._preempted:
            finished = [request.request_id for request in self._ending]
            self.book.hold(self.client.step(offers, finished, self._preempted), held)
        self._release_ended()

    def _release_ended(self) -> None:
        for request in self._ending:
            self.counts.offers_skipped += request.confirmed // self.settings.block_size - request.offered
            self.cache.free(request.blocks[::-1])
        self._ending, self._preempted = [], []

    def _offer(self, request: Request, room: int) -> Offer | None:
        """Full blocks of confirmed tokens: those that the step being scheduled will fill are never among them."""
        start, stop = request.offered, min(request.confirmed // self.settings.block_size, request.offered + room)
        if stop <= start:
            return None
        request.offered = stop
        self.counts.blocks_offered += stop - start
        size = self.settings.block_size
        return make_offer(
            request.request_id,
            request.hashes[start:stop],
            request.tokens[start * size : stop * size],
            request.blocks[start:stop],
            parent=request.hashes[start - 1] if start else None,
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
        """Extend the block table; preempts the newest requests where needed. False if it cannot be helped now."""
        need = request.blocks_for(tokens)
        while not self.cache.can_allocate(need):
            if self.running[-1] is request:
                return False
            self._preempt(self.running[-1])
        request.blocks += self.cache.allocate(need)
        return True

    def _compute(self, request: Request, count: int) -> None:
        before = request.computed // self.settings.block_size
        request.computed += count
        if request.computed > len(request.tokens):
            request.grow(request.computed - len(request.tokens))
        after = request.computed // self.settings.block_size
        blocks, hashes = request.blocks[before:after], request.hashes[before:after]
        self.cache.fill(blocks, hashes)
        self.cache.cache(blocks, hashes)

    def _preempt(self, request: Request) -> None:
        self.counts.preemptions += 1
        self.running.remove(request)
        self._preempted.append(request.request_id)
        self.cache.free(request.blocks[::-1])
        request.reset()
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        full = request.computed // self.settings.block_size
        self.counts.corrupt_blocks += self.cache.corrupt(request.blocks[:full], request.hashes[:full])
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
            usable = (request.prompt_length - 1) // self.settings.block_size  # one token is left to compute
            local = self.cache.cached_prefix(request.hashes[:usable])
            self.cache.touch(local)
            hit = self.client.lookup(request.request_id, request.hashes[len(local) : usable])
            room = max(hit.blocks, 1)
            if not self.cache.can_allocate(room + self._headroom()):
                self.client.release(hit)
                self.cache.free(local[::-1])
                return
            self.waiting.popleft()
            self._begin(request, local, hit)
            budget -= self.settings.step_tokens // 4

    def _headroom(self) -> int:
        """Blocks kept for requests that are already running, unless none is."""
        return self.cache.blocks // 8 if self.running or self.loading else 0

    def _begin(self, request: Request, local: list[int], hit: PrefixHit) -> None:
        size = self.settings.block_size
        request.blocks = list(local)
        request.computed = request.confirmed = len(local) * size
        self.counts.local_hit_tokens += request.computed
        if hit.blocks:
            fresh = self.cache.allocate(hit.blocks)
            load_id = self.client.load(request.request_id, hit, pack_int32(fresh))
            if load_id is not None:
                request.blocks += fresh
                request.hit, request.load_id = hit, load_id
                self.loading[load_id] = request
                return
            self.cache.free(fresh[::-1])
        self.running.append(request)

    # the end

    def settle(self, wait_s: float) -> None:
        """Send what is left to say and wait until no copy touches our memory."""
        self._send_step()
        deadline = time.monotonic() + wait_s
        while self.client.outstanding and time.monotonic() < deadline:
            self._poll(0.1)
