"""Point 6: the time that a step spends in the connector's hooks, ours and vLLM's SimpleCPUOffloadConnector's.

Three engines stand at the same time, all on one core, and answer the same prompts in turns, new ones in each round,
another engine first. The third one's connector does nothing: what it shows is taken off, as the cost of measuring.
The sidecar has the other core, and so have the other connector's copies; our courier is on the engines'. Rounds
measure by the clock, or the thread's time on a core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import phases
from stage import Engine, Sizes

TARGET = 0.25
"""Of the time that SimpleCPUOffloadConnector spends in its hooks."""
LONG = Sizes(blocks=700, max_len=4200, step_tokens=2048)
PROMPTS = [phases.prompt(41 + number, 4096) for number in range(8)]
TOKENS = 16
ROUNDS = {"wall": 9, "cpu": 3}
HOST_BYTES = 1 << 30

Round = dict[str, Any]
Start = Callable[..., Engine]


def play(start: Start, socket: str, cores: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """`start` starts an engine. `cores`: the engines' one, and the sidecar's, which is at this socket."""
    extras = {"KVEvents": {"sidecar": socket}, "Simple": {"cpu_bytes_to_use": HOST_BYTES}, "Nothing": {}}
    for events in (True, False):
        engines = {
            name: start(connector=(f"Timed{name}", "timed"), extra=extra, sizes=LONG, events=events, core=cores[0])
            for name, extra in extras.items()
        }
        rounds = _rounds(engines, 100 * events)
        for engine in engines.values():
            engine.stop()
        yield {"events": events, **_judged(rounds)}


def cores() -> tuple[int, int]:
    """Two that we may use; the same one twice if there is no other."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


def _rounds(engines: dict[str, Engine], shift: int) -> dict[str, dict[str, list[Round]]]:
    """What each engine spent in each round, by clock. A first round of each warms up."""
    spent: dict[str, dict[str, list[Round]]] = {clock: {name: [] for name in engines} for clock in ROUNDS}
    clocks = ["wall", *(clock for clock, count in ROUNDS.items() for _ in range(count))]
    for number, clock in enumerate(clocks):
        prompts = [[(token + number + shift + 1) % 500 for token in prompt] for prompt in PROMPTS]
        names = list(engines)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            engine = engines[name]
            engine.do("spent", clock=clock)
            engine.ask(*prompts, max_tokens=TOKENS)
            round_ = engine.do("spent", clock=clock)
            if number:
                spent[clock][name].append(round_)
    return spent


def _judged(rounds: dict[str, dict[str, list[Round]]]) -> dict[str, Any]:
    steps = {clock: {name: _per_step(spent) for name, spent in each.items()} for clock, each in rounds.items()}
    share = {clock: _share(each) for clock, each in steps.items()}
    return {
        "ok": share["wall"] <= TARGET,
        "share": share["wall"],
        "cpu_share": share["cpu"],
        "target": TARGET,
        "us_per_step": steps["wall"],
        "cpu_us_per_step": steps["cpu"],
        "beside_us_per_step": _beside(rounds["wall"]["KVEvents"]),
        "steps": {name: spent[-1]["steps"] for name, spent in rounds["wall"].items()},
        "by_kind": {name: _by_kind(spent) for name, spent in rounds["wall"].items()},
        "by_hook": {name: _by_hook(spent) for name, spent in rounds["wall"].items()},
    }


def _share(steps: dict[str, float]) -> float:
    return round((steps["KVEvents"] - steps["Nothing"]) / (steps["Simple"] - steps["Nothing"]), 3)


def _per_step(rounds: list[Round]) -> float:
    """The median round's mean over its steps, in microseconds."""
    means = [
        sum(sum(hooks.values()) for hooks in each["us"].values()) / sum(each["steps"].values()) for each in rounds
    ]
    return round(median(means), 1)


def _beside(rounds: list[Round]) -> float:
    """Of our courier's thread, on the core, which no hook waits for."""
    return round(median(each["beside_us"] / sum(each["steps"].values()) for each in rounds), 1)


def _by_kind(rounds: list[Round]) -> dict[str, float]:
    """Microseconds of a step that computes a part of a prompt, one that does not, and one that computes nothing."""
    kinds = rounds[-1]["steps"]
    return {
        kind: round(
            median(sum(each["us"].get(kind, {}).values()) / each["steps"].get(kind, 1) for each in rounds), 1
        )
        for kind in kinds
    }


def _by_hook(rounds: list[Round]) -> dict[str, dict[str, float]]:
    """Microseconds a step in each hook, by kind of step."""
    return {
        kind: {
            hook: round(
                median(each["us"].get(kind, {}).get(hook, 0.0) / each["steps"].get(kind, 1) for each in rounds), 1
            )
            for hook in rounds[-1]["us"][kind]
        }
        for kind in rounds[-1]["us"]
    }
