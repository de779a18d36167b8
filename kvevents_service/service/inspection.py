"""What can be loaded as of one number: cut at once, gathered piece by piece while the tiers go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.tier import Tier
from kvevents_service.wire.control import Inspected, Residents

KEY_BYTES: Final = 8
"""An inspection names blocks by the last 8 bytes of their hash, as the event stream does."""
PIECE_BLOCKS: Final = 1024
RUN_BLOCKS: Final = 8
"""What a run costs beside its blocks."""


class Inspection:
    """One answer on its way. `tiers`: those whose blocks are told."""

    def __init__(self, call_id: int, next_seq: int, stats: dict[str, int], tiers: Sequence[Tier]) -> None:
        self._answer = Inspected(call_id, next_seq, KEY_BYTES, stats)
        cuts = [(tier.spec.medium, tier.pool.cut()) for tier in tiers]
        self._runs = (run for _, cut in cuts for run in cut.runs())
        self._found: dict[tuple[str, int], list[bytes]] = {
            (tier.spec.medium, group.index): [] for tier in tiers for group in tier.spec.groups
        }

    def __repr__(self) -> str:
        return f"<Inspection of {len(self._found)} shelves>"

    def go_on(self) -> bool:
        """About PIECE_BLOCKS more; False if that was all."""
        left = PIECE_BLOCKS
        for run in self._runs:
            self._found[run.medium, run.group.index] += _keys(run)
            left -= run.blocks + RUN_BLOCKS
            if left <= 0:
                return True
        return False

    def inspected(self) -> Inspected:
        """The answer, with whatever is not gathered yet."""
        while self.go_on():
            pass
        shelves = [Residents(medium, group, b"".join(keys)) for (medium, group), keys in self._found.items()]
        answer = self._answer
        return Inspected(answer.call_id, answer.next_seq, answer.hash_bytes, answer.stats, shelves)


def _keys(run: BlockStoreMeta) -> Iterator[bytes]:
    packed, size = run.block_hashes, run.hash_bytes
    return (packed[end - KEY_BYTES : end] for end in range(size, len(packed) + 1, size))
