"""What a scenario needs of a consumer: subscribe it, ask it for prompts, and know what it should say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from truth import Held

from kvevents_service.testing import Chain

MODEL = "interop"
BLOCK_SIZE = 16

Answer = tuple[int, ...]


class Endpoints(NamedTuple):
    """Where one output of a publisher is: events and replay; and how large its blocks are."""

    pub: str
    replay: str
    block_size: int = BLOCK_SIZE


class Consumer(ABC):
    """One running consumer, subscribed to one output."""

    @abstractmethod
    def ask(self, chain: Chain) -> Answer:
        """Tokens of this prompt that it believes are held, in its own terms."""

    @abstractmethod
    def expect(self, chain: Chain, held: Held) -> Answer:
        """What `ask` should return if the consumer knows what is held."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def note(self) -> str:
        """The last thing it complained about; for a line that is not ok."""
        return ""


class Kind(NamedTuple):
    """A consumer that can be started: `start(endpoints, directory)`.

    real: a released program, not one of our doubles. replays: it asks for what it missed; the others cannot recover
    before the next clear, so that losses and late joins are not asked of them.
    """

    name: str
    real: bool
    dialect: str
    start: Callable[[Endpoints, Path], Consumer]
    topic: str = ""
    replays: bool = True
