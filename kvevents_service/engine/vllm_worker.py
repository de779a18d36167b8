"""The connector's half in every worker of vLLM: lends the rank's memory to the sidecar, says what is computed.

It moves no bytes. Loads that the scheduler half knows to have ended pass through here: vLLM wants to hear of them
from every rank.
"""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_memory import RankDevice
from kvevents_service.engine.vllm_scheduler import Said

BEFORE_ALL = -1
GREETING_S = 5.0
"""How long either half waits at its start for a sidecar that is there, and slow: else the first requests would not
be offered to it. They start one after the other, the workers first."""
LET_GO_S = 5.0


class Rank(NamedTuple):
    """A rank and its run of the engine, as in `RankLayout`."""

    engine_id: str
    rank: int
    ranks: int


class WorkerHalf:
    """On a device a step is reported as soon as it has been given to it: the sidecar waits for its mark.

    `said` is that of the step that is about to run, or runs. `computed`: the last step that has been given to the
    device, with all before it. `behind`: the device may be behind what was given to it.
    """

    def __init__(self, socket_path: str, rank: Rank, device: RankDevice) -> None:
        self.client: RankClient | None = None
        self._socket_path = socket_path
        self._rank = rank
        self._device = device
        self.behind = device.behind
        self._places: list[Place] = []
        self.computed = BEFORE_ALL
        self.said = Said(BEFORE_ALL, {})

    def __repr__(self) -> str:
        return f"<WorkerHalf rank {self._rank.rank} of {self._rank.ranks}, step {self.computed}, {self.client!r}>"

    # memory

    def lend(self, places: list[Place]) -> None:
        """Register this memory, and keep it registered. ConfigError if it cannot be shared."""
        self._places = places
        memories, regions, fds, events = self._device.share(places)
        layout = RankLayout(*self._rank, memories, regions, fds, events)
        self.client = RankClient(self._socket_path, layout)
        self._mark(max(self.computed, 0))
        self.client.wait_dialled(GREETING_S)

    def take_back(self) -> bool:
        """Before the memory goes. True once the sidecar has let go of it."""
        client, self.client = self.client, None
        gone = client is None or client.close(LET_GO_S)
        if client is not None and gone:
            self._device.close()
        return gone

    def lend_again(self) -> None:
        """The same memory, after `take_back`."""
        if self.client is None and self._places:
            self.lend(self._places)

    def leave(self) -> None:
        """For good, and at once: what the sidecar copies meanwhile is of no account."""
        client, self.client = self.client, None
        self._places = []
        if client is not None:
            client.close(0.0)

    # steps

    def end_step(self) -> None:
        """All of this step has been given to the device."""
        self.computed = self.said.step
        if self.behind:
            self._mark(self.computed)

    def _mark(self, step: int) -> None:
        if self.client is not None and self._device.mark(step):
            self.client.mark(step)

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
