"""Connectors that measure the time spent in their hooks. For an engine in one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from simple_on_cpu import SimpleOnCpu

from kvevents_service.engine.vllm import KVEventsConnector

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)

_wall: Counter[str] = Counter()
_cpu: Counter[str] = Counter()
_calls: Counter[str] = Counter()


def take() -> dict[str, Any]:
    """Microseconds in each hook, those of this thread on a core among them, and steps, since the last time.

    What it costs to measure is taken off.
    """
    wall, cpu = _empty()
    taken = {
        "steps": _calls["build_connector_meta"],
        "us": {name: round((_wall[name] - wall * _calls[name]) * 1e6) for name in HOOKS if _calls[name]},
        "cpu_us": {name: round((_cpu[name] - cpu * _calls[name]) * 1e6) for name in HOOKS if _calls[name]},
    }
    for counter in (_wall, _cpu, _calls):
        counter.clear()
    return taken


def _empty(calls: int = 2000) -> tuple[float, float]:
    """What measuring a call that does nothing shows."""
    nothing = _measured("nothing", lambda: None)
    for _ in range(calls):
        nothing()
    return _wall.pop("nothing") / calls, _cpu.pop("nothing") / calls


def _measured(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def measured(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            result = hook(*args, **kwargs)
            return list(result) if name == "take_events" else result
        finally:
            _wall[name] += time.perf_counter() - wall
            _cpu[name] += time.thread_time() - cpu
            _calls[name] += 1

    return measured


class TimedKVEvents(KVEventsConnector):
    pass


class TimedSimple(SimpleOnCpu):
    pass


for connector in (TimedKVEvents, TimedSimple):
    for hook in HOOKS:
        setattr(connector, hook, _measured(hook, getattr(connector, hook)))
