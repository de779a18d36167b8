"""Packing offers, and the book of blocks that a pending offer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvevents_service.wire.control import InnerHash, Offer, StepDone
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
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    inner: list[InnerHash] | None = None,
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
        None if extra_keys is None else list(extra_keys),
        inner,
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
        self._kept: list[int] = []

    def __repr__(self) -> str:
        return f"<OfferBook {self.held_blocks}/{self.max_blocks} blocks of {len(self._held)} steps>"

    @property
    def room(self) -> int:
        """How many more blocks may be held now."""
        return self.max_blocks - self.held_blocks

    def keep(self, block_ids: Sequence[int], *, held: bool = False) -> None:
        """Hold blocks already that the next step will offer: their request is about to let go of them.

        `held`: they are held, by one who leaves that to the book from here on.
        """
        if not held:
            self._touch(block_ids)
        self._kept += block_ids
        self.held_blocks += len(block_ids)

    def drop(self) -> None:
        """Give back what was kept: the next step will not offer it after all."""
        kept, self._kept = self._kept, []
        self._give_back(kept)

    def hold(self, step_id: int | None, block_ids: Sequence[int]) -> None:
        """Hold the blocks of a step that was sent, and what was kept for it. None: it was dropped, hold nothing."""
        if step_id is None:
            self.drop()
        elif block_ids or self._kept:
            self._touch(block_ids)
            self.held_blocks += len(block_ids)
            self._held[step_id] = [*self._kept, *block_ids] if self._kept else block_ids
            self._kept = []

    def settle(self, done: Iterable[StepDone]) -> None:
        """Give back the blocks of steps that have ended."""
        for end in done:
            self._give_back(self._held.pop(end.step_id, ()))

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Last ones first: an engine that reuses what was freed first then loses leaves before their parents."""
        if block_ids:
            self.held_blocks -= len(block_ids)
            self._free(block_ids[::-1])
