"""vLLM's side: plays scripts on the real SimpleCPUOffloadScheduler and KVCacheManager of vLLM 0.33, on CPU.

    ORACLE/bin/python vllm_side.py < scripts.jsonl > answers.jsonl

Runs only in the oracle's virtual environment. In: one script (script.py) a line. Out: one line a script, a list of
one answer an operation: the events vLLM announced, and the facts that an engine's adapter would know (hashes, extra
keys, block tables, confirmed tokens). The hooks are called in the order of vLLM's own scheduler.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from models import Group, model_of
from plain import hex64, plain_event, plain_key
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm_config import MAX_TOKENS, PAGE_BYTES, ChunkSplit, make_cache_config, make_config, register_specs

VOCABULARY = 100

Facts = dict[str, Any]
Tables = tuple[list[int], ...]


class Watched(SimpleCPUOffloadScheduler):
    """vLLM's scheduler, unchanged: it also notes which blocks it took from a table that is out of date.

    Its own copy of a request's block table still lists blocks that left the window. Such a block may hold another
    block's hash by now: then `stale` has the (group, hash) that is about to be announced with the wrong tokens.
    """

    stale: list[tuple[int, str]]

    def _select_eager_blocks_to_store(self, state: Any, block_ids_by_group: Any) -> Any:
        before = list(state.num_stored_blocks)
        selected = super()._select_eager_blocks_to_store(state, block_ids_by_group)
        taken = set(selected[0])
        for group, ids in enumerate(block_ids_by_group):
            size, stop = self.group_block_sizes[group], before[group] + selected[1][group]
            for number in range(before[group], min(stop, len(ids))):
                block = self._gpu_block_pool.blocks[ids[number]]
                if ids[number] in taken and block.block_hash is not None:
                    unit = (number + 1) * size // self.hash_block_size - 1
                    right = make_block_hash_with_group_id(state.request.block_hashes[unit], group)
                    if block.block_hash != right:
                        self.stale.append(place_of(block.block_hash))
        return selected


def place_of(key: Any) -> tuple[int, str]:
    return get_group_id(key), hex64(get_block_hash(key))


class Life:
    """One request, and where in its life it is."""

    def __init__(self, op: Facts, hasher: Any) -> None:
        lora = op["lora"]
        self.request = Request(
            request_id=op["request"],
            prompt_token_ids=op["tokens"],
            sampling_params=SamplingParams(max_tokens=MAX_TOKENS),
            pooling_params=None,
            mm_features=[feature(*image) for image in op["images"]] or None,
            lora_request=lora and LoRARequest(lora["name"], lora["id"], lora["path"]),
            cache_salt=op["salt"],
            block_hasher=hasher,
        )
        self.admitted = self.loading = self.unsent = self.void = self.ended = False
        self.started = self.resumed = False
        self.told = 0

    def grown(self, unit: int, sizes: list[int]) -> Facts:
        """What was hashed since this was asked last: unit hashes, tokens, extra keys of ranges of each size."""
        request, old, new = self.request, self.told, len(self.request.block_hashes)
        self.told = new
        return {
            "hashes": [block_hash.hex() for block_hash in request.block_hashes[old:new]],
            "tokens": list(request.all_token_ids[old * unit : new * unit]),
            "extra_keys": {
                size: [self._extra_keys(size, number) for number in range(old * unit // size, new * unit // size)]
                for size in sizes
            },
        }

    def _extra_keys(self, size: int, number: int) -> Any:
        keys, _ = generate_block_hash_extra_keys(self.request, number * size, (number + 1) * size, 0)
        event_keys = to_event_extra_keys([keys])
        return plain_key(event_keys and event_keys[0])


def feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


class Engine:
    """A vLLM engine core without a model: every method named after an operation plays it and returns its facts."""

    def __init__(self, script: Facts) -> None:
        self.model = model = model_of(script["model"])
        self.ranks = script["ranks"]
        config = make_cache_config(model, script["gpu_blocks"])
        self.offload = Watched(
            vllm_config=make_config(model, self.ranks),
            kv_cache_config=config,
            cpu_capacity_bytes=PAGE_BYTES * (script["cpu_blocks"] + 1),  # vLLM's block 0 holds nothing
            scheduler_block_size=model.alignment,
            hash_block_size=model.hash_size,
            lazy_offload=script["lazy"],
        )
        self.offload.stale = []
        self.cache = KVCacheManager(config, MAX_TOKENS, model.alignment, model.hash_size, dcp_world_size=model.dcp)
        self.gpu = self.cache.block_pool
        self.offload.bind_gpu_block_pool(self.gpu)
        self.split = ChunkSplit(model, partial=self.cache.coordinator.enable_partial_hash_hits)
        self.hasher = get_request_block_hasher(model.hash_size, sha256)
        self.lives: dict[str, Life] = {}
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.store_events: list[int] = []
        self.reports: dict[int, int] = {}
        self.new_blocks: dict[str, Tables] = {}

    def play(self, op: Facts) -> Facts:
        facts = getattr(self, op["op"])(op)
        events = [plain_event(event) for event in self.offload.take_events()]
        return {"facts": facts, "events": events}

    def running(self, name: str) -> Life | None:
        life = self.lives.get(name)
        return life if life is not None and life.admitted and not life.loading and not life.ended else None

    # operations

    def add(self, op: Facts) -> Facts | None:
        old = self.lives.get(op["request"])
        if old is not None and (not old.ended or old.loading):
            return None
        life = self.lives[op["request"]] = Life(op, self.hasher)
        return {"grown": self._grown(life)}

    def lookup(self, op: Facts) -> Facts | None:
        life = self.lives.get(op["request"])
        if life is None or life.admitted or life.loading or life.ended:
            return None
        _, local, hit = self._look_up(life.request)
        return {"local": local, "hit": hit, "tokens": life.request.num_tokens}

    def _look_up(self, request: Request) -> tuple[Any, int, int]:
        blocks, local, _ = self.cache.get_computed_blocks(request)
        hit, _ = self.offload.get_num_new_matched_tokens(request, local)
        return blocks, local, hit or 0

    def admit(self, op: Facts) -> Facts | None:
        life = self.lives.get(op["request"])
        if life is None or life.admitted or life.loading or life.ended:
            return None
        blocks, local, hit = self._look_up(life.request)
        step = self.model.hash_size if self.cache.coordinator.enable_partial_hash_hits else self.model.alignment
        accepted = hit if op["accept"] is None else min(hit, op["accept"] // step * step)
        facts = {"local": local, "hit": hit, "tokens": life.request.num_tokens, "accepted": accepted}
        if (local or accepted) and not self._allocate(life.request, blocks, local, accepted):
            return {**facts, "accepted": None}
        self._start(life, local, accepted)
        load = self.offload._reqs_to_load.get(op["request"]) if accepted else None
        copied = load.transfer_meta.gpu_block_ids if load is not None else []
        return {**facts, "tables": self._tables(life), "copied": copied}

    def _allocate(self, request: Request, blocks: Any, local: int, external: int) -> bool:
        taken = self.cache.allocate_slots(
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=bool(external),
        )
        return taken is not None

    def _start(self, life: Life, local: int, external: int) -> None:
        request = life.request
        self.offload.update_state_after_alloc(request, self.cache.get_blocks(request.request_id), external)
        request.num_computed_tokens = local + external
        life.admitted = True
        life.loading = life.unsent = bool(external)
        life.void = False

    def step(self, op: Facts) -> Facts:
        self.cache.new_step_starts()
        counts = {name: taken for name, count in op["schedule"].items() if (taken := self._schedule(name, count))}
        gone = {name for name in self.preempted if name in self.lives}
        self.offload.stale = []
        boundaries = self.cache.take_boundary_state_offloads()
        _, retained = self.cache.take_kv_cache_block_copies()
        meta = self.offload.build_connector_meta(self._output(counts, gone, boundaries))
        for life in self.lives.values():
            life.unsent = False
        self.store_events.append(meta.store_event)
        facts = {
            "scheduled": [{**self._confirmed(name), "new": self._is_new(name)} for name in counts],
            "preempted": sorted(self.preempted),
            "finished": sorted(self.finished),
            "stored": [self._gpu_place(block) for block in meta.store_gpu_blocks],
            "stale": self.offload.stale,
            "unready": self._unready(meta.store_gpu_blocks),
            "boundaries": [
                self._boundary(name, *entry, taken=meta.store_gpu_blocks)
                for name, entries in boundaries.items()
                for entry in entries
            ],
            "near_eviction": self._near_eviction(meta.store_gpu_blocks),
        }
        self.preempted, self.finished = set(), set()
        facts["grown"] = dict(self._compute(counts))
        self.gpu.free_blocks(retained)
        return facts

    def _boundary(self, name: str, group: int, block: int, tokens: int, *, taken: list[int]) -> Facts:
        """A state that is handed over, and whether vLLM had no room for it."""
        life, key = self.lives.get(name), self.gpu.blocks[block].block_hash
        known = life is not None and key is not None and place_of(key)[1] == self._hash_at(life, tokens)
        state = self.offload._reqs_to_store.get(name)
        tracked = state is not None and life is not None and state.request is life.request
        full = not self.offload.cpu_block_pool.get_num_free_blocks()
        place = place_of(key) if known else None
        return {
            "request": name, "group": group, "block": block, "tokens": tokens, "hash": place and place[1],
            "tracked": tracked, "no_room": tracked and full and block not in taken,
        }  # fmt: skip

    def _near_eviction(self, chosen: list[int]) -> Facts | None:
        """Lazy: what vLLM chose, and every hashed block, for an engine that knows its own cache."""
        if not self.offload._lazy_mode or not chosen:
            return None
        hashed = [block for block in self.gpu.blocks if block.block_hash is not None]
        return {
            "chosen": [[*self._gpu_place(block), block] for block in chosen],
            "inner": {block: self._lazy_inner(block) for block in chosen},
            "cached": [[*place_of(block.block_hash), block.block_id] for block in hashed],
        }

    def _lazy_inner(self, block: int) -> list[str]:
        return [place_of(key)[1] for key in self.gpu.cached_block_hashes_by_block.get(block, ())]

    def _schedule(self, name: str, count: int) -> int:
        life = self.running(name)
        if life is None or count <= 0:
            return 0
        request = life.request
        count = self.split.tokens(request, min(count, request.num_tokens - request.num_computed_tokens))
        taken = self.cache.allocate_slots(request, count) if count > 0 else None
        if taken is None:
            return 0
        self.new_blocks[name] = taken.get_block_ids()
        if self._is_new(name):
            self.offload.update_state_after_alloc(request, self.cache.get_blocks(name), 0)
            self.new_blocks[name] = self.cache.get_block_ids(name)
        return count

    def _is_new(self, name: str) -> bool:
        return not self.lives[name].started or self.lives[name].resumed

    def _output(self, counts: dict[str, int], preempted: set[str], boundaries: Any) -> SchedulerOutput:
        lives = {name: self.lives[name] for name in counts}
        new = [new_data(name, self.new_blocks[name]) for name, life in lives.items() if not life.started]
        cached = [name for name, life in lives.items() if life.started]
        resumed = {name for name in cached if lives[name].resumed}
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached,
                resumed_req_ids=resumed,
                new_token_ids=[[] for _ in cached],
                all_token_ids={},
                new_block_ids=[self.new_blocks[name] for name in cached],
                num_computed_tokens=[lives[name].request.num_computed_tokens for name in cached],
                num_output_tokens=[0] * len(cached),
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            preempted_req_ids=preempted,
            finished_req_ids=set(self.finished),
            free_encoder_mm_hashes=[],
            kv_connector_block_state=KVConnectorBlockState(
                req_ids={*counts, *boundaries},
                resolve_block_ids=self.cache.get_block_ids,
                boundary_state_offloads=boundaries,
            ),
        )

    def _confirmed(self, name: str) -> Facts:
        """What of a request is ready to be stored, as an adapter sees it, and what vLLM made of that."""
        life = self.lives[name]
        state = self.offload._reqs_to_store.get(name)
        tracked = state is not None and not state.finished and state.request is life.request
        facts: Facts = {"request": name, "tracked": tracked, "no_room": [], "ready": {}, "blocks": {}}
        for group in self.model.stored:
            ready = self._ready(life, group)
            facts["ready"][group.index] = ready
            facts["blocks"][group.index] = list(self._hashed(life, group, ready))
            if tracked and self._is_positional(group):
                places = facts["blocks"][group.index]
                behind = state.num_stored_blocks[group.index]
                facts["no_room"] += [self._place(life, group, place[0]) for place in places if place[0] >= behind]
        return facts

    def _is_positional(self, group: Group) -> bool:
        return bool(self.cache.coordinator.single_type_managers[group.index].has_positionally_stable_blocks)

    def _ready(self, life: Life, group: Group) -> int:
        """How many blocks of the table have been computed and may be hit."""
        if not self._is_positional(group):
            return 0
        cacheable = self.offload.cpu_coordinator.get_num_cacheable_tokens(
            life.request.num_computed_tokens, group.index
        )
        return min(len(self._tables(life)[group.index]), cacheable // group.block_size)

    def _hashed(self, life: Life, group: Group, ready: int) -> Iterator[tuple[int, int, bool, list[int]]]:
        """Number, block id, if it was found by its hash because the table has it no more, and its inner names."""
        hashes = BlockHashListWithBlockSize(life.request.block_hashes, self.model.hash_size, group.block_size)
        for number, block_id in enumerate(self._tables(life)[group.index][:ready]):
            block, lost = self.gpu.blocks[block_id], False
            if block.is_null:
                found = self.gpu.get_cached_block(hashes[number], [group.index])
                lost = bool(found) and found[0].block_id not in self._being_computed(group)
                block = found[0] if lost else block
            if block.block_hash == make_block_hash_with_group_id(hashes[number], group.index):
                yield number, block.block_id, lost, self._inner(life, group, number, block.block_id)

    def _inner(self, life: Life, group: Group, number: int, block: int) -> list[int]:
        """After how many units of a block a prefix may end, as the engine's own cache has it."""
        units, names = group.block_size // self.model.hash_size, life.request.block_hashes
        registered = self.gpu.cached_block_hashes_by_block.get(block, ())
        inside = names[number * units : (number + 1) * units - 1]
        keys = [make_block_hash_with_group_id(name, group.index) for name in inside]
        return [count for count, key in enumerate(keys, 1) if key in registered]

    def _tail(self, life: Life) -> Facts | None:
        """The prompt's last block of full attention, if it is registered under a prefix that ends inside it."""
        if not self.cache.coordinator.enable_partial_hash_hits or self.offload._lazy_mode:
            return None
        request, group = life.request, self.model.groups[self.offload.fa_gidx]
        tokens = request.num_prompt_tokens // self.model.hash_size * self.model.hash_size
        number, table = tokens // group.block_size, self._tables(life)[group.index]
        inside = tokens % group.block_size and tokens <= request.num_computed_tokens
        if not inside or number >= len(table):
            return None
        name = request.block_hashes[tokens // self.model.hash_size - 1]
        key, block = make_block_hash_with_group_id(name, group.index), self.gpu.blocks[table[number]]
        known = key == block.block_hash or key in self.gpu.cached_block_hashes_by_block.get(block.block_id, ())
        place = {"group": group.index, "block": block.block_id, "tokens": tokens}
        if not known:
            return None
        return {**place, "hash": self._hash_at(life, tokens), "first": place_of(block.block_hash)}

    def _being_computed(self, group: Group) -> set[int]:
        """Blocks that have their hash already, and their bytes only when the running step is over."""
        running = [life for name, life in self.lives.items() if self.running(name) is life]
        return {
            block
            for life in running
            for block in self._tables(life)[group.index][life.request.num_computed_tokens // group.block_size :]
        }

    def _unready(self, taken: list[int]) -> list[tuple[int, str]]:
        """Blocks of the running step among those that vLLM stores in it; states are handed over on purpose."""
        running = {
            block
            for group in self.model.stored
            if self._is_positional(group)
            for block in self._being_computed(group)
        }
        return [self._gpu_place(block) for block in taken if block in running]

    def _place(self, life: Life, group: Group, number: int) -> tuple[int, str]:
        return group.index, self._hash_at(life, (number + 1) * group.block_size)

    def _hash_at(self, life: Life, tokens: int) -> str:
        return hex64(life.request.block_hashes[tokens // self.model.hash_size - 1])

    def _compute(self, counts: dict[str, int]) -> Iterator[tuple[str, Facts]]:
        """The step's forward pass: tokens are computed, and a request at its end gets as many new ones."""
        for name, count in counts.items():
            life = self.lives[name]
            request = life.request
            life.started, life.resumed = True, False
            request.num_computed_tokens = min(request.num_tokens, request.num_computed_tokens + count)
            if request.num_computed_tokens == request.num_tokens:
                first, seen = request.all_token_ids[0], request.num_tokens
                fresh = [(first + 7 * (seen + i)) % VOCABULARY for i in range(max(1, min(count, 6)))]
                request.append_output_token_ids(fresh)
            yield name, self._grown(life)

    def _grown(self, life: Life) -> Facts:
        return life.grown(self.model.hash_size, self.model.sizes)

    def stored(self, op: Facts) -> Facts | None:
        """The store of the n-th step has been copied by every rank that has not reported it."""
        return self._report(op["step"], self.ranks)

    def reported(self, op: Facts) -> Facts | None:
        """One more rank has copied it."""
        return self._report(op["step"], 1)

    def _report(self, step: int, most: int) -> Facts | None:
        event = self.store_events[step] if step < len(self.store_events) else -1
        seen = self.reports.get(event, 0)
        count = min(most, self.ranks - seen)
        if event < 0 or not count:
            return None
        self.reports[event] = seen + count
        meta = SimpleCPUOffloadWorkerMetadata(completed_store_events={event: count})
        self.offload.update_connector_output(
            KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=meta)
        )
        return {"ended": seen + count == self.ranks}

    def loaded(self, op: Facts) -> Facts | None:
        life = self.lives.get(op["request"])
        if life is None or not life.loading or (life.unsent and not life.void):
            return None
        name, request = op["request"], life.request
        self.offload.update_connector_output(KVConnectorOutput(finished_recving={name}))
        life.loading = False
        if life.ended:
            self.cache.free(request)
        elif life.void:
            self._requeue(life)
        else:
            self.cache.cache_blocks(request, request.num_computed_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return {"void": life.void}

    def preempt(self, op: Facts) -> Facts | None:
        life = self.running(op["request"])
        if life is None:
            return None
        self._requeue(life)
        self.preempted.add(op["request"])
        return {}

    def _requeue(self, life: Life) -> None:
        self.cache.free(life.request)
        life.request.num_computed_tokens = 0
        life.resumed = life.started
        life.admitted = False

    def finish(self, op: Facts) -> Facts | None:
        life = self.lives.get(op["request"])
        if life is None or life.ended:
            return None
        name, request = op["request"], life.request
        tracked = self._confirmed(name)["tracked"]
        self.cache.finalize_partial_tail_offloads(request)
        self.cache.remove_skipped_blocks(name, request.num_computed_tokens, request.num_prompt_tokens)
        facts = {**self._confirmed(name), "tracked": tracked, "tail": self._tail(life)}
        ids = self.cache.get_block_ids_for_computed_tokens(name, request.num_computed_tokens)
        queued = len(self.offload._pending_finished_stores)
        self.offload.stale = []
        self.offload.request_finished_all_groups(request, ids)
        flushed = self.offload._pending_finished_stores[queued:]
        facts["flushed"] = [self._gpu_place(block) for t in flushed for block in t.gpu_block_ids]
        facts["stale"] = self.offload.stale
        full = tracked and not self.offload.cpu_block_pool.get_num_free_blocks()
        tail = [(facts["tail"]["group"], facts["tail"]["hash"])] if facts["tail"] else []
        facts["no_room"] = [*self._all_places(life, facts["blocks"]), *tail] if full else []
        life.ended = True
        self.finished.add(name)
        if not life.loading:
            self.cache.free(request)
        return facts

    def _all_places(self, life: Life, blocks: Facts) -> list[tuple[int, str]]:
        groups = self.model.groups
        return [self._place(life, groups[index], place[0]) for index in blocks for place in blocks[index]]

    def abort(self, op: Facts) -> Facts | None:
        return self.finish(op)

    def forget(self, op: Facts) -> Facts:
        """Other requests come and go: what no request holds leaves the engine's own prefix cache."""
        self.gpu.evict_blocks({block.block_id for block in self.gpu.blocks if not block.ref_cnt})
        return {}

    def reset(self, op: Facts) -> Facts:
        if op["running"]:
            for name in list(self.lives):
                self.preempt({"request": name})
        self.cache.reset_prefix_cache()
        for life in self.lives.values():
            life.void = life.void or life.loading
        return {"cleared": self.offload.reset()}

    # facts

    def _tables(self, life: Life) -> Tables:
        tables: Tables = self.cache.get_block_ids(life.request.request_id)
        return tables if any(tables) else tuple([] for _ in self.model.groups)

    def _gpu_place(self, block: int) -> tuple[int, str]:
        return place_of(self.gpu.blocks[block].block_hash)


def new_data(name: str, block_ids: Tables) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=None,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=0,
        lora_request=None,
    )


def answer(script: Facts) -> list[Facts]:
    """One answer an operation; the last one says so if vLLM raised."""
    engine, answers = Engine(script), []
    for op in script["ops"]:
        try:
            answers.append(engine.play(op))
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is an answer
            answers.append({"raised": f"{type(error).__name__}: {error}"})
            break
    return answers


def main() -> None:
    init_none_hash(sha256)
    register_specs()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line)), separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
