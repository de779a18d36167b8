"""The scheduler half's client where steps run on a device: what it sends names the step that its copies wait for.

A rank says `mark` when it has given a step to its device; the sidecar's copy then waits for the event behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents_service.engine.client import OffloadClient, PrefixHit
from kvevents_service.engine.plan import MakeOffer
from kvevents_service.wire.control import Offer


class MarkingClient(OffloadClient):
    """`landed`: the last step whose blocks are offered. `begun`: the last one that may use what a load overwrites.

    Ranks say 0 when they register: before the first step nothing waits.
    """

    landed = begun = 0

    def step(
        self,
        offers: Sequence[Offer],
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        mark: int | None = None,
    ) -> int | None:
        return super().step(offers, finished, preempted, self.landed if mark is None else mark)

    def post_step(
        self,
        makers: Sequence[MakeOffer],
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        mark: int | None = None,
    ) -> int | None:
        return super().post_step(makers, finished, preempted, self.landed if mark is None else mark)

    def load(
        self, request_id: str, hit: PrefixHit, block_ids: bytes, units: int | None = None, mark: int | None = None
    ) -> int | None:
        return super().load(request_id, hit, block_ids, units, self.begun if mark is None else mark)
