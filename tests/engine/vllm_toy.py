"""vLLM's scheduler without a model: a block pool, steps in flight, and the hooks in vLLM's order.

As vLLM does, it names a block before it is computed. A block's `content` is what was really computed into it, or
loaded; `ToyClient` is a whole tier behind the client's calls, whose copies end when a test says so. Every offer is
checked when it is made and again when its copy ends: its blocks hold what it says (I9).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvevents_service.core.groups import WINDOWED, check_groups, first_needed, needed_blocks
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.engine.client import NO_HIT, Completions, PrefixHit, packed_hashes
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.plan import MakeOffer
from kvevents_service.engine.registration import Timeouts
from kvevents_service.engine.vllm_loads import HitRules
from kvevents_service.engine.vllm_scheduler import Rules, Said, SchedulerHalf
from kvevents_service.testing import HeldCopies, ManualClock
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
from kvevents_service.wire.name_board import NameBoard
from kvevents_service.wire.packing import pack_int32, unpack_int32

UNIT = 4
FULL = GroupSpec(0, "full_attention", 4)
WINDOW = GroupSpec(1, "sliding_window", 4, 8)
SESSION = 1

Content = tuple[int, bytes]


def key(block_hash: bytes, group: int) -> bytes:
    """As vLLM's pool names a group's block."""
    return block_hash + group.to_bytes(4, "big")


def no_digest(request: Any, start: int, stop: int) -> bytes:
    raise AssertionError("these prompts are of tokens")


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = block_id == 0


class Pool:
    """Block 0 is the null block. `content` by block id."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.queue = dict.fromkeys(self.blocks[1:])
        self.cached: dict[bytes, Block] = {}
        self.content: list[Content | None] = [None] * blocks
        self.fresh: list[tuple[int, Content | None]] = []
        self.free_block_queue = SimpleNamespace(iter_blocks_after=self._after)

    def _after(self, cursor: Block | None) -> Iterator[Block]:
        blocks = list(self.queue)
        return iter(blocks[blocks.index(cursor) + 1 if cursor is not None else 0 :])

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert not block.is_null
            self.queue.pop(block, None)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"block {block.block_id} given back twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.queue[block] = None

    def get_num_free_blocks(self) -> int:
        return len(self.queue)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None:
        found = [self.cached.get(key(block_hash, group)) for group in kv_cache_group_ids]
        return None if None in found else [block for block in found if block is not None]

    def allocate(self) -> Block:
        block = next(iter(self.queue))
        self.touch([block])
        if block.block_hash is not None and self.cached.get(block.block_hash) is block:
            del self.cached[block.block_hash]
        block.block_hash = None
        self.fresh.append((block.block_id, self.content[block.block_id]))
        return block

    def overwrite(self) -> None:
        """A step runs: what was allocated for it may be written to, but for what is loaded by now."""
        for block_id, before in self.fresh:
            if self.content[block_id] == before:
                self.content[block_id] = None
        self.fresh.clear()

    def name(self, block: Block, name: bytes) -> None:
        if block.block_hash is None:
            block.block_hash = name
            self.cached.setdefault(name, block)

    def reset(self) -> bool:
        if any(block.ref_cnt for block in self.blocks):
            return False
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True


class Request:
    """A request as the connector sees it. It ends when it has `length` tokens."""

    def __init__(self, request_id: str, prompt: Sequence[int], more: int) -> None:
        self.request_id = request_id
        self.all_token_ids: list[int] = []
        self.num_prompt_tokens = len(prompt)
        self.length = len(prompt) + more
        self.block_hashes: list[bytes] = []
        self.skip_reading_prefix_cache = False
        self.lora_request = self.cache_salt = self.prompt_embeds = None
        self.resumable = False
        self.mm_features: list[Any] = []
        self.tables: list[list[Block]] = []
        self.num_computed_tokens = self.num_in_flight_tokens = self.local = 0
        self.loading = self.known = False
        self.grow(prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def grow(self, tokens: Sequence[int]) -> None:
        self.all_token_ids += tokens
        for unit in range(len(self.block_hashes), self.num_tokens // UNIT):
            before = self.block_hashes[-1] if unit else b""
            packed = pack_int32(self.all_token_ids[unit * UNIT : (unit + 1) * UNIT])
            self.block_hashes.append(sha256(before + packed).digest())

    def ids(self) -> list[list[int]]:
        return [[block.block_id for block in table] for table in self.tables]


class Running(NamedTuple):
    """A step in flight: tokens [start, stop) of each request, and the blocks that it fills."""

    number: int
    parts: list[tuple[Request, int, int]]
    fills: list[tuple[int, Content]]
    said: Said


class ToyClient:
    """The calls of an `OffloadClient`, on a real core. `away`: nobody answers. `sluggish`: no wait ends a copy.

    `deaf`: a reset gets no answer.
    """

    def __init__(self, groups: Sequence[GroupSpec], pool: Pool) -> None:
        self.layout = EngineLayout("toy", "toy", check_groups(groups, UNIT), hash_tokens=UNIT)
        self.timeouts = Timeouts()
        self.counters: Counter[str] = Counter()
        self.away = self.sluggish = self.deaf = False
        self.shows_names = True
        self._pool = pool
        self._ended: list[StepDone | Loaded] = []
        self._posted: list[tuple[Sequence[MakeOffer], list[Offer]]] = []
        self._ids = 0
        self._open: dict[int, list[tuple[int, Content]]] = {}
        self._loads: dict[int, list[tuple[int, Content]]] = {}
        self._asked: dict[int, Lookup] = {}
        self._early: dict[int, PrefixHit] = {}
        self.connect()

    def connect(self) -> None:
        """A new, empty sidecar. What the old one had under way has ended."""
        self._ended += [StepDone(number, 0, 0, 0) for number in self._open]
        self._ended += [Loaded(number, 0) for number in self._loads]
        self._open.clear()
        self._loads.clear()
        self._early = dict.fromkeys(self._early, NO_HIT)
        groups = tuple(self.layout.groups)
        self.board = NameBoard(memoryview(bytearray(1 << 16)))
        self.core = OffloadScheduler(TierSpec("CPU", 4096, 32, groups, UNIT, board=self.board))
        self.core.hello(SESSION, len(self._pool.blocks))
        self.copies = HeldCopies(self.core)
        self.counters["registrations"] += 1

    @property
    def connected(self) -> bool:
        return not self.away

    @property
    def outstanding(self) -> int:
        return len(self._open) + len(self._loads) + len(self._ended)

    @property
    def ended(self) -> bool:
        return bool(self._ended)

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    def recall(self) -> None:
        self.counters["toy_recalls"] += 1

    def step(
        self, offers: Sequence[Offer], finished: Sequence[str] = (), preempted: Sequence[str] = ()
    ) -> int | None:
        if self.away:
            return None
        number = self._next()
        self._open[number] = [promise for offer in offers for promise in self._promises(offer)]
        self._check(self._open[number])
        step = Step(number, list(offers), list(finished), list(preempted))
        self._hear(self.copies.perform(self.core.step(SESSION, step, 0.0)))
        return number

    def post_step(self, makers: Sequence[MakeOffer], finished: Sequence[str]) -> int | None:
        """Sent at once, and made once more at the next poll: a request's buffers only grow."""
        offers = [make() for make in makers]
        self._posted.append((makers, offers))
        return self.step(offers, finished)

    def _promises(self, offer: Offer) -> Iterator[tuple[int, Content]]:
        for place, block_id in enumerate(unpack_int32(offer.block_ids)):
            yield block_id, (offer.group, offer.block_hashes[place * 32 : place * 32 + 32])

    def _check(self, promises: Iterable[tuple[int, Content]]) -> None:
        for block_id, content in promises:
            assert self._pool.content[block_id] == content, f"block {block_id} does not hold what was offered"

    def check_held(self) -> None:
        """Of what is being copied nothing may be given to another request (I9)."""
        for promises in self._open.values():
            for block_id, _ in promises:
                assert self._pool.blocks[block_id].ref_cnt, f"block {block_id} is copied, and free"

    def _hear(self, messages: Iterable[SidecarMessage]) -> None:
        for message in messages:
            if isinstance(message, StepDone):
                self._check(self._open.pop(message.step_id))
                self._ended.append(message)
            elif isinstance(message, Loaded):
                targets = self._loads.pop(message.load_id)
                for block_id, content in targets if message.blocks else ():
                    self._pool.content[block_id] = content
                self._ended.append(message)

    def may_have(self, block_hash: bytes) -> bool:
        return self.away or not self.shows_names or self.board.may_have(block_hash)

    def begin_lookup(
        self, request_id: str, block_hashes: Sequence[bytes], start_tokens: int = 0, *, fine: bool = False
    ) -> int | None:
        if self.away:
            return None
        number = self._next()
        self._early[number] = self.lookup(request_id, block_hashes, start_tokens, fine=fine)
        return number

    def begin_lookups(
        self,
        prompts: Sequence[tuple[str, Sequence[bytes]]],
        start_tokens: int = 0,
        *,
        fine: bool = False,
        post: bool = False,
    ) -> list[int]:
        begun = [self.begin_lookup(request_id, names, start_tokens, fine=fine) for request_id, names in prompts]
        return [number for number in begun if number is not None]

    def end_lookup(self, call_id: int) -> PrefixHit:
        return self._early.pop(call_id)

    def drop_lookup(self, call_id: int) -> None:
        self.release(self._early.pop(call_id))

    def lookup(
        self, request_id: str, block_hashes: Sequence[bytes], start_tokens: int = 0, *, fine: bool = False
    ) -> PrefixHit:
        if self.away:
            return NO_HIT
        self.counters["toy_lookups"] += 1
        call = Lookup(self._next(), request_id, packed_hashes(block_hashes), 10.0, start_tokens, fine)
        hit = self.core.lookup(SESSION, call, 0.0)
        if hit.lease_id is not None:
            self._asked[hit.lease_id] = call
        return PrefixHit(hit.blocks, hit.lease_id)

    def load(self, request_id: str, hit: PrefixHit, block_ids: bytes, units: int | None = None) -> int | None:
        if self.away or hit.lease_id is None:
            return None
        number, call = self._next(), self._asked[hit.lease_id]
        start, end = call.start_tokens, call.start_tokens + (units or 0) * UNIT
        names = [
            (group.index, call.block_hashes[(block - start // UNIT) * 32 :][:32])
            for group in self.layout.groups
            for block in needed_blocks(group, end, start)
        ]
        self._loads[number] = list(zip(unpack_int32(block_ids), names, strict=True))
        for block_id, _ in self._loads[number]:
            self._pool.content[block_id] = None
        commands = self.core.load(SESSION, Load(number, request_id, hit.lease_id, block_ids, units), 0.0)
        self._hear(self.copies.perform(commands))
        return number

    def release(self, hit: PrefixHit) -> None:
        if hit.lease_id is not None and not self.away:
            self.core.release(SESSION, Release(hit.lease_id))

    def poll(self, wait_s: float = 0.0) -> Completions:
        self.counters["toy_polls"] += 1
        if wait_s > 0.1:
            self.counters["toy_long_polls"] += 1
            if not self.sluggish:
                self.end_copies()
        for makers, offers in self._posted:
            assert [make() for make in makers] == offers, "an offer that is made late is another one"
        self._posted.clear()
        ended, self._ended = self._ended, []
        steps = [end for end in ended if isinstance(end, StepDone)]
        return Completions(steps, [end for end in ended if isinstance(end, Loaded)])

    def reset(self, wait_s: float = 1.0) -> int | None:
        if self.away or self.deaf:
            return None
        self._open = {number: [] for number in self._open}  # whatever is copied of it now is of no use
        self._hear(self.copies.perform(self.core.reset(SESSION, Reset(self._next()))))
        return 0

    def end_copy(self, position: int = 0, *, good: bool = True) -> None:
        if self.copies.pending:
            at = position % len(self.copies.pending)
            self._hear(self.copies.complete(at) if good else self.copies.fail(at))

    def end_copies(self) -> None:
        while self.copies.pending:
            self.end_copy()

    def close(self) -> bool:
        return True


class ToyVllm:
    """The engine: `add` requests, `schedule` steps, `run` them in order. `lag`: so many steps late ranks report.

    `client`: a real one, with a layout of these groups, for tests that have a sidecar of their own.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec] = (FULL,),
        *,
        blocks: int = 40,
        lazy: bool = False,
        lag: int = 0,
        client: Any = None,
        batch: int = 1,
        last_steps: bool = False,
        lent: bool = True,
    ) -> None:
        self.groups = groups
        self.lag = lag
        self.clock = ManualClock()
        self.pool = Pool(blocks)
        self.client = ToyClient(groups, self.pool)
        rules = Rules(lazy, 32, 0.5, HitRules(timeout_s=10.0), batch, last_steps, lent)
        self.half = SchedulerHalf(client or self.client, self.pool, rules, key, no_digest, self.clock)
        self.half.batch_steps = batch  # also where it would rather tell at once
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.flights: deque[Running] = deque()
        self.requests: dict[str, Request] = {}
        self.preempted: set[str] = set()
        self.cached: dict[str, int] = {}
        self.loading: dict[str, Request] = {}
        self._deferred: list[tuple[int, list[Block]]] = []
        self._workers: dict[str, list[list[int]]] = {}

    # requests

    def add(self, request_id: str, prompt: Sequence[int], more: int = 1) -> Request:
        request = self.requests[request_id] = Request(request_id, prompt, more)
        self.waiting.append(request)
        self.half.arrive(request)
        return request

    def abort(self, request_id: str) -> None:
        """vLLM keeps the blocks of a request that is being loaded until it has heard of the end."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.half.finish(request, request.ids())
            if not request.loading:
                self._free(request)
            self._unqueue(request)

    def preempt(self, request_id: str, *, asked: bool = True) -> None:
        """Not `asked`: as by a reset of running requests."""
        request = self.requests.get(request_id)
        if request is not None and request in self.running:
            if asked:
                self.half.secure()
            self._free(request)
            request.num_computed_tokens = 0
            self.preempted.add(request_id)
            self._unqueue(request)
            self.waiting.insert(0, request)

    def _unqueue(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def _free(self, request: Request) -> None:
        """Not before the steps that run are over: they may write to these blocks."""
        blocks = [block for table in request.tables for block in reversed(table)]
        request.tables = []
        self._deferred.append((self.flights[-1].number if self.flights else 0, blocks))
        self._free_deferred()

    def _free_deferred(self) -> None:
        first = self.flights[0].number if self.flights else 1 << 60
        due = [blocks for number, blocks in self._deferred if number < first]
        self._deferred = [each for each in self._deferred if each[0] >= first]
        for blocks in due:
            self.pool.free_blocks(blocks)

    # admission

    def _admit(self, request: Request) -> bool:
        """Its own prefix, then the tier's. False: it waits for a load, or for its last outputs."""
        if request.loading or request.num_in_flight_tokens:
            return False
        if request.num_computed_tokens:
            return True
        local = self._local(request)
        found = self.half.find(request, local)
        if found is None:
            return False
        end = local + found
        short = sum(len(needed_blocks(group, end, local)) for group in self.groups)
        if found and len(self.pool.queue) - short - 2 * len(self.groups) < self._idle_hits(request, local):
            return False
        request.tables = [self._prefix(request, group, local, end) for group in self.groups]
        request.num_computed_tokens, request.local = end, local
        self.cached[request.request_id] = end
        if found:
            request.loading = True
            self.loading[request.request_id] = request
            self.half.begin_load(request, request.ids(), found)
        return not found

    def _local(self, request: Request) -> int:
        for tokens in range((request.num_tokens - 1) // UNIT * UNIT, 0, -UNIT):
            if all(self._hits(request, group, tokens) is not None for group in self.groups):
                return tokens
        return 0

    def _hits(self, request: Request, group: GroupSpec, tokens: int) -> list[Block] | None:
        found = [self._cached(request, group, number) for number in needed_blocks(group, tokens)]
        return None if None in found else [block for block in found if block is not None]

    def _cached(self, request: Request, group: GroupSpec, number: int) -> Block | None:
        found = self.pool.get_cached_block(request.block_hashes[number], [group.index])
        return found[0] if found else None

    def _idle_hits(self, request: Request, local: int) -> int:
        hits = [block for group in self.groups for block in self._hits(request, group, local) or ()]
        return sum(not block.ref_cnt for block in hits)

    def _prefix(self, request: Request, group: GroupSpec, local: int, end: int) -> list[Block]:
        null = self.pool.blocks[0]
        table = [null] * (local // group.block_size)
        hits = self._hits(request, group, local) or []
        self.pool.touch(hits)
        table[len(table) - len(hits) :] = hits
        wanted = needed_blocks(group, end, local) if end > local else range(0)
        table += [null] * max(0, wanted.start - len(table))
        return table + [self.pool.allocate() for _ in wanted]

    # steps

    def schedule(self, chunk: int = 16) -> Said:
        """Begin a step with up to `chunk` tokens of every request that there is room for."""
        plain = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        new: list[Any] = []
        parts: list[tuple[Request, int, int]] = []
        fills: list[tuple[int, Content]] = []
        for request in [*self.running, *self.waiting]:
            fresh = request in self.waiting
            if fresh and not self._admit(request):
                continue
            start = request.num_computed_tokens
            stop = min(start + chunk, request.num_tokens)
            if stop > start and self._room(request, stop):
                before = request.ids()
                self._extend(request, start, stop, fills)
                self._tell(request, new, plain, before, start)
                parts.append((request, start, stop))
            elif fresh and not request.local and not start:
                request.tables = []
        said = self.half.begin_step(self._output(new, plain, parts))
        self.pool.overwrite()
        self.client.check_held()
        for request, start, stop in parts:
            request.num_computed_tokens = stop
            request.num_in_flight_tokens += stop - start
        self.preempted.clear()
        self.flights.append(Running(said.step, parts, fills, said))
        return said

    def _tell(self, request: Request, new: list[Any], plain: Any, before: list[list[int]], start: int) -> None:
        """As new, as resumed, or as going on."""
        fresh, ids = request in self.waiting, request.ids()
        if fresh:
            self.waiting.remove(request)
            self.running.append(request)
            self.half.begin_load(request, ids, 0)
        if fresh and not request.known:
            request.known = True
            new.append(SimpleNamespace(req_id=request.request_id, block_ids=ids, num_computed_tokens=start))
            self._workers[request.request_id] = ids
            return
        more = [table[len(old) :] for table, old in zip(ids, before, strict=True)]
        if fresh:
            self._workers[request.request_id] = ids
        else:  # a worker in this process extends the very lists that it was given
            for table, added in zip(self._workers[request.request_id], more, strict=True):
                table += added
        plain.req_ids.append(request.request_id)
        plain.num_computed_tokens.append(start)
        plain.new_block_ids.append(ids if fresh else more if any(more) else None)
        if fresh:
            plain.resumed_req_ids.add(request.request_id)

    def _room(self, request: Request, stop: int) -> bool:
        sizes = [group.block_size for group in self.groups]
        missing = [-(-stop // size) - len(table) for size, table in zip(sizes, request.tables, strict=True)]
        return sum(missing) <= len(self.pool.queue)

    def _extend(self, request: Request, start: int, stop: int, fills: list[tuple[int, Content]]) -> None:
        """More blocks, named at once. What left a window before this step is given up."""
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.block_size
            if group.kind in WINDOWED:
                self._trim(table, first_needed(group, start) // size)
            table += [self.pool.allocate() for _ in range(len(table), -(-stop // size))]
            for number in range(start // size, stop // size):
                name = request.block_hashes[number]
                self.pool.name(table[number], key(name, group.index))
                fills.append((table[number].block_id, (group.index, name)))

    def _trim(self, table: list[Block], stop: int) -> None:
        self.pool.free_blocks(table[:stop])
        table[:stop] = [self.pool.blocks[0]] * len(table[:stop])

    def _output(self, new: Any, plain: Any, parts: list[tuple[Request, int, int]]) -> Any:
        scheduled = {request.request_id: stop - start for request, start, stop in parts}
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=plain,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=set(self.preempted),
            kv_connector_block_state=None,
        )

    def run(self) -> None:
        """The oldest step is computed, and its output comes back."""
        if not self.flights:
            return
        number, parts, fills, said = self.flights.popleft()
        for block_id, content in fills:
            self.pool.content[block_id] = content
        self._free_deferred()
        for request, start, stop in parts:
            request.num_in_flight_tokens -= stop - start
            if request in self.running and stop == request.num_tokens == request.num_computed_tokens:
                request.grow([(sum(request.all_token_ids[-3:]) + 1) % 50])
                if request.num_tokens > request.length:
                    self.abort(request.request_id)
        self.half.land_step(number - self.lag)
        for request_id, end in said.ended.items():
            self._end_load(request_id, failed=end.failed, keep=bool(end.bad_blocks))

    def _end_load(self, request_id: str, *, failed: bool, keep: bool) -> None:
        request = self.loading.pop(request_id)
        request.loading = False
        if request_id not in self.requests:
            self._free(request)
        elif not failed:
            for group, table in zip(self.groups, request.tables, strict=True):
                for number in needed_blocks(group, request.num_computed_tokens, request.local):
                    self.pool.name(table[number], key(request.block_hashes[number], group.index))
                    assert self.pool.content[table[number].block_id] == (group.index, request.block_hashes[number])
        elif keep and request.local:
            request.num_computed_tokens = request.local
        else:
            self._free(request)
            request.num_computed_tokens = 0

    def step(self, chunk: int = 16) -> Said:
        said = self.schedule(chunk)
        self.run()
        return said

    def drain(self) -> None:
        """Everything comes to its end, and nothing is held."""
        for _ in range(400):
            self.client.end_copies()
            self.schedule()
            stuck = len(self.running) > 1 and not self.flights[-1].parts
            while self.flights:
                self.run()
            if stuck and self.running:  # there is no room for any of them: vLLM takes that of the last one
                self.preempt(self.running[-1].request_id)
            self.clock.advance(1.0)
            if not self.requests and not self.half.busy and not self.client.copies.pending:
                break
        assert not self.requests
        self.half.land_step(1 << 60)
        self.step()
        self.client.end_copies()
        self.half.collect()
        assert not any(block.ref_cnt for block in self.pool.blocks)
        assert not self.client.core.stats()["leases"]
        assert not self.half.planner.book.held_blocks
