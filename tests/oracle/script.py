"""The language of request lives: a script is plain JSON, and any part of one is a script again.

    {"name", "model", "ranks", "lazy", "gpu_blocks", "cpu_blocks", "ops": [{"op": ..., ...}, ...]}

`model` is told in models.py. A store ends when each of `ranks` ranks has reported it. `lazy`: blocks are stored
when they are near eviction in the engine, and not as soon as they are computed.

    add      request, tokens, lora {id, name, path} or null, salt, images [[identifier, offset, length]]
    lookup   request                  look the prefix up, and do nothing with the hit (the allocation failed)
    admit    request, accept          look up, take blocks, load at most `accept` tokens of the hit (null: all)
    step     schedule {request: n}    confirmed blocks are stored, loads start, n more tokens are computed
    stored   step                     the store of the n-th step (from 0) has been copied by every rank; any order
    reported step                     one more rank has copied it
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
from math import gcd
from typing import Any

from oracle.models import model_of

Plain = dict[str, Any]
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


def reported(number: int) -> Op:
    return {"op": "reported", "step": number}


def forget() -> Op:
    return {"op": "forget"}


def reset(*, running: bool = False) -> Op:
    return {"op": "reset", "running": running}


def of(verb: str, request: str) -> Op:
    """lookup, loaded, preempt, finish or abort of a request."""
    return {"op": verb, "request": request}


def make_model(*groups: tuple[str, int] | tuple[str, int, int], hash_size: int = 0, dcp: int = 1) -> Plain:
    """Groups are (kind, block size of a rank, window). The hash unit is what divides every block, or given."""
    plain: Plain = {"groups": [[*group, None][:3] for group in groups], "hash_size": 1, "dcp": dcp}
    unit = gcd(*(group.block_size for group in model_of(plain).stored))
    return {**plain, "hash_size": hash_size or unit}


FULL = make_model(("full_attention", 4))


def make_script(
    name: str,
    *ops: Op,
    model: Plain = FULL,
    cpu_blocks: int = 64,
    gpu_blocks: int = 64,
    ranks: int = 1,
    lazy: bool = False,
) -> Script:
    return {
        "name": name,
        "model": model,
        "ranks": ranks,
        "lazy": lazy,
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
