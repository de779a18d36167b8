"""What vLLM's configuration says, in our terms. Imports vLLM, and is imported only by `vllm`."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.vllm_layout import SpecReader, groups_of
from kvevents_service.engine.vllm_loads import HitRules
from kvevents_service.engine.vllm_request import VllmRequest
from kvevents_service.engine.vllm_worker import Rank
from kvevents_service.errors import ConfigError

SECRET_SEED = "xxhash"
"""Hashes of this kind have a seed that every process draws anew, unless PYTHONHASHSEED is set."""


def check(config: Any) -> None:
    """ConfigError for what this connector cannot work with."""
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", "true: blocks are known by their prefix's hash")
    if config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError("kv_role", '"kv_both": blocks are stored and loaded')
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise ConfigError("prefill_context_parallel_size", "1")
    if config.model_config.is_encoder_decoder:
        raise ConfigError("model", "one that is not an encoder-decoder")
    if device_kind(config) == "cuda" and config.model_config.enable_cumem_allocator:
        expected = "false, and no sleep mode: memory of that allocator cannot be shared by CUDA IPC"
        raise ConfigError("enable_cumem_allocator", expected)


def device_kind(config: Any) -> str:
    """torch's name for the type of device that the model runs on."""
    return str(config.device_config.device_type)


def rank_of(config: Any) -> Rank:
    """A worker's place among those that hold the model's KV together. The name is of this run, shared by all."""
    parallel = config.parallel_config
    engine_id = f"{config.kv_transfer_config.engine_id}-{config.instance_id}-{parallel.data_parallel_rank}"
    return Rank(engine_id, parallel.rank % parallel.world_size, parallel.world_size)


def engine_layout(config: Any, cache: Any, namespace: str) -> EngineLayout:
    """Groups, hashes and namespace; its workers bring the memory. ConfigError for a model that cannot be served."""
    context_ranks = config.parallel_config.decode_context_parallel_size
    _, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
    reader = SpecReader(
        lambda spec: get_kv_cache_spec_kind(spec).value,
        get_kv_cache_spec_sliding_window,
        lambda spec: resolve_dcp_kv_block_size(spec, context_ranks),
    )
    rank = rank_of(config)
    hash_bytes = len(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)(b""))
    return EngineLayout(
        rank.engine_id,
        _namespace(config, cache, namespace),
        groups_of(cache, hash_tokens, reader),
        hash_bytes=hash_bytes,
        hash_tokens=hash_tokens,
        ranks=rank.ranks,
    )


def _namespace(config: Any, cache: Any, namespace: str) -> str:
    """Everything that must agree for KV bytes of equal hashes to be equal."""
    model, parallel, blocks = config.model_config, config.parallel_config, config.cache_config
    algorithm = blocks.prefix_caching_hash_algo
    secret = config.instance_id if algorithm.startswith(SECRET_SEED) else "fixed"
    parts = (
        namespace,
        f"vllm-{vllm.__version__}",
        model.model,
        model.revision,
        model.dtype,
        model.compute_hash(),
        blocks.cache_dtype,
        cache.kv_cache_layout,
        algorithm,
        os.getenv("PYTHONHASHSEED", secret),
        f"tp{parallel.tensor_parallel_size}",
        f"pp{parallel.pipeline_parallel_size}",
        f"dcp{parallel.decode_context_parallel_size}",
    )
    return "|".join(map(str, parts))


def hit_rules(config: Any, cache: Any, fine: bool, timeout_s: float) -> HitRules:
    """A drafter that reads the state before the last token wants the last block of a hit computed again."""
    speculative = config.speculative_config
    drops = speculative is not None and speculative.use_eagle_block_drop()
    scheduler_block, _ = resolve_kv_cache_block_sizes(cache, config)
    return HitRules(fine, scheduler_block if drops else 0, timeout_s)


def embeds_digest(request: VllmRequest, start: int, stop: int) -> bytes:
    """As vLLM hashes prompt embeddings: the last of a block's extra keys, behind its tag."""
    keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
    digest: bytes = keys[-1][1]
    return digest
