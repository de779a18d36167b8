"""Packing offers, and the book of blocks that a pending offer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

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


Lent = Mapping[str, Sequence[int]]
"""Blocks by the request that holds them itself: the engine says so before it takes them from it."""
NOTHING_LENT: Final[Lent] = {}


class OfferBook:
    """Holds the engine's blocks while a step's copies are pending: `hold` and `settle` come in pairs (I9).

    `touch` and `free` are the engine's own: raise and lower the reference counts of blocks. At most `max_blocks`
    blocks should be held at once: `room` tells before an offer is made. What a request lends is held by it: it is
    touched when the request lets go of it before the copies have ended (`take_over`), which few do.
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
        self._lent: dict[int, dict[str, Sequence[int]]] = {}
        self._kept: list[int] = []

    def __repr__(self) -> str:
        steps = len(self._held.keys() | self._lent.keys())
        return f"<OfferBook {self.held_blocks}/{self.max_blocks} blocks of {steps} steps>"

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

    def hold(self, step_id: int | None, block_ids: Sequence[int], lent: Lent = NOTHING_LENT) -> None:
        """Hold the blocks of a step that was sent, and what was kept for it. None: it was dropped, hold nothing."""
        if step_id is None:
            self.drop()
            return
        if block_ids:
            self._touch(block_ids)
            self.held_blocks += len(block_ids)
        if block_ids or self._kept:
            self._held[step_id] = [*self._kept, *block_ids] if self._kept else block_ids
            self._kept = []
        if lent:
            self.held_blocks += _blocks(lent)
            self._lent[step_id] = dict(lent)

    # what running requests lend

    @property
    def lenders(self) -> set[str]:
        """Requests that hold blocks for steps which have not ended."""
        return {request_id for lent in self._lent.values() for request_id in lent}

    def lends(self, request_id: str) -> bool:
        """This one is among them."""
        return any(request_id in lent for lent in self._lent.values())

    def take_over(self, request_id: str) -> None:
        """This request is about to let go of its blocks."""
        for step_id, lent in self._lent.items():
            block_ids = lent.pop(request_id, None)
            if block_ids:
                self._touch(block_ids)
                self._held[step_id] = [*self._held.get(step_id, ()), *block_ids]

    def take_over_all(self) -> None:
        """Any request may be about to."""
        for request_id in self.lenders:
            self.take_over(request_id)

    def lends_any_of(self, block_ids: Iterable[int]) -> bool:
        """One of these blocks is lent. No other may write to it, whoever has it by now."""
        return bool(self._lent) and not self._lent_blocks().isdisjoint(block_ids)

    def _lent_blocks(self) -> set[int]:
        return {block for lent in self._lent.values() for block_ids in lent.values() for block in block_ids}

    def void(self) -> None:
        """The sidecar has said that no copy of what was offered is of any use: what was lent need not be held."""
        self.held_blocks -= sum(map(_blocks, self._lent.values()))
        self._lent.clear()

    def settle(self, done: Iterable[StepDone]) -> None:
        """Give back the blocks of steps that have ended."""
        for end in done:
            self.held_blocks -= _blocks(self._lent.pop(end.step_id, NOTHING_LENT))
            self._give_back(self._held.pop(end.step_id, ()))

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Last ones first: an engine that reuses what was freed first then loses leaves before their parents."""
        if block_ids:
            self.held_blocks -= len(block_ids)
            self._free(block_ids[::-1])


def _blocks(lent: Lent) -> int:
    return sum(map(len, lent.values()))
