"""`Subscriber` and `PrefixIndex`, as a small router would use them, in a loop of a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from kvevents_service.core.holders import Held
from kvevents_service.prefix_index import PrefixIndex
from kvevents_service.subscriber import Source, Subscriber

ANSWER_S = 5.0
CLOSE_S = 10.0


class IndexThread:
    """Follows one publisher until `close`. The index is asked in its own loop."""

    def __init__(self, source: Source, block_size: int) -> None:
        self._source = source
        self._index = PrefixIndex(block_size)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._follow(),), daemon=True)
        self._thread.start()

    async def _follow(self) -> None:
        async with Subscriber(self._source) as subscriber, asyncio.TaskGroup() as group:
            fold = group.create_task(self._fold(subscriber))
            await self._stop.wait()
            fold.cancel()

    async def _fold(self, subscriber: Subscriber) -> None:
        async for item in subscriber:
            self._index.take(item)

    def match(self, token_ids: Sequence[int]) -> Held | None:
        """What the publisher holds of a prompt."""
        return asyncio.run_coroutine_threadsafe(self._match(token_ids), self._loop).result(ANSWER_S)

    async def _match(self, token_ids: Sequence[int]) -> Held | None:
        return next(iter(self._index.match(token_ids).values()), None)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)
