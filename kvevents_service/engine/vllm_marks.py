"""The scheduler half's client where steps run on a device: what it sends names the step that its copies wait for.

A rank says `mark` when it has given a step to its device; the sidecar's copy then waits for the event behind it.
"""

from __future__ import annotations

from kvevents_service.engine.client import OffloadClient


class MarkingClient(OffloadClient):
    """`landed`: the last step whose blocks are offered. `begun`: the last one that may use what a load overwrites.

    Ranks say 0 when they register: before the first step nothing waits.
    """

    landed: int = 0
    begun: int = 0
