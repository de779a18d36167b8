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

_spent: Counter[str] = Counter()
_steps = 0


def take() -> dict[str, Any]:
    """Microseconds in each hook, and steps, since the last time."""
    global _steps
    taken = {"steps": _steps, "us": {name: round(_spent[name] * 1e6) for name in HOOKS if _spent[name]}}
    _spent.clear()
    _steps = 0
    return taken


def _measured(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def measured(*args: Any, **kwargs: Any) -> Any:
        global _steps
        start = time.perf_counter()
        try:
            result = hook(*args, **kwargs)
            return list(result) if name == "take_events" else result
        finally:
            _spent[name] += time.perf_counter() - start
            _steps += name == "build_connector_meta"

    return measured


class TimedKVEvents(KVEventsConnector):
    pass


class TimedSimple(SimpleOnCpu):
    pass


for connector in (TimedKVEvents, TimedSimple):
    for hook in HOOKS:
        setattr(connector, hook, _measured(hook, getattr(connector, hook)))
