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
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
from plain import hex64, plain_event, plain_key
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

MAX_TOKENS = 4096
HEAD_BYTES = 16 * 2 * 2  # one head of 16 float16, keys and values
VOCABULARY = 100

Facts = dict[str, Any]


def make_config(block_size: int) -> VllmConfig:
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=block_size, gpu_memory_utilization=0.9, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
        device_config=DeviceConfig("cpu"),
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    config.model_config = SimpleNamespace(max_model_len=MAX_TOKENS)  # all that the scheduler reads of a model
    return config


def make_cache_config(block_size: int, blocks: int) -> KVCacheConfig:
    block_bytes = block_size * HEAD_BYTES
    size = block_bytes * blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float16)
    tensor = KVCacheTensor(size=size, layers=["l0"], layer_stride=size, block_stride=block_bytes)
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]
    )


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
        self.told = self.mm_index = 0

    def grown(self, block_size: int) -> Facts:
        """Blocks that were hashed since this was asked last: hash, tokens and event extra keys of each."""
        news: Facts = {"hashes": [], "tokens": [], "extra_keys": []}
        request = self.request
        for index in range(self.told, len(request.block_hashes)):
            start, stop = index * block_size, (index + 1) * block_size
            keys, self.mm_index = generate_block_hash_extra_keys(request, start, stop, self.mm_index)
            event_keys = to_event_extra_keys([keys])
            news["hashes"].append(request.block_hashes[index].hex())
            news["tokens"] += request.all_token_ids[start:stop]
            news["extra_keys"].append(plain_key(event_keys and event_keys[0]))
        self.told = len(request.block_hashes)
        return news


def feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


class Engine:
    """A vLLM engine core without a model: every method named after an operation plays it and returns its facts."""

    def __init__(self, script: Facts) -> None:
        self.block_size = size = script["block_size"]
        config = make_cache_config(size, script["gpu_blocks"])
        self.offload = SimpleCPUOffloadScheduler(
            vllm_config=make_config(size),
            kv_cache_config=config,
            cpu_capacity_bytes=size * HEAD_BYTES * (script["cpu_blocks"] + 1),  # vLLM's block 0 holds nothing
            scheduler_block_size=size,
            hash_block_size=size,
        )
        self.cache = KVCacheManager(config, MAX_TOKENS, size, size)
        self.gpu = self.cache.block_pool
        self.offload.bind_gpu_block_pool(self.gpu)
        self.hasher = get_request_block_hasher(size, sha256)
        self.lives: dict[str, Life] = {}
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.store_events: list[int] = []
        self.new_blocks: dict[str, list[int]] = {}

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
        return {"grown": life.grown(self.block_size)}

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
        accepted = hit if op["accept"] is None else min(hit, op["accept"] // self.block_size * self.block_size)
        facts = {"local": local, "hit": hit, "tokens": life.request.num_tokens, "accepted": accepted, "blocks": []}
        if (local or accepted) and not self._allocate(life.request, blocks, local, accepted):
            return {**facts, "accepted": None}
        self._start(life, local, accepted)
        return {**facts, "blocks": self._table(life)}

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
        scheduled = [name for name, count in op["schedule"].items() if self._schedule(name, count)]
        gone = {name for name in self.preempted if name in self.lives}
        output = self._output(scheduled, op["schedule"], gone)
        meta = self.offload.build_connector_meta(output)
        for life in self.lives.values():
            life.unsent = False
        self.store_events.append(meta.store_event)
        facts = {
            "scheduled": [{**self._confirmed(name), "new": self._is_new(name)} for name in scheduled],
            "preempted": sorted(self.preempted),
            "finished": sorted(self.finished),
            "stored": [self._gpu_hash(block) for block in meta.store_gpu_blocks],
        }
        self.preempted, self.finished = set(), set()
        facts["grown"] = dict(self._compute(scheduled, op["schedule"]))
        return facts

    def _schedule(self, name: str, count: int) -> bool:
        life = self.running(name)
        if life is None or count <= 0:
            return False
        request = life.request
        count = min(count, request.num_tokens - request.num_computed_tokens)
        before = set(self._table(life))
        if count <= 0 or self.cache.allocate_slots(request, count) is None:
            return False
        if self._is_new(name):
            self.offload.update_state_after_alloc(request, self.cache.get_blocks(name), 0)
            before = set()
        self.new_blocks[name] = [block for block in self._table(life) if block not in before]
        return True

    def _is_new(self, name: str) -> bool:
        return not self.lives[name].started or self.lives[name].resumed

    def _output(self, names: list[str], schedule: dict[str, int], preempted: set[str]) -> SchedulerOutput:
        lives = {name: self.lives[name] for name in names}
        new = [new_data(name, self.new_blocks[name]) for name, life in lives.items() if not life.started]
        cached = [name for name, life in lives.items() if life.started]
        resumed = {name for name in cached if lives[name].resumed}
        counts = {name: schedule[name] for name in names}
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached,
                resumed_req_ids=resumed,
                new_token_ids=[[] for _ in cached],
                all_token_ids={},
                new_block_ids=[(self.new_blocks[name],) for name in cached],
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
        )

    def _confirmed(self, name: str) -> Facts:
        """What of a request is ready to be stored, as an adapter sees it, and what vLLM made of that."""
        life = self.lives[name]
        blocks = life.request.num_computed_tokens // self.block_size
        state = self.offload._reqs_to_store.get(name)
        tracked = state is not None and not state.finished and state.request is life.request
        behind = state.num_stored_blocks[0] if tracked else 0
        full = not self.offload.cpu_block_pool.get_num_free_blocks()
        return {
            "request": name,
            "blocks": self._table(life)[:blocks],
            "tracked": tracked,
            "no_room": self._hashes(life)[behind:blocks] if tracked and full else [],
        }

    def _compute(self, names: list[str], schedule: dict[str, int]) -> Iterator[tuple[str, Facts]]:
        """The step's forward pass: tokens are computed, and a request at its end gets as many new ones."""
        for name in names:
            life = self.lives[name]
            request = life.request
            life.started, life.resumed = True, False
            request.num_computed_tokens = min(request.num_tokens, request.num_computed_tokens + schedule[name])
            if request.num_computed_tokens == request.num_tokens:
                first, seen = request.all_token_ids[0], request.num_tokens
                fresh = [(first + 7 * (seen + i)) % VOCABULARY for i in range(max(1, min(schedule[name], 6)))]
                request.append_output_token_ids(fresh)
            yield name, life.grown(self.block_size)

    def stored(self, op: Facts) -> Facts | None:
        """The store of the n-th step has been copied."""
        event = self.store_events[op["step"]] if op["step"] < len(self.store_events) else -1
        if event < 0:
            return None
        self.store_events[op["step"]] = -1
        meta = SimpleCPUOffloadWorkerMetadata(completed_store_events={event: 1})
        self.offload.update_connector_output(
            KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=meta)
        )
        return {}

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
        confirmed = self._confirmed(name)
        ids = self.cache.get_block_ids_for_computed_tokens(name, request.num_computed_tokens)
        queued = len(self.offload._pending_finished_stores)
        self.offload.request_finished_all_groups(request, ids)
        flushed = self.offload._pending_finished_stores[queued:]
        facts = {**self._confirmed(name), "tracked": confirmed["tracked"]}
        facts["flushed"] = [self._gpu_hash(block) for t in flushed for block in t.gpu_block_ids]
        if life.loading:  # an adapter knows that only the local prefix has its bytes by now
            facts["blocks"] = facts["blocks"][: self._hashed(facts["blocks"])]
        facts["hashes"] = self._hashes(life)[: len(facts["blocks"])]
        if confirmed["tracked"] and not self.offload.cpu_block_pool.get_num_free_blocks():
            facts["no_room"] = facts["hashes"]
        life.ended = True
        self.finished.add(name)
        if not life.loading:
            self.cache.free(request)
        return facts

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

    def _table(self, life: Life) -> list[int]:
        table: list[int] = self.cache.get_block_ids(life.request.request_id)[0]
        return list(table)

    def _hashes(self, life: Life) -> list[str]:
        return [hex64(block_hash) for block_hash in life.request.block_hashes]

    def _hashed(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if self.gpu.blocks[block].block_hash is not None)

    def _gpu_hash(self, block: int) -> str:
        name: str = hex64(get_block_hash(self.gpu.blocks[block].block_hash))
        return name


def new_data(name: str, block_ids: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=None,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(block_ids,),
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
    register_all_kvcache_specs(vllm_config=None)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line)), separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
