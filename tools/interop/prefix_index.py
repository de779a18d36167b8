"""Our own consumer: `Subscriber` and `PrefixIndex`, in the dialect `vllm`."""

from __future__ import annotations

from pathlib import Path

from consumer import Answer, Consumer, Endpoints
from index_thread import IndexThread
from truth import Held, run

from kvevents_service.subscriber import Source
from kvevents_service.testing import Chain

MEDIA = ("GPU", "CPU", "STORAGE")


class Ours(Consumer):
    """What `PrefixIndex` says of a chain."""

    def __init__(self, endpoints: Endpoints, directory: Path) -> None:
        self._index = IndexThread(Source(endpoints.pub, endpoints.replay), endpoints.block_size)

    def ask(self, chain: Chain) -> Answer:
        found = self._index.match(chain.token_ids)
        if found is None:
            return (0,) * (len(MEDIA) + 1)
        return (found.tokens, *(found.media.get(medium, 0) for medium in MEDIA))

    def expect(self, chain: Chain, held: Held) -> Answer:
        return (run(chain, held, *MEDIA), *(run(chain, held, medium) for medium in MEDIA))

    def close(self) -> None:
        self._index.close()
