"""How the reference engine admits a request: its own cache's prefix, then the sidecar's, loaded and verified."""

from __future__ import annotations

from kvevents_service.core.groups import PREFIX_KINDS, alignment, needed_blocks
from kvevents_service.engine.block_tables import GroupTable, content_names
from kvevents_service.engine.client import OffloadClient, PrefixHit
from kvevents_service.engine.model import Model
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.request import EngineCounts, Request
from kvevents_service.wire.control import Loaded
from kvevents_service.wire.packing import pack_int32


class Admission:
    """`loading` holds requests that wait for their hit, by load id."""

    def __init__(self, cache: PagedCache, client: OffloadClient, model: Model, counts: EngineCounts) -> None:
        self.cache = cache
        self.client = client
        self.model = model
        self.counts = counts
        self.loading: dict[int, Request] = {}

    def __repr__(self) -> str:
        return f"<Admission loading={len(self.loading)}>"

    def admit(self, request: Request, headroom: int) -> bool:
        """Give it the blocks of its prefix; a load may have begun then. False: no room, and it has none."""
        unit = self.model.hash_tokens
        units = (request.prompt_length - 1) // unit  # one token is left to compute
        local = self._use_local_prefix(request, units * unit)
        hit = self.client.lookup(request.request_id, request.hashes[local // unit : units], local)
        end = local + hit.blocks * unit
        wanted = sum(len(needed_blocks(group, end, local)) for group in self.model.groups)
        if not self.cache.can_allocate(max(wanted, 1) + headroom):
            self.client.release(hit)
            self.cache.free(request.held())
            request.reset()
            return False
        request.computed = local
        self.counts.local_hit_tokens += local
        if hit.blocks:
            self._load(request, local, hit, end)
        return True

    # the engine's own prefix cache

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
        return content_names(table.group, table.spans.hashes(request.hashes, numbers.start, numbers.stop))

    # loads

    def _load(self, request: Request, local: int, hit: PrefixHit, end: int) -> None:
        """Begin to bring a hit in; nothing happens if the sidecar went away meanwhile."""
        needed = [needed_blocks(table.group, end, local) for table in request.tables]
        fresh = [self.cache.allocate(len(numbers)) for numbers in needed]
        blocks = [block for group in fresh for block in group]
        load_id = self.client.load(request.request_id, hit, pack_int32(blocks), hit.blocks)
        if load_id is None:
            self.cache.free(blocks)
            return
        for table, numbers, group in zip(request.tables, needed, fresh, strict=True):
            table.blocks += [None] * (numbers.start - len(table.blocks))
            table.blocks += group
        request.hit, request.hit_start = hit, local
        self.loading[load_id] = request

    def end_load(self, loaded: Loaded) -> tuple[Request, bool]:
        """Whose load has ended; False: it is a miss after all, and the request has no blocks."""
        request = self.loading.pop(loaded.load_id)
        end = request.hit_start + request.hit.blocks * self.model.hash_tokens
        if loaded.blocks != request.hit.blocks:
            self.counts.loads_failed += 1
            self.cache.free(request.held())
            request.reset()
            return request, False
        for table in request.tables:
            self._verify_load(request, table, needed_blocks(table.group, end, request.hit_start))
        self.counts.hit_tokens += end - request.hit_start
        request.computed = end
        return request, True

    def _verify_load(self, request: Request, table: GroupTable, numbers: range) -> None:
        contents = table.contents(request.view, numbers)
        loaded_bytes = len(contents.blocks) * self.cache.block_bytes
        self.counts.corrupt_blocks += self.cache.corrupt(contents.blocks, contents.names)
        self.counts.bytes_verified += loaded_bytes
        self.counts.bytes_moved += loaded_bytes
        self.cache.cache(*contents)
