"""A long step in parts, so that no call takes long: each part is a step of its own, with copies of its own.

    StepParts(step) -> step(part) for each of its parts -> ended(StepDone of a part) ... -> the StepDone of the step

Parts follow one another as they stand in the step. An offer that does not fit is cut between two blocks: what is
behind has the block before it for a parent. The steps of all parts have one id, which is nobody else's: an engine's
fits into 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import msgspec

from kvevents_service.core.metadata import TOKEN_BYTES
from kvevents_service.core.offers import shape_fault, split_hashes
from kvevents_service.core.tier import TierSpec
from kvevents_service.wire.control import InnerHash, Offer, Step, StepDone
from kvevents_service.wire.packing import INT32_BYTES

PART_IDS: Final = 1 << 64
"""The ids of parts begin here."""


class StepParts:
    """One step; `part_id` is that of its parts. `left`: parts that have not ended; nothing is known of them before
    they are made. `void`: what is left of it is not to be stored, as the engine's memory has changed."""

    def __init__(self, step: Step, spec: TierSpec, number: int) -> None:
        """number: of no other long step of the tier."""
        self.part_id = PART_IDS + number
        self.left = 1
        self.void = False
        self._step = step
        self._spec = spec
        self._done = StepDone(step.step_id, 0, 0, 0)

    def __repr__(self) -> str:
        return f"<StepParts of {self._done.step_id} left={self.left}>"

    def parts(self, blocks: int) -> Iterator[Step]:
        """Steps of up to so many blocks, with more in the one that has an offer that cannot be cut. The last one
        says what has finished."""
        offers: list[Offer] = []
        room = blocks
        for offer in self._step.offers:
            for piece in self._pieces(offer, room, blocks):
                if offers and room <= 0:
                    yield self._part(offers)
                    offers, room = [], blocks
                offers.append(piece)
                room -= block_count(piece)
        yield msgspec.structs.replace(self._step, step_id=self.part_id, offers=offers)

    def _part(self, offers: list[Offer]) -> Step:
        self.left += 1
        return Step(self.part_id, offers, mark=self._step.mark)

    def _pieces(self, offer: Offer, room: int, blocks: int) -> Iterator[Offer]:
        """The offer, or parts of it: the first one of up to `room` blocks. A faulty one is declined as a whole: in
        parts it might not be seen that a hash repeats."""
        spec, group, count = self._spec, self._spec.groups[offer.group], block_count(offer)
        first = room if room > 0 else blocks
        faulty = shape_fault(offer, group, spec.hash_bytes, spec.hash_tokens) is not None
        if count <= first or faulty or _repeats(offer, spec.hash_bytes):
            yield offer
            return
        bounds = [0, *range(first, count, blocks), count]
        for start, stop in pairwise(bounds):
            yield _cut(offer, start, stop, spec.hash_bytes, group.block_size * TOKEN_BYTES)

    def ended(self, done: StepDone) -> StepDone | None:
        """A part has ended. The sum of all, once that was the last."""
        sums, self.left = self._done, self.left - 1
        self._done = StepDone(
            sums.step_id, sums.stored + done.stored, sums.known + done.known, sums.declined + done.declined
        )
        return None if self.left else self._done


def block_count(offer: Offer) -> int:
    return len(offer.block_ids) // INT32_BYTES


def step_blocks(step: Step) -> int:
    """Blocks of all its offers."""
    return sum(map(block_count, step.offers))


def _repeats(offer: Offer, hash_bytes: int) -> bool:
    names = split_hashes(offer.block_hashes, hash_bytes)
    return len(set(names)) < len(names)


def _cut(offer: Offer, start: int, stop: int, hash_bytes: int, block_tokens: int) -> Offer:
    """Blocks [start, stop) of a well-formed offer. `block_tokens`: bytes of a block's token ids."""
    hashes = offer.block_hashes
    return Offer(
        offer.request_id,
        offer.group,
        hashes[start * hash_bytes : stop * hash_bytes],
        offer.token_ids[start * block_tokens : stop * block_tokens],
        offer.block_ids[start * INT32_BYTES : stop * INT32_BYTES],
        hashes[(start - 1) * hash_bytes : start * hash_bytes] if start else offer.parent,
        offer.lora_id,
        offer.lora_name,
        None if offer.extra_keys is None else offer.extra_keys[start:stop],
        _inner_of(offer, start, stop),
    )


def _inner_of(offer: Offer, start: int, stop: int) -> list[InnerHash] | None:
    if not offer.inner:
        return None
    own = [name for name in offer.inner if start <= name.block < stop]
    return [msgspec.structs.replace(name, block=name.block - start) for name in own]
