"""The language of request lives: a script is plain JSON, and any part of one is a script again.

    {"name", "block_size", "gpu_blocks", "cpu_blocks", "ops": [{"op": ..., ...}, ...]}

    add      request, tokens, lora {id, name, path} or null, salt, images [[identifier, offset, length]]
    lookup   request                  look the prefix up, and do nothing with the hit (the allocation failed)
    admit    request, accept          look up, take blocks, load at most `accept` tokens of the hit (null: all)
    step     schedule {request: n}    confirmed blocks are stored, loads start, n more tokens are computed
    stored   step                     the store of the n-th step (from 0) has been copied; any order
    loaded   request                  its load has been copied
    preempt  request                  it loses its blocks, and is admitted again later
    finish   request                  it ends, in whatever state
    abort    request                  as finish: vLLM calls the same hook
    forget                            the engine's own prefix cache loses every block that no request holds
    reset    running                  forget every stored block; `running`: running requests are preempted first

An operation that makes no sense where it stands (an unknown request, a store that was none) does nothing.
A request that has computed all its tokens gets as many new ones as were scheduled, at most 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Op = dict[str, Any]
Script = dict[str, Any]
Answer = dict[str, Any]


def add(
    request: str,
    tokens: list[int],
    *,
    lora: dict[str, Any] | None = None,
    salt: str | None = None,
    images: list[list[Any]] | None = None,
) -> Op:
    return {"op": "add", "request": request, "tokens": tokens, "lora": lora, "salt": salt, "images": images or []}


def admit(request: str, accept: int | None = None) -> Op:
    return {"op": "admit", "request": request, "accept": accept}


def step(**schedule: int) -> Op:
    return {"op": "step", "schedule": schedule}


def stored(number: int) -> Op:
    return {"op": "stored", "step": number}


def forget() -> Op:
    return {"op": "forget"}


def reset(*, running: bool = False) -> Op:
    return {"op": "reset", "running": running}


def of(verb: str, request: str) -> Op:
    """lookup, loaded, preempt, finish or abort of a request."""
    return {"op": verb, "request": request}


def make_script(name: str, *ops: Op, cpu_blocks: int = 64, gpu_blocks: int = 64, block_size: int = 4) -> Script:
    return {
        "name": name,
        "block_size": block_size,
        "gpu_blocks": gpu_blocks,
        "cpu_blocks": cpu_blocks,
        "ops": list(ops),
    }


def shrink(script: Script, still_fails: Callable[[Script], bool]) -> Script:
    """The same failure with fewer operations: parts are left out, ever smaller ones, while it still fails."""
    ops = script["ops"]
    size = max(1, len(ops) // 2)
    while size:
        ops = _without_parts(script, ops, size, still_fails)
        size //= 2
    return {**script, "ops": ops}


def _without_parts(script: Script, ops: list[Op], size: int, still_fails: Callable[[Script], bool]) -> list[Op]:
    start = 0
    while start < len(ops):
        fewer = ops[:start] + ops[start + size :]
        if still_fails({**script, "ops": fewer}):
            ops = fewer
        else:
            start += size
    return ops
