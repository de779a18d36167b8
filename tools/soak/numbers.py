"""A subscriber that decodes nothing: it follows the numbers as every subscriber does, and peeks at the batches.

Many of them fit on a small machine. They look for messages when a pause is over, not at each one.
"""

from __future__ import annotations

from typing import Final

from kvevents_service.errors import WireError
from kvevents_service.feed import Feed
from kvevents_service.items import Batch, Source, Undecodable
from kvevents_service.lane import Lane, Options
from kvevents_service.subscriber import Subscriber
from kvevents_service.wire.events import EventBatch
from kvevents_service.wire.frames import LiveFrame
from kvevents_service.wire.peek import peek

NOT_DECODED: Final = EventBatch(0.0, [])


class NumbersFeed(Feed):
    """Its batches are empty, whatever they hold. What is no batch, as far as `peek` can tell, is `Undecodable`."""

    def _decoded(self, lane: Lane, frame: LiveFrame, replayed: bool) -> Batch | Undecodable:
        if peek(frame.payload) is None:
            lane.sequence.distrust()
            return Undecodable(frame.topic, frame.seq, WireError("payload", "a batch"), lane.origin)
        return Batch(frame.topic, frame.seq, NOT_DECODED, (), replayed, lane.origin, frame.payload)


class Numbers(Subscriber):
    """Of one source."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._feeds = (NumbersFeed(source, Options(), self._wake.set),)
        self._turns.clear()
        self._turns.extend(self._feeds)

    async def __aenter__(self) -> Numbers:
        await super().__aenter__()
        for feed in self._feeds:
            assert feed._live is not None, "it was just opened"
            feed._live._receiver.close()  # nothing wakes it: `Feed` looks every RECHECK_S
        return self
