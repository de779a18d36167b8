"""Packing offers, and the book of blocks that a pending offer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvevents_service.wire.control import Offer, StepDone
from kvevents_service.wire.packing import pack_int32


def make_offer(
    request_id: str,
    block_hashes: Sequence[bytes],
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    group: int = 0,
    parent: bytes | None = None,
    lora_id: int | None = None,
    lora_name: str | None = None,
    extra_keys: list[tuple[Any, ...] | None] | None = None,
) -> Offer:
    """An offer of consecutive finished blocks. `token_ids` are those of exactly these blocks."""
    return Offer(
        request_id,
        group,
        b"".join(block_hashes),
        pack_int32(token_ids),
        pack_int32(block_ids),
        parent,
        lora_id,
        lora_name,
        extra_keys,
    )


class OfferBook:
    """Holds the engine's blocks while a step's copies are pending: `hold` and `settle` come in pairs (I9).

    `touch` and `free` are the engine's own: raise and lower the reference counts of blocks. At most `max_blocks`
    blocks should be held at once: `room` tells before an offer is made.
    """

    def __init__(
        self,
        touch: Callable[[Sequence[int]], None],
        free: Callable[[Sequence[int]], None],
        max_blocks: int,
    ) -> None:
        self.max_blocks = max_blocks
        self.held_blocks = 0
        self._touch = touch
        self._free = free
        self._held: dict[int, Sequence[int]] = {}

    def __repr__(self) -> str:
        return f"<OfferBook {self.held_blocks}/{self.max_blocks} blocks of {len(self._held)} steps>"

    @property
    def room(self) -> int:
        """How many more blocks may be held now."""
        return self.max_blocks - self.held_blocks

    def hold(self, step_id: int | None, block_ids: Sequence[int]) -> None:
        """Keep the blocks of a step that was sent (None: it was dropped, nothing to keep)."""
        if step_id is not None and block_ids:
            self._touch(block_ids)
            self._held[step_id] = block_ids
            self.held_blocks += len(block_ids)

    def settle(self, done: Iterable[StepDone]) -> None:
        """Give back the blocks of steps that have ended."""
        for end in done:
            block_ids = self._held.pop(end.step_id, ())
            if block_ids:
                self.held_blocks -= len(block_ids)
                self._free(block_ids)
