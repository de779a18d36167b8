"""Our own consumer: `Subscriber` and `PrefixIndex`, as a small router would use them, in the dialect `vllm`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from consumer import Answer, Consumer, Endpoints
from truth import Held, run

from kvevents_service.prefix_index import PrefixIndex
from kvevents_service.subscriber import Source, Subscriber
from kvevents_service.testing import Chain

MEDIA = ("GPU", "CPU", "STORAGE")


class Ours(Consumer):
    """A subscriber in a loop of its own thread; the index is asked in that loop."""

    def __init__(self, endpoints: Endpoints, directory: Path) -> None:
        self._source = Source(endpoints.pub, endpoints.replay)
        self._index = PrefixIndex(endpoints.block_size)
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

    def ask(self, chain: Chain) -> Answer:
        return asyncio.run_coroutine_threadsafe(self._match(chain), self._loop).result(5.0)

    async def _match(self, chain: Chain) -> Answer:
        found = list(self._index.match(chain.token_ids).values())
        if not found:
            return (0,) * (len(MEDIA) + 1)
        return (found[0].tokens, *(found[0].media.get(medium, 0) for medium in MEDIA))

    def expect(self, chain: Chain, held: Held) -> Answer:
        return (run(chain, held, *MEDIA), *(run(chain, held, medium) for medium in MEDIA))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
