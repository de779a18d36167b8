"""What a small router starts from: how many tokens of a prompt each publisher holds, on each tier.

index = PrefixIndex()
async with Subscriber(sources, stale_after_s=10, read_tokens=True) as subscriber:
    async for item in subscriber:
        index.take(item)
...
held = index.match(token_ids)  # {Origin: Held(tokens, {"GPU": tokens, "CPU": tokens})}
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from kvevents_service.core.holders import Held
from kvevents_service.core.prefix_index import MAX_ORPHANS, BlockIndex
from kvevents_service.core.sequence import Origin
from kvevents_service.items import Back, Batch, Item, Refused, Stale
from kvevents_service.wire.events import BlockHash, Event

log = logging.getLogger(__name__)

_MEANING: Final = {
    "other_block_size": "stores of another block size than the %s tokens expected are left out: they never match",
    "malformed": "stores whose tokens, hashes and extra keys (block size expected: %s) do not line up are left out",
}


class PrefixIndex(BlockIndex):
    """A `BlockIndex` that is fed with a subscriber's items. Its answers are by `Item.source`, an `Origin`.

    A stale source keeps what it holds, but is left out of the answers; unless all are stale: then it is rather our
    network, and old knowledge is better than none.
    """

    def __init__(self, block_size: int | None = None, max_orphans: int = MAX_ORPHANS) -> None:
        super().__init__(block_size, max_orphans)
        self.stale: set[str] = set()
        self._warned: Counter[str] = Counter()

    def take(self, item: Item) -> None:
        """Fold one item of a `Subscriber`. After a loss nothing is known of that source."""
        match item:
            case Batch():
                self.apply(item.source, item.batch.events)
            case Stale():
                self.stale.add(item.label)
            case Back():
                self.stale.discard(item.label)
            case Refused():
                pass  # it was never heard, or it will be stale
            case _:
                self.forget(item.source)

    def apply(self, source: Hashable, events: Iterable[Event]) -> None:
        """Fold one batch of a source, in order. What cannot be used is counted and, now and then, said."""
        super().apply(source, events)
        for name, meaning in _MEANING.items():
            count = self.counts[name]
            if count and count >= self._warned[name] * 10:
                self._warned[name] = count
                log.warning(f"%s: {meaning} (%d so far)", source, self.block_size or "first", count)

    def match(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[object] | None = None,
    ) -> dict[Hashable, Held]:
        return self._live(super().match(token_ids, lora_name=lora_name, salt=salt, extra_keys=extra_keys))

    def match_hashes(self, block_hashes: Sequence[BlockHash]) -> dict[Hashable, Held]:
        return self._live(super().match_hashes(block_hashes))

    def _live(self, found: dict[Hashable, Held]) -> dict[Hashable, Held]:
        labels = {_label(source) for source in self.sources}
        if not self.stale or labels <= self.stale:
            return found
        return {source: held for source, held in found.items() if _label(source) not in self.stale}


def _label(source: Hashable) -> Hashable:
    return source.label if isinstance(source, Origin) else source
