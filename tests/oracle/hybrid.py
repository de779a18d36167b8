"""Directed scripts of models with several groups, of lazy stores, of several ranks."""

from __future__ import annotations

from typing import Any

from oracle.cases import FRENCH, LEGAL, P, Q, arrivals
from oracle.script import (
    Op,
    Plain,
    Script,
    add,
    admit,
    forget,
    make_model,
    make_script,
    of,
    reported,
    reset,
    step,
    stored,
)

MODELS: dict[str, Plain] = {
    "mla": make_model(("mla_attention", 4)),
    "sinks": make_model(("sink_full_attention", 4)),
    "window": make_model(("full_attention", 4), ("sliding_window", 4, 8)),
    "odd window": make_model(("sliding_window", 4, 7), ("full_attention", 4)),
    "narrow window": make_model(("full_attention", 4), ("sliding_window", 4, 3)),
    "mla window": make_model(("mla_attention", 4), ("sliding_window_mla", 4, 12)),
    "chunks": make_model(("full_attention", 4), ("chunked_local_attention", 4, 8)),
    "states": make_model(("full_attention", 4), ("mamba", 4)),
    "all kinds": make_model(("full_attention", 4), ("sliding_window", 4, 8), ("mamba", 4)),
    "two full": make_model(("full_attention", 4), ("sliding_window", 4, 6), ("mla_attention", 4)),
    "scratch": make_model(("full_attention", 4), ("scratch", 4), ("sliding_window", 4, 8)),
    "wide window": make_model(("full_attention", 4), ("sliding_window", 8, 16)),
    "wide full": make_model(("full_attention", 8), ("sliding_window", 4, 8)),
    "fine states": make_model(("full_attention", 4), ("mamba", 8)),
    "fine": make_model(("full_attention", 8), ("mamba", 8), hash_size=4),
    "dcp states": make_model(("full_attention", 4), ("mamba", 8), hash_size=4, dcp=2),
    "dcp": make_model(("full_attention", 4), dcp=2),
    "dcp groups": make_model(("full_attention", 2), ("mla_attention", 2), dcp=2),
}
LONG = [*range(1, 30), *range(60, 70)]
EVERYTHING: dict[str, Any] = {
    "lora": LEGAL,
    "salt": "tenant-2",
    "images": [["cat", 2, 5], ["dog", 9, 2], ["cat", 17, 9]],
}


def long_life(name: str, first: int, **about: Any) -> list[Op]:
    """A prompt far longer than any window, prefilled in two steps; decoded; its stores are the three after that."""
    ops = [add(name, LONG, **about), admit(name), step(**{name: 21}), step(**{name: 64}), step(**{name: 6})]
    return [*ops, of("finish", name), step(), *map(stored, range(first + 1, first + 4))]


def whole_lives() -> list[Script]:
    """Every model: stored, forgotten by the engine, loaded again, stored further."""
    again = [
        add("b", [*LONG, 7, 7, 7, 7, 7], **EVERYTHING),
        of("lookup", "b"),
        admit("b"),
        step(),
        of("loaded", "b"),
    ]
    further = [step(b=20), step(b=6), of("finish", "b"), step()]
    return [
        make_script(name, *long_life("a", 0, **EVERYTHING), forget(), *again, *further, model=model)
        for name, model in MODELS.items()
    ]


def windows() -> list[Script]:
    flush = [add("a", LONG, lora=FRENCH), admit("a"), step(a=64), of("finish", "a"), step(), stored(1)]
    fewer = [*long_life("a", 0), forget(), add("b", LONG), admit("b", 16), step(), of("loaded", "b"), step(b=20)]
    reused = [add("a", P[:8] * 2), add("b", Q[:8] * 2), admit("a"), admit("b"), step(a=16), step(a=1, b=16)]
    local = [add("c", [*LONG[:12], 90, 91]), admit("c", 0), step(c=20), step(c=1), of("finish", "c")]
    middle = [*long_life("a", 0), forget(), *local]
    behind = [add("b", LONG), of("lookup", "b"), admit("b"), step(), of("loaded", "b"), step(b=30)]
    return [
        make_script("the tail of a window at the end", *flush, model=MODELS["window"]),
        make_script("the tail of a chunk at the end", *flush, model=MODELS["chunks"]),
        make_script("fewer tokens than a window hit", *fewer, model=MODELS["window"]),
        make_script("fewer tokens than a state hit", *fewer, model=MODELS["states"]),
        make_script("a window's block is used again", *reused, step(a=1), model=MODELS["window"], gpu_blocks=17),
        make_script("a hit in the middle of a chunk", *middle, *behind, model=MODELS["chunks"]),
        make_script("the tier is full of groups", *crowded(), model=MODELS["all kinds"], cpu_blocks=14),
        make_script("reset of groups", *long_life("a", 0), reset(), *long_life("b", 4), model=MODELS["all kinds"]),
        make_script("a prompt's tail", *tail(), model=MODELS["fine"]),
        make_script("states of a preempted request", *preempted(), model=MODELS["states"]),
    ]


def tail() -> list[Op]:
    """A prompt that ends inside a block; a longer one hits up to there."""
    prompt = LONG[:14]
    first = [add("a", prompt, **EVERYTHING), admit("a"), step(a=64), step(a=64), step(a=64)]
    end = [of("finish", "a"), step(), *map(stored, range(4)), forget()]
    longer = add("b", [*prompt, 5, 5, 5, 5], **EVERYTHING)
    return [*first, *end, longer, of("lookup", "b"), admit("b"), step(), of("loaded", "b")]


def crowded() -> list[Op]:
    other = {"lora": FRENCH}
    return [*long_life("a", 0), *long_life("b", 4, **other), *long_life("c", 8), *long_life("d", 12, **EVERYTHING)]


def preempted() -> list[Op]:
    start = [add("a", LONG), admit("a"), step(a=9), step(a=8), of("preempt", "a"), step(), admit("a")]
    return [*start, step(a=30), step(a=30), stored(1), stored(3), of("abort", "a"), step()]


def lazy() -> list[Script]:
    """The engine is small: what ended is near eviction at once."""
    two = [add("a", LONG, **EVERYTHING), admit("a"), step(a=64), of("finish", "a"), step(), stored(1)]
    more = [add("b", [*P, *P]), admit("b"), step(b=64), step(b=3), of("finish", "b"), step(), step()]
    again = [forget(), add("c", LONG, **EVERYTHING), admit("c"), step(), of("loaded", "c"), step(c=9)]
    ops = [*two, *more, *map(stored, range(2, 6)), *again]
    return [
        make_script(f"lazy {name}", *ops, model=MODELS[name], gpu_blocks=60, lazy=True)
        for name in ("mla", "window", "chunks", "states", "dcp")
    ]


def ranks() -> list[Script]:
    begun = [add("a", P), admit("a"), step(a=8), step(a=5), step(a=1)]
    mixed = [reported(2), reported(1), reported(2), reported(1), reported(2), reported(1), reported(1), reported(2)]
    return [
        make_script("four ranks", *begun, *mixed, model=MODELS["window"], ranks=4),
        make_script("reset between two ranks", *begun, reported(1), reset(), reported(1), reported(2), ranks=2),
    ]


def hybrid() -> list[Script]:
    """Every script of this file. At its end all that is still being copied arrives."""
    scripts = [*whole_lives(), *windows(), *lazy(), *ranks()]
    return [{**script, "ops": [*script["ops"], *arrivals(script["ops"])]} for script in scripts]
