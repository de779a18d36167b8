"""What a subscriber is told to read, and what it tells."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvevents_service.core.sequence import NOWHERE, Gap, Origin, Restart, Resync
from kvevents_service.curve import ClientKeys
from kvevents_service.errors import WireError
from kvevents_service.wire.codec import Skipped
from kvevents_service.wire.events import EventBatch


class Source(NamedTuple):
    """One publisher's endpoints. A wildcard address is this machine.

    replay: where batches are asked for again: with it the history comes first, and holes are filled.
    snapshot: where the whole state is asked for in one message. Then the source is one publisher, whose numbers are
        those of the endpoint whatever the topic.
    topic: exactly this one; "" for all, each with numbers of its own.
    dp_rank: of the batches that do not say one.
    label: its name in the items; the endpoint, unless given.
    keys: of a publisher behind CURVE: ours, and its public one.
    """

    endpoint: str
    replay: str | None = None
    snapshot: str | None = None
    topic: str = ""
    dp_rank: int | None = None
    label: str = ""
    keys: ClientKeys | None = None

    @property
    def name(self) -> str:
        return self.label or self.endpoint


class Batch(NamedTuple):
    """One batch. skipped: what of it was left out (unknown events). replayed: it came by replay or snapshot.
    payload: as it came."""

    topic: bytes
    seq: int
    batch: EventBatch
    skipped: tuple[Skipped, ...]
    replayed: bool
    source: Origin = NOWHERE
    payload: bytes = b""


class Undecodable(NamedTuple):
    """A message that is no batch. If its number is known, that counts as delivered: no `Gap` follows for it."""

    topic: bytes
    seq: int | None
    error: WireError
    source: Origin = NOWHERE


class Stale(NamedTuple):
    """Nothing came from the source of this label for `silent_s`, no heartbeat either. What is known of it may be
    wrong; it is not void."""

    label: str
    silent_s: float


class Back(NamedTuple):
    """A stale source is heard again."""

    label: str


class Refused(NamedTuple):
    """The publisher of this label does not let us in; `reason` is for people. Said once, until that changes: it is
    asked again and again, and what comes when it does let us in is a history like any other."""

    label: str
    reason: str


Item: TypeAlias = Batch | Gap | Restart | Resync | Undecodable | Stale | Back | Refused
