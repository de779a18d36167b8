"""Hits of the sidecar on their way into vLLM's blocks.

    (ask_early ->) find -> begin -> (settle | expire) -> take_ended

vLLM lets a request wait from `begin` until `take_ended` names it: every `begin` ends, in bounded time. A request
whose load failed is computed: it does not ask again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.engine.client import NO_HIT, OffloadClient, PrefixHit
from kvevents_service.engine.vllm_pool import EnginePool
from kvevents_service.engine.vllm_request import VllmRequest
from kvevents_service.wire.control import GroupSpec, Loaded
from kvevents_service.wire.packing import pack_int32

MISS_S = 0.1
"""How long a miss holds: a request that waits for room is not looked up in every step."""
LOADING_FRACTION = 0.4
"""Of the engine's blocks: when loads hold so many, other hits wait. Should the sidecar hang, the rest is left."""
MAX_ASKED = 64
"""So many requests are looked up before it is their turn; others when it is."""


class Asked(NamedTuple):
    """A lookup of the prompt's units [0, stop) that is under way: sent when the request arrived."""

    call_id: int
    stop: int
    until: float


class Found(NamedTuple):
    """What was found of the prompt's units [first, stop). It holds until its lease is half over."""

    hit: PrefixHit
    first: int
    stop: int
    until: float


class Loading(NamedTuple):
    """A load under way. `void`: whatever it brings, it is of no use. `gone`: its request has ended."""

    request_id: str
    units: int
    block_ids: Sequence[int]
    deadline: float
    void: bool = False
    gone: bool = False


class LoadEnd(NamedTuple):
    """`bad_blocks`: nothing was loaded into them, and nothing will be. Failed and none: ask for other blocks."""

    failed: bool = False
    bad_blocks: tuple[int, ...] = ()


NOTHING: dict[str, LoadEnd] = {}
"""Of a step in which no load ended: not to be changed."""


class HitRules(NamedTuple):
    """fine: hits may end inside a block. margin_tokens: what the engine wants to compute of every hit again."""

    fine: bool = False
    margin_tokens: int = 0
    timeout_s: float = 10.0


class Loads:
    """All hits and loads of one engine, which schedules up to `step_tokens` in a step.

    `is_lent`: one of these blocks is being copied for a request that had it before. No load is begun into it.
    """

    def __init__(
        self,
        client: OffloadClient,
        groups: Sequence[GroupSpec],
        hash_tokens: int,
        pool: EnginePool,
        rules: HitRules,
        step_tokens: int,
        clock: Callable[[], float],
        is_lent: Callable[[Iterable[int]], bool] = lambda _: False,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._held_blocks = 0
        self._most_blocks = len(pool) * LOADING_FRACTION
        self._client = client
        self._groups = [group for group in groups if group.cacheable]
        self._one_group = len(groups) == 1
        self._unit = hash_tokens
        self._align = alignment(groups)
        self._pool = pool
        self._rules = rules
        self._clock = clock
        self._is_lent = is_lent
        self._prefix_only = all(group.kind in PREFIX_KINDS for group in self._groups)
        sizes = [group.block_size for group in self._groups if group.kind in PREFIX_KINDS]
        self._first_units = sizes[0] // hash_tokens if sizes and not rules.fine else 0
        self._step_tokens = step_tokens
        self._ahead_tokens = 0
        self.arrived: dict[str, VllmRequest] = {}
        self._asked: dict[str, Asked] = {}
        self._found: dict[str, Found] = {}
        self.loading: dict[int, Loading] = {}
        self.late: dict[int, Loading] = {}
        self.ended: dict[str, LoadEnd] = {}
        self._missed: set[str] = set()
        self._spared: set[str] = set()

    def __repr__(self) -> str:
        counts = f"found={len(self._found)} loading={len(self.loading)} late={len(self.late)}"
        return f"<Loads {counts} held={self._held_blocks}>"

    @property
    def under_way(self) -> bool:
        """The sidecar owes us the end of a load."""
        return bool(self.loading or self.late)

    # hits

    def ask_early(self, request: VllmRequest) -> None:
        """It has arrived: by the time that it is its turn the answer is here.

        Those behind a whole step's tokens are asked for with the step, all at once: each message wakes the sidecar.
        """
        request_id, named, units = request.request_id, request.block_hashes, self._first_units
        if len(self._asked) + len(self.arrived) >= MAX_ASKED or request_id in self._asked:
            return
        if 0 < units <= len(named) and not self._client.may_have(named[units - 1]):
            return  # as in `find`
        self.arrived[request_id] = request
        if self._ahead_tokens < self._step_tokens:
            self._ask_arrived()
        self._ahead_tokens += request.num_tokens

    def ask_more(self) -> None:
        """A step begins: ask for those that have `arrived` and were not asked for."""
        self._ahead_tokens = 0
        if self.arrived:
            self._ask_arrived(post=True)

    def _ask_arrived(self, *, post: bool = False) -> None:
        stops = {name: (each.num_tokens - 1) // self._unit for name, each in self.arrived.items()}
        prompts = [(name, each.block_hashes[: stops[name]]) for name, each in self.arrived.items() if stops[name]]
        self.arrived.clear()
        begun = self._client.begin_lookups(prompts, fine=self._rules.fine, post=post) if prompts else []
        until = self._clock() + self._client.timeouts.lease_s / 2
        for (name, _), call_id in zip(prompts, begun, strict=False):  # none if the sidecar is away
            self._asked[name] = Asked(call_id, stops[name], until)

    def find(self, request: VllmRequest, local_tokens: int) -> int | None:
        """Tokens that can be loaded of a prompt that is in the engine up to `local_tokens`. They stay pinned.

        None: other loads must end first. Nothing while one is late: a sidecar that does not end its loads must not
        get hold of ever more blocks. Nobody is asked if the block that a hit would begin with is not on the board:
        that is what most requests come to, so it is looked at first, with as few calls as can be.
        """
        first, named, units = local_tokens // self._unit, request.block_hashes, self._first_units
        if 0 < units <= len(named) - first and not self._client.may_have(named[first + units - 1]):
            return self._spare(request.request_id)
        stop = (request.num_tokens - 1) // self._unit
        if local_tokens % self._align or stop <= first or request.request_id in self._missed or self.late:
            self.release(request.request_id)
            return 0
        found = self._found.get(request.request_id)
        if found is None or found[1:3] != (first, stop) or self._clock() > found.until:
            found = self._ask(request, first, stop)
        if not found.hit.blocks:
            return 0
        units = self._usable(found)
        return None if units and self._held_blocks >= self._most_blocks else units * self._unit

    def _spare(self, request_id: str) -> int:
        """Nothing. It is counted once a request, which may be looked at in every step."""
        if request_id not in self._spared:
            self._spared.add(request_id)
            self.counters["lookups_spared"] += 1
        if self.arrived or self._asked or self._found:
            self.release(request_id)
        return 0

    def _ask(self, request: VllmRequest, first: int, stop: int) -> Found:
        hit = self._early(request.request_id, first, stop)
        if request.request_id in self._found:
            self.release(request.request_id)
        if hit is None:
            names = request.block_hashes[first:stop]
            hit = self._client.lookup(request.request_id, names, first * self._unit, fine=self._rules.fine)
        holds_s = self._client.timeouts.lease_s / 2 if hit.blocks else MISS_S
        found = self._found[request.request_id] = Found(hit, first, stop, self._clock() + holds_s)
        return found

    def _early(self, request_id: str, first: int, stop: int) -> PrefixHit | None:
        """What the early lookup says of a prompt that the engine has `first` units of; None if it does not."""
        if request_id in self.arrived:
            self._ask_arrived()
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        if asked.stop != stop or self._clock() > asked.until or (first and not self._prefix_only):
            self._client.drop_lookup(asked.call_id)
            return None
        hit = self._client.end_lookup(asked.call_id)
        if not first:
            return hit
        self._client.release(hit)
        return None if hit.blocks > first else NO_HIT

    def _usable(self, found: Found) -> int:
        """Hash units. More than was asked for, or a part of a block, is not taken, whatever the sidecar says."""
        units = min(found.hit.blocks, found.stop - found.first) - self._rules.margin_tokens // self._unit
        return max(0, units if self._rules.fine else units - units % (self._align // self._unit))

    def release(self, request_id: str) -> None:
        """It will not load what it found, or may find."""
        self.arrived.pop(request_id, None)
        asked, found = self._asked.pop(request_id, None), self._found.pop(request_id, None)
        if asked is not None:
            self._client.drop_lookup(asked.call_id)
        if found is not None and found.hit.blocks:
            self._client.release(found.hit)

    # loads

    def begin(self, request_id: str, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Load the first `tokens` of what it found into these blocks, which are held until the load has ended."""
        found, units = self._found.pop(request_id, None), tokens // self._unit
        load_id = None
        if found is not None and found.hit.blocks:
            block_ids = self._targets(tables, found.first * self._unit, tokens)
            if self._is_lent(block_ids):
                self._client.release(found.hit)
            else:
                load_id = self._client.load(request_id, found.hit, pack_int32(block_ids), units)
        if load_id is None or found is None:
            self._fail(Loading(request_id, units, (), 0.0), LoadEnd(failed=True))
            return
        self._pool.touch(block_ids)
        self._held_blocks += len(block_ids)
        deadline = self._clock() + self._rules.timeout_s
        self.loading[load_id] = Loading(request_id, units, block_ids, deadline)
        self.counters["loads"] += 1

    def _targets(self, tables: Sequence[Sequence[int]], start: int, tokens: int) -> list[int]:
        """The blocks that the prefix needs behind its local part, group after group."""
        blocks: list[int] = []
        for group in self._groups:
            numbers = needed_blocks(group, start + tokens, start)
            blocks += tables[group.index][numbers.start : numbers.stop]
        return blocks

    def settle(self, loaded: Iterable[Loaded]) -> None:
        """Loads have ended."""
        for end in loaded:
            late = self.late.pop(end.load_id, None)
            loading = late or self.loading.pop(end.load_id, None)
            if loading is None:
                continue
            self._pool.free(loading.block_ids[::-1])
            self._held_blocks -= len(loading.block_ids)
            if late is None:
                self._report(loading, end.blocks)

    def _report(self, loading: Loading, units: int) -> None:
        if units == loading.units and not loading.void:
            self.counters["loaded_tokens"] += units * self._unit
            self.ended[loading.request_id] = LoadEnd()
        else:
            self._fail(loading, LoadEnd(True, tuple(loading.block_ids) if self._one_group else ()))

    def expire(self) -> None:
        """Whoever waits too long is computed, in other blocks: these are held until its load has ended."""
        now = self._clock() if self.loading else 0.0
        for load_id, loading in list(self.loading.items()):
            if now > loading.deadline:
                self.counters["loads_late"] += 1
                self.late[load_id] = self.loading.pop(load_id)
                self._fail(loading, LoadEnd(failed=True))

    def _fail(self, loading: Loading, end: LoadEnd) -> None:
        self.counters["loads_failed"] += 1
        self.ended[loading.request_id] = end
        if not loading.gone:
            self._missed.add(loading.request_id)

    def take_ended(self) -> dict[str, LoadEnd]:
        """What has ended since the last time, by request."""
        if not self.ended:
            return NOTHING
        ended, self.ended = self.ended, {}
        return ended

    # the ends of requests, and of everything

    def forget(self, request_id: str) -> None:
        """The request has ended. A load of it goes on, and ends as ever."""
        if self.arrived or self._asked or self._found:
            self.release(request_id)
        self._missed.discard(request_id)
        self._spared.discard(request_id)
        for load_id, loading in self.loading.items():
            if loading.request_id == request_id:
                self.loading[load_id] = loading._replace(gone=True)

    def reset(self) -> None:
        """What is stored is void, and so is what is being loaded."""
        self.arrived.clear()
        for request_id in [*self._found, *self._asked]:
            self.release(request_id)
        self.loading = {number: loading._replace(void=True) for number, loading in self.loading.items()}
