"""What happens to an engine and its relay, after which every consumer must know what the engine's cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from relay_stage import RelayStage

BATCHES = 20_000
"""Twice as many as vLLM keeps for replay."""

Wrong = dict[str, str]


class RelayScenario(NamedTuple):
    """`play` yields what is wrong at each point where consumers are asked."""

    name: str
    play: Callable[[RelayStage], Iterator[Wrong]]


def _started(stage: RelayStage) -> None:
    stage.engine.start()
    stage.relay.start()


def live(stage: RelayStage) -> Iterator[Wrong]:
    _started(stage)
    stage.join()
    stage.generate(3)
    yield stage.check()
    stage.generate(8)  # more than it has room for
    yield stage.check()


def late_join(stage: RelayStage) -> Iterator[Wrong]:
    """Readers come when the engine itself could not tell them any more."""
    _started(stage)
    stage.generate(8)
    stage.engine.order("batches", count=BATCHES)
    stage.join()
    yield stage.check()
    stage.generate(3)
    yield stage.check()


def relay_killed(stage: RelayStage) -> Iterator[Wrong]:
    """kill -9 of the relay; the engine goes on meanwhile."""
    _started(stage)
    stage.join()
    stage.generate(6)
    yield stage.check()
    stage.relay.kill()
    stage.generate(3)
    stage.relay.start()
    yield stage.check()
    stage.generate(3)
    yield stage.check()


def engine_restarted(stage: RelayStage) -> Iterator[Wrong]:
    """kill -9 of the engine: its cache is gone with it. Another process comes to the same ports."""
    _started(stage)
    stage.join()
    stage.generate(6)
    yield stage.check()
    stage.engine.kill()
    stage.engine.start()
    stage.engine.order("generate", prompts=[[*stage.prompts[-1].token_ids, 1]])
    yield stage.check()
    stage.generate(6)
    yield stage.check()


def reset(stage: RelayStage) -> Iterator[Wrong]:
    """reset_prefix_cache."""
    _started(stage)
    stage.join()
    stage.generate(6)
    yield stage.check()
    if not stage.engine.order("reset"):
        raise RuntimeError("the engine did not reset its prefix cache")
    yield stage.check()
    stage.generate(3)
    yield stage.check()


RELAY_SCENARIOS = (
    RelayScenario("relay of a vLLM engine: live", live),
    RelayScenario("relay of a vLLM engine: late join after 20,000 batches", late_join),
    RelayScenario("relay of a vLLM engine: kill -9 of the relay", relay_killed),
    RelayScenario("relay of a vLLM engine: kill -9 of the engine", engine_restarted),
    RelayScenario("relay of a vLLM engine: reset_prefix_cache", reset),
)
