"""vLLM's configuration for a script: cache specs, KVCacheConfig, VllmConfig. Oracle's virtual environment only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from models import CHUNK, SCRATCH, STATE, Group, Model
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

MAX_TOKENS = 4096
STEP_TOKENS = 64
PAGE_BYTES = 1024
HEAD = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}


class SinkManager(managers.SinkFullAttentionManager):
    """vLLM 0.33's own cannot be made by its own registry: it does not know this argument."""

    def __init__(self, *args: Any, needs_kv_cache_zeroing: bool = False, **rest: Any) -> None:
        super().__init__(*args, **rest)


def register_specs() -> None:
    managers.SinkFullAttentionManager = SinkManager
    managers.register_all_kvcache_specs(vllm_config=None)


SPECS: dict[str, type[KVCacheSpec]] = {
    "full_attention": FullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "sink_full_attention": SinkFullAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "sliding_window_mla": SlidingWindowMLASpec,
    CHUNK: ChunkedLocalAttentionSpec,
    STATE: MambaSpec,
    SCRATCH: CircularBufferSpec,
}
STATE_SHAPE = {"shapes": ((16,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}


def make_spec(group: Group, dcp: int) -> KVCacheSpec:
    size = group.block_size // (dcp if group.kind not in (STATE, SCRATCH) else 1)
    special: dict[str, Any] = {
        "sink_full_attention": {"sink_len": size},
        "sliding_window": {"sliding_window": group.window},
        "sliding_window_mla": {"sliding_window": group.window},
        CHUNK: {"attention_chunk_size": group.window},
    }.get(group.kind, {})
    common = STATE_SHAPE if group.kind == STATE else HEAD
    return SPECS[group.kind](block_size=size, **common, **special)


def make_cache_config(model: Model, blocks: int) -> KVCacheConfig:
    names = [f"l{group.index}" for group in model.groups]
    tensor = KVCacheTensor(
        size=PAGE_BYTES * blocks, layers=names, layer_stride=PAGE_BYTES * blocks, block_stride=PAGE_BYTES
    )
    specs = [make_spec(group, model.dcp) for group in model.groups]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def make_config(model: Model, ranks: int) -> VllmConfig:
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=model.alignment, gpu_memory_utilization=0.9, enable_prefix_caching=True
        ),
        kv_transfer_config=KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
        device_config=DeviceConfig("cpu"),
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    config.model_config = SimpleNamespace(max_model_len=MAX_TOKENS)  # all that the scheduler reads of a model
    config.parallel_config.world_size = ranks
    config.parallel_config.decode_context_parallel_size = model.dcp
    return config


class ChunkSplit:
    """Where vLLM's scheduler ends a prefill chunk of a model with mamba states: its own method."""

    use_eagle_block_drop = mamba_has_prefill_checkpoint_blocks = mamba_shared_prefix_checkpoint = False
    mamba_prefill_checkpoint_alignment = None
    num_hash_lookahead_tokens = 0
    max_num_scheduled_tokens = STEP_TOKENS
    scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)

    def __init__(self, model: Model, *, partial: bool) -> None:
        states = [group.block_size for group in model.groups if group.kind == STATE]
        self.needed = bool(states)
        self.cache_config = SimpleNamespace(block_size=max(states, default=0))
        self.block_size, self.hash_block_size = model.alignment, model.hash_size
        self.mamba_partial_cache_hit = partial

    def tokens(self, request: Request, count: int) -> int:
        if not self.needed or count <= 0:
            return count
        split: int = Scheduler._mamba_block_aligned_split(self, request, count)
        return split
