"""Connectors that measure the time spent in their hooks. For an engine in one process.

Every hook that vLLM calls while it serves is measured, of both halves, in the thread that runs the engine's steps.
`TimedNothing` does nothing in each: what it shows is what it costs to measure, with caches as cold as the others'.
What our courier, a thread beside it, spends on a core is told too, by itself: no step waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from simple_on_cpu import SimpleOnCpu
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvevents_service.engine.vllm import KVEventsConnector

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
    "handle_preemptions",
    "bind_connector_metadata",
    "wait_for_layer_load",
    "save_kv_layer",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
CHUNK_TOKENS = 64
"""A step of more tokens computes a part of a prompt."""
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


class _Spent:
    """By kind of step: steps, and seconds in each hook. A step is of its kind from `build_connector_meta` on."""

    beside = 0.0

    def __init__(self) -> None:
        self.clock = CLOCKS["wall"]
        self.inside = False
        self.clear()

    def clear(self) -> None:
        self.kind = "none"
        self.steps: Counter[str] = Counter()
        self.hooks: Counter[tuple[str, str]] = Counter()

    def begin_step(self, output: Any) -> None:
        tokens = output.total_num_scheduled_tokens
        self.kind = "chunk" if tokens > CHUNK_TOKENS else "decode" if tokens else "none"
        self.steps[self.kind] += 1


_spent = _Spent()


def take(clock: str = "wall") -> dict[str, Any]:
    """Since the last time: steps by kind, and microseconds in hooks by kind. `clock` is that of what comes."""
    hooks: dict[str, dict[str, float]] = {}
    for (kind, name), seconds in _spent.hooks.items():
        hooks.setdefault(kind, {})[name] = round(seconds * 1e6, 1)
    before, _spent.beside = _spent.beside, _courier_s()
    beside = round((_spent.beside - before) * 1e6, 1)
    taken = {"steps": dict(_spent.steps), "us": hooks, "beside_us": beside}
    _spent.clear()
    _spent.clock = CLOCKS[clock]
    return taken


def _courier_s() -> float:
    """Seconds on a core."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "kvevents-courier"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident)


def _measured(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if _spent.inside:  # one hook calls another
            return hook(*args, **kwargs)
        if name == "build_connector_meta":
            _spent.begin_step(args[1])
        clock, _spent.inside = _spent.clock, True
        before = clock()
        result = hook(*args, **kwargs)
        if name == "take_events":  # it may be a generator
            result = list(result)
        _spent.hooks[_spent.kind, name] += clock() - before
        _spent.inside = False
        return result

    return measured


class TimedKVEvents(KVEventsConnector):
    pass


class TimedSimple(SimpleOnCpu):
    pass


class TimedNothing(KVConnectorBase_V1, SupportsHMA):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


for connector in (TimedKVEvents, TimedSimple, TimedNothing):
    for hook in HOOKS:
        if hasattr(connector, hook):
            setattr(connector, hook, _measured(hook, getattr(connector, hook)))
