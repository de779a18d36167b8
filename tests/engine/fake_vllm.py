"""The names of vLLM that the connector imports, with what vLLM 0.32 and 0.33 do behind them as far as it is used.

`python tools/e2e DIR --point 7` runs the same hooks with vLLM's own.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import sys
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

OURS = ("kvevents_service.engine.vllm", "kvevents_service.engine.vllm_config")


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase:
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._kv_cache_manager: Any = None
        self._role = role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        return


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)


class PromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self.per_engine_labelvalues = per_engine


def modules(version: str) -> dict[str, dict[str, Any]]:
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    return {
        "vllm": {"__version__": version, "envs": SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=True)},
        f"{v1}.base": {
            "KVConnectorBase_V1": KVConnectorBase,
            "KVConnectorMetadata": type("KVConnectorMetadata", (ABC,), {}),
            "KVConnectorRole": KVConnectorRole,
            "KVConnectorTransferResults": TransferResults,
            "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (ABC,), {}),
            "SupportsHMA": type("SupportsHMA", (ABC,), {}),
        },
        f"{v1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.v1.core.kv_cache_utils": {
            "make_block_hash_with_group_id": lambda name, group: name + group.to_bytes(4, "big"),
            "generate_block_hash_extra_keys": lambda request, start, stop, first: ((("tag", b"digest"),), 0),
            "resolve_dcp_kv_block_size": lambda spec, ranks: spec.block_size * ranks,
            "resolve_kv_cache_block_sizes": lambda cache, config: (config.unit, config.unit),
        },
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(HOST="host")},
        "vllm.utils.hashing": {"get_hash_fn_by_name": lambda name: lambda value: hashlib.sha256(value).digest()},
        "vllm.v1.kv_cache_interface": {
            "get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=spec.kind),
            "get_kv_cache_spec_sliding_window": lambda spec: spec.window,
        },
    }


@contextmanager
def installed(version: str = "0.33.0") -> Iterator[ModuleType]:
    """The connector's module over these names. Nothing of either is left behind."""
    made: dict[str, ModuleType] = {}
    for name, content in modules(version).items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        vars(made[name]).update(content)
    kept = {name: sys.modules.pop(name) for name in (*OURS, *made) if name in sys.modules}
    sys.modules.update(made)
    try:
        yield import_module(OURS[0])
    finally:
        for name in (*OURS, *made):
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def vllm_config(extra: dict[str, Any], unit: int = 4, **changes: Any) -> Any:
    """What is read of a `VllmConfig`. `changes`: "part__setting" by value."""
    config = SimpleNamespace(
        unit=unit,
        instance_id="run",
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra, kv_role="kv_both", engine_id="engine", kv_load_failure_policy="fail"
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_rank=0,
            rank=0,
            world_size=1,
        ),
        model_config=SimpleNamespace(
            model="tiny",
            revision=None,
            dtype="float32",
            is_encoder_decoder=False,
            enable_cumem_allocator=False,
            compute_hash=lambda: "hash",
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        speculative_config=None,
    )
    for name, value in changes.items():
        part, setting = name.split("__")
        assert hasattr(getattr(config, part), setting)
        setattr(getattr(config, part), setting, value)
    return config


def cache_config(*kinds: str, unit: int = 4) -> Any:
    """What is read of a `KVCacheConfig`: a group of each kind."""
    specs = [SimpleNamespace(kind=kind, block_size=unit, window=2 * unit) for kind in kinds or ("full_attention",)]
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
        prefix_cacheable_group_ids=tuple(range(len(specs))),
        kv_cache_layout="NHD",
        kv_cache_tensors=[],
        num_blocks=8,
    )
