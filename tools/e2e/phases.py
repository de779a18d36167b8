"""The prompts of an end-to-end run: A is asked again after others have pushed it out of the engine's small pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stage import Engine

PREFIX = 128
"""Tokens of A that fill blocks: what every hit of it must bring."""


def prompt(factor: int, length: int) -> list[int]:
    return [(place * factor + 3) % 500 for place in range(length)]


PROMPTS = {
    "A": prompt(7, 130),
    "B": prompt(13, 200),
    "C": prompt(17, 200),
    "D": prompt(19, 200),
    "E": prompt(23, 200),
}
ORDER = ("A", "B", "C", "A", "D", "E", "A")
CROWD = [PROMPTS["A"], prompt(29, 170), prompt(31, 100), prompt(37, 150)]
"""Asked at once, they do not fit into the pool together: some are preempted."""
CROWD_TOKENS = 60


class Answer(NamedTuple):
    phase: str
    tokens: list[int]
    cached: int


def play(engine: Engine, before_last: Callable[[], Any] = lambda: None) -> list[Answer]:
    """All phases. `before_last` is called when A has been pushed out a second time."""
    answers = []
    for number, phase in enumerate(ORDER):
        if number == len(ORDER) - 1:
            before_last()
        answers.append(ask(engine, phase))
    return answers


def ask(engine: Engine, phase: str) -> Answer:
    said = engine.ask(PROMPTS[phase])
    return Answer(phase, said["tokens"][0], said["cached"][0])


def hits(answers: list[Answer]) -> list[int]:
    """Cached tokens of A, each time that it is asked again."""
    return [answer.cached for answer in answers if answer.phase == "A"][1:]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]
