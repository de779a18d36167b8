"""What was said, counted by kind, and the last few of it. Costs a few operations an event, none a block."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvevents_service.core.journal import PendingBatch
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, RemovedRun
from kvevents_service.core.privacy import mapped
from kvevents_service.wire.dialects import Dialect, Groups

LATEST: Final = 40
SHORT_BYTES: Final = 4
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


class Kind(NamedTuple):
    """What decides whether a dialect lets an event through. `medium` is "" for a clear: it is of every one."""

    type: str
    medium: str
    main: bool
    inner: bool


class Told(NamedTuple):
    """One event without its tokens; of its hashes the first and the last, short. ts: seconds since the epoch."""

    seq: int
    ts: float
    type: str
    medium: str
    group: int
    blocks: int
    first: str
    last: str


class Tally:
    """Every event of every batch that was sent. hash_key: hashes are shown as outputs with that key name them."""

    def __init__(self, hash_key: bytes | None = None) -> None:
        self._hash_key = hash_key
        self.events: Counter[Kind] = Counter()
        self.blocks: Counter[Kind] = Counter()
        self._latest: deque[tuple[int, float, Kind, int, int, bytes, bytes]] = deque(maxlen=LATEST)

    def __repr__(self) -> str:
        return f"<Tally {self.events.total()} events>"

    def add(self, batch: PendingBatch) -> None:
        for item in batch.announcements:
            kind, group, blocks, first, last = _summary(item)
            self.events[kind] += 1
            self.blocks[kind] += blocks
            self._latest.append((batch.seq, batch.ts, kind, group, blocks, first, last))

    def latest(self) -> list[Told]:
        """The last `LATEST` events, the newest last."""
        return [
            Told(seq, ts, kind.type, kind.medium, group, blocks, self._short(first), self._short(last))
            for seq, ts, kind, group, blocks, first, last in self._latest
        ]

    def _short(self, block_hash: bytes) -> str:
        """The same 8 digits that `kvevents tail` shows."""
        name = block_hash if self._hash_key is None or not block_hash else mapped(block_hash, self._hash_key)
        return name[-8:][:SHORT_BYTES].hex()

    def said_in(self, dialect: Dialect) -> Iterator[tuple[str, str, int]]:
        """Type, medium as the dialect calls it, and how many events it says of what was counted."""
        counted: Counter[tuple[str, str]] = Counter()
        for kind, events in self.events.items():
            medium = _let_through(dialect, kind)
            if medium is not None:
                one_by_one = dialect.one_hash and kind.type != CLEARED
                counted[kind.type, medium] += self.blocks[kind] if one_by_one else events
        return ((*where, events) for where, events in counted.items())


def _summary(item: Announcement) -> tuple[Kind, int, int, bytes, bytes]:
    match item:
        case BlockStoreMeta():
            kind = Kind(STORED, item.medium, item.group.main, item.inner)
            return kind, item.group.index, item.blocks, item.hash_at(0), item.block_hashes[-item.hash_bytes :]
        case RemovedRun():
            kind = Kind(REMOVED, item.medium, item.group.main, item.inner)
            hashes = item.block_hashes
            return kind, item.group.index, len(hashes), hashes[0], hashes[-1]
        case _:
            return Kind(CLEARED, "", True, False), 0, 0, b"", b""


def _let_through(dialect: Dialect, kind: Kind) -> str | None:
    if kind.type == CLEARED:
        return ""
    if (kind.inner and not dialect.inner) or (dialect.groups is Groups.MAIN and not kind.main):
        return None
    return dialect.medium(kind.medium)
