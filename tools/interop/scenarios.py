"""The scenarios: what happens to a stream, after which every consumer must know exactly what is resident.

Each feeds a tier of 64 blocks with prompts of 6 blocks: from the eleventh prompt on there are evictions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from stage import CHECK_S, Stage

MILLION = 1_000_000
RETAINED = 8
"""So few batches are kept in the scenarios that are about what is no longer kept."""
FEW = 2
LARGE = 16_384
"""Blocks: a state of this size comes in many batches."""
HUGE, HUGER = 300_032, 1_000_192
HUGE_CHECK_S = 120.0
"""vllm-router folds a million blocks in 16 s, and two readers do it twice."""
MANY = 11_000
"""More numbers than a replay spans."""

Wrong = dict[str, str]
Play = Callable[[Stage], Iterator[Wrong]]


class Scenario(NamedTuple):
    """`play` yields what is wrong at each point where consumers are asked. recovery: of those only that replay.

    retained: batches that the sidecar keeps. blocks: size of its tier. check_s: for which readers may be wrong.
    """

    name: str
    play: Play
    retained: int = 10_000
    blocks: int = 64
    recovery: bool = False
    check_s: float = CHECK_S


def live(stage: Stage) -> Iterator[Wrong]:
    stage.sidecar.start()
    stage.join()
    stage.feed(5)
    yield stage.check()
    stage.feed(20)
    yield stage.check()


def late_join(stage: Stage) -> Iterator[Wrong]:
    """Numbers above a million, and the batches that filled the tier are no longer kept."""
    stage.sidecar.preset(MILLION)
    stage.sidecar.start()
    stage.feed(30)
    stage.join()
    stage.feed(1)
    yield stage.check()
    stage.feed(5)
    yield stage.check()


def late_join_large(stage: Stage) -> Iterator[Wrong]:
    """The same with more blocks than one batch holds: the state comes in many parts."""
    yield from _late_join_of(stage, LARGE)


def late_join_huge(stage: Stage) -> Iterator[Wrong]:
    """More than 16 MiB of state."""
    yield from _huge(stage, HUGE)


def late_join_huger(stage: Stage) -> Iterator[Wrong]:
    """More than vllm-router folds in the 5 s that it gives a reply."""
    yield from _huge(stage, HUGER)


def _huge(stage: Stage, blocks: int) -> Iterator[Wrong]:
    """One of each joins late, then another of each, and then both lose what is no longer kept."""
    yield from _late_join_of(stage, blocks)
    stage.join()
    stage.feed(1)
    yield stage.check()
    stage.lose(True)
    stage.feed(2 * RETAINED)
    stage.lose(False)
    stage.feed(1)
    yield stage.check()


def _late_join_of(stage: Stage, blocks: int) -> Iterator[Wrong]:
    stage.sidecar.preset(MILLION)
    stage.sidecar.start()
    stage.fill(blocks)
    stage.join()
    stage.feed(1)
    yield stage.check()


def lost_kept(stage: Stage) -> Iterator[Wrong]:
    """Messages are lost that are still kept for replay."""
    yield from _lost(stage, 5)


def lost_gone(stage: Stage) -> Iterator[Wrong]:
    """More messages are lost than are kept."""
    yield from _lost(stage, 3 * RETAINED)


def _lost(stage: Stage, messages: int) -> Iterator[Wrong]:
    stage.sidecar.start()
    stage.join()
    stage.feed(8)
    yield stage.check()
    stage.lose(True)
    stage.feed(messages)
    stage.lose(False)
    stage.feed(1)
    yield stage.check()
    stage.feed(3)
    yield stage.check()


def lost_large(stage: Stage) -> Iterator[Wrong]:
    """More is lost than is kept, in fewer numbers than the whole state has parts."""
    stage.sidecar.start()
    stage.fill(LARGE)
    stage.join()
    stage.feed(1)
    yield stage.check()
    stage.lose(True)
    stage.feed(FEW + 2)
    stage.lose(False)
    stage.feed(1)
    yield stage.check()


def killed(stage: Stage) -> Iterator[Wrong]:
    """kill -9, started again with the same settings. Its memory is gone; the engine stores other prompts."""
    stage.sidecar.start()
    stage.join()
    stage.feed(12)
    yield stage.check()
    stage.sidecar.kill()
    stage.sidecar.start()
    stage.feed(4)
    yield stage.check()
    stage.feed(12)
    yield stage.check()


def killed_unseen(stage: Stage) -> Iterator[Wrong]:
    """As `killed`, and no message of the new process's first ones arrives."""
    stage.sidecar.start()
    stage.join()
    stage.feed(12)
    yield stage.check()
    stage.lose(True)
    stage.sidecar.kill()
    stage.sidecar.start()
    stage.feed(4)
    stage.lose(False)
    stage.feed(1)
    yield stage.check()


def stopped(stage: Stage) -> Iterator[Wrong]:
    """A clean stop and a new start."""
    stage.sidecar.start()
    stage.join()
    stage.feed(12)
    yield stage.check()
    stage.sidecar.stop()
    stage.sidecar.start()
    stage.feed(4)
    yield stage.check()


def reset(stage: Stage) -> Iterator[Wrong]:
    """The tier is emptied by explicit removes, and filled again."""
    stage.sidecar.start()
    stage.join()
    stage.feed(12)
    yield stage.check()
    if stage.feeder.client.reset(5.0) is None:
        raise RuntimeError("the sidecar did not answer the reset")
    yield stage.check()
    stage.feed(4)
    yield stage.check()


def tiers(stage: Stage) -> Iterator[Wrong]:
    """GPU, CPU and STORAGE in one stream: prompts on one of them, on several, and moving down."""
    stage.tiers.publish(list)
    stage.join()
    _fill(stage)
    yield stage.check()
    for prompt in stage.prompts:
        stage.tiers.remove("GPU", prompt, 3, 6)
    yield stage.check()
    for prompt in stage.prompts:
        stage.tiers.remove("GPU", prompt, 0, 3)
    yield stage.check()
    for prompt in stage.prompts[::2]:
        stage.tiers.store("GPU", prompt, 0, 4)
    yield stage.check()


def tiers_late(stage: Stage) -> Iterator[Wrong]:
    """The same, joined late, above a million, with nothing kept of what filled the tiers."""
    stage.sidecar.preset(MILLION)
    _fill(stage)
    for prompt in stage.prompts[::2]:
        stage.tiers.remove("GPU", prompt, 2, 6)
    for _ in range(RETAINED):
        stage.tiers.publish(list)
    stage.join()
    yield stage.check()
    for prompt in stage.prompts[1::2]:
        stage.tiers.remove("GPU", prompt, 2, 6)
    yield stage.check()


def tiers_lost(stage: Stage) -> Iterator[Wrong]:
    """The same, and more is lost than is kept."""
    stage.tiers.publish(list)
    stage.join()
    _fill(stage)
    yield stage.check()
    stage.lose(True)
    for prompt in stage.prompts:
        stage.tiers.remove("GPU", prompt, 4, 6)
    stage.lose(False)
    stage.tiers.publish(list)
    yield stage.check()


def second_reader(stage: Stage) -> Iterator[Wrong]:
    """Readers from the start on, then MANY numbers, then one more of each: none may harm the others."""
    stage.tiers.publish(list)
    stage.join()
    _fill(stage)
    for _ in range(MANY):
        stage.tiers.publish(list)
    yield stage.check()
    stage.join()
    stage.tiers.publish(list)
    yield stage.check()
    for prompt in stage.prompts[::2]:
        stage.tiers.remove("GPU", prompt, 2, 6)
    yield stage.check()


def _fill(stage: Stage) -> None:
    """Every prompt is on the GPU; they reach further on CPU, on STORAGE, on both, or on neither."""
    for number in range(12):
        prompt = stage.new_prompt(12)
        stage.tiers.store("GPU", prompt, 0, 6)
        if number % 2:
            stage.tiers.store("CPU", prompt, 0, 9)
        if number % 3:
            stage.tiers.store("STORAGE", prompt, 0, 12)


SCENARIOS = (
    Scenario("live", live),
    Scenario("late join above a million, buffer wrapped", late_join, RETAINED, recovery=True),
    Scenario("late join above a million, 16,384 blocks", late_join_large, RETAINED, 2 * LARGE, recovery=True),
    Scenario("lost messages, still kept", lost_kept, recovery=True),
    Scenario("lost messages, no longer kept", lost_gone, RETAINED, recovery=True),
    Scenario("lost messages, no longer kept, 16,384 blocks", lost_large, FEW, 2 * LARGE, recovery=True),
    Scenario("kill -9 and restart", killed, recovery=True),
    Scenario("kill -9 and restart, first messages lost", killed_unseen, recovery=True),
    Scenario("clean stop and restart", stopped, recovery=True),
    Scenario("tier reset", reset),
    Scenario("GPU, CPU and STORAGE", tiers),
    Scenario("GPU, CPU and STORAGE, late join above a million", tiers_late, RETAINED, recovery=True),
    Scenario("GPU, CPU and STORAGE, lost messages, no longer kept", tiers_lost, RETAINED, recovery=True),
    Scenario("a second reader of each kind, after 11,000 numbers", second_reader, RETAINED, recovery=True),
)
LARGE_SCENARIOS = (
    Scenario("300,000 blocks: joins and losses", late_join_huge, RETAINED, HUGE + LARGE, True, HUGE_CHECK_S),
    Scenario("1,000,000 blocks: joins and losses", late_join_huger, RETAINED, HUGER + LARGE, True, HUGE_CHECK_S),
)
"""For the real consumers only: the doubles would take minutes."""
