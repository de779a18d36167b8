"""The client inside one rank of an engine: it registers the rank's memory, and nothing else.

The engine's own client (`OffloadClient`, with a layout without memory) steps, looks up and loads for all ranks.
When the sidecar has gone and come back, both register anew, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.engine.registration import Registration, Timeouts
from kvevents_service.wire.control import PROTOCOL_VERSION, Hello, Memory, Region

SLICE_S = 0.1
"""How long the keeper sleeps at most before it looks whether it is to close."""


class RankLayout(NamedTuple):
    """One rank's part of an engine's memory.

    `engine_id` is that of the engine's own layout, and names one run of it: memory that outlives a run must not be
    taken for the next one's. `ranks` is the engine's, too. `fds` and `events` as in `EngineLayout`.
    """

    engine_id: str
    rank: int
    ranks: int
    memories: Sequence[Memory]
    regions: Sequence[Region]
    fds: Sequence[int] = ()
    events: Sequence[bytes] = ()


class RankClient(Registration):
    """Keeps one rank's memory registered until `close`, which says when the sidecar has let go of it."""

    def __init__(self, socket_path: str, layout: RankLayout, timeouts: Timeouts | None = None) -> None:
        self.layout = layout
        super().__init__(socket_path, layout.fds, timeouts)

    def _hello(self) -> Hello:
        layout = self.layout
        return Hello(
            PROTOCOL_VERSION,
            "worker",
            layout.engine_id,
            memories=list(layout.memories),
            regions=list(layout.regions),
            ranks=layout.ranks,
            rank=layout.rank,
            events=list(layout.events),
        )

    def _wait_disconnected(self) -> bool:
        """A rank has no step loop that would see the EOF, so the keeper watches for it."""
        while not self._closing:
            self._line.collect()
            link = self._line.link
            if link is None:
                return True
            if self._mark_due and self._marked is not None:  # the sidecar did not read when it was to be told
                self._tell_mark()
            link.connection.wait(SLICE_S)
        return False
