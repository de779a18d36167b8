"""The connector's half in every worker of vLLM: lends the rank's memory to the sidecar, says what is computed.

It moves no bytes. Loads that the scheduler half knows to have ended pass through here: vLLM wants to hear of them
from every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_memory import share
from kvevents_service.engine.vllm_scheduler import Said

BEFORE_ALL = -1
GREETING_S = 1.0
"""How long a worker waits at its start for the sidecar, to say in its log whether it is there."""
LET_GO_S = 5.0


class Event(Protocol):
    """A mark on a device's stream. `query`: everything before it has been done."""

    def query(self) -> bool: ...


class Mark(NamedTuple):
    step: int
    event: Event


class Rank(NamedTuple):
    """A rank and its run of the engine, as in `RankLayout`."""

    engine_id: str
    rank: int
    ranks: int


class WorkerHalf:
    """`mark` puts an event behind what was given to the device so far; None where a step ends before it returns.

    `said` is that of the step that is about to run, or runs.
    """

    def __init__(self, socket_path: str, rank: Rank, mark: Callable[[], Event] | None) -> None:
        self.client: RankClient | None = None
        self._socket_path = socket_path
        self._rank = rank
        self._mark = mark
        self._places: list[Place] = []
        self._marks: deque[Mark] = deque()
        self._computed = BEFORE_ALL
        self.said = Said(BEFORE_ALL, {})

    def __repr__(self) -> str:
        return f"<WorkerHalf rank {self._rank.rank} of {self._rank.ranks}, step {self._computed}, {self.client!r}>"

    # memory

    def lend(self, places: list[Place]) -> None:
        """Register this memory, and keep it registered. ConfigError if it cannot be shared."""
        self._places = places
        memory = share(places)
        layout = RankLayout(*self._rank, memory.memories, memory.regions, memory.fds)
        self.client = RankClient(self._socket_path, layout)
        self.client.wait_connected(GREETING_S)

    def take_back(self) -> bool:
        """Before the memory goes. True once the sidecar has let go of it."""
        client, self.client = self.client, None
        return client is None or client.close(LET_GO_S)

    def lend_again(self) -> None:
        """The same memory, after `take_back`."""
        if self.client is None and self._places:
            self.lend(self._places)

    # steps

    def computed(self) -> None:
        """All of this step has been given to the device."""
        if self._mark is None:
            self._computed = self.said.step
        else:
            self._marks.append(Mark(self.said.step, self._mark()))

    def report(self) -> int:
        """The last step that is computed, with all before it."""
        while self._marks and self._marks[0].event.query():
            self._computed = self._marks.popleft().step
        return self._computed

    # loads

    def loaded(self) -> set[str]:
        """Requests whose load has ended, well or not."""
        return set(self.said.ended)

    def failed(self) -> set[str]:
        """Requests that must have other blocks: theirs may still be written to, or are of several groups."""
        return {name for name, end in self.said.ended.items() if end.failed and not end.bad_blocks}

    def bad_blocks(self) -> set[int]:
        """Blocks that were to be loaded and hold nothing."""
        return {block for end in self.said.ended.values() for block in end.bad_blocks}
