"""Fakes for tests of code that uses this package: chains of block hashes, a clock, copies that need no memory.

No torch, no sockets, no time: what a scheduler decides can be tested in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.metadata import Announcement, TransferMeta
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.engine.offers import make_offer
from kvevents_service.wire.control import Offer, SidecarMessage
from kvevents_service.wire.packing import pack_int32


class Chain(NamedTuple):
    """Consecutive blocks of one prompt. `token_ids` are those of exactly these blocks."""

    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    block_size: int
    parent: bytes | None = None

    @property
    def packed(self) -> bytes:
        """The hashes as a lookup wants them."""
        return b"".join(self.hashes)

    def part(self, start: int, stop: int | None = None) -> Chain:
        """Blocks [start, stop) with the parent that is theirs."""
        tokens = self.token_ids[start * self.block_size : len(self.hashes[:stop]) * self.block_size]
        return Chain(self.hashes[start:stop], tokens, self.block_size, ([self.parent, *self.hashes])[start])

    def offer(self, block_ids: Iterable[int], *, request_id: str = "r", group: int = 0) -> Offer:
        """The offer of all these blocks, which lie in `block_ids` of the engine."""
        return make_offer(request_id, self.hashes, self.token_ids, list(block_ids), group=group, parent=self.parent)


def make_chain(token_ids: Sequence[int], block_size: int, parent: bytes | None = None) -> Chain:
    """The whole blocks of a prompt behind `parent`: hash i is sha256(hash i-1 + packed tokens of block i)."""
    blocks = len(token_ids) // block_size
    hashes: list[bytes] = []
    for start in range(0, blocks * block_size, block_size):
        before = hashes[-1] if hashes else parent or b""
        hashes.append(sha256(before + pack_int32(token_ids[start : start + block_size])).digest())
    return Chain(tuple(hashes), tuple(token_ids[: blocks * block_size]), block_size, parent)


class ManualClock:
    """A clock that stands still until it is told to move. Call it for the time, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __repr__(self) -> str:
        return f"<ManualClock {self.now}>"

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class HeldCopies:
    """Takes a scheduler's commands; copies stay pending until `complete` or `fail`, in any order."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.scheduler = scheduler
        self.pending: list[TransferMeta] = []
        self.published: list[Announcement] = []

    def perform(self, commands: Iterable[Command]) -> list[SidecarMessage]:
        """Do what the scheduler decided; returns its replies."""
        replies: list[SidecarMessage] = []
        for command in commands:
            match command:
                case Publish(announcements):
                    self.published += announcements
                case Copy(transfer):
                    replies += self._start(transfer)
                case Reply(_, message):
                    replies.append(message)
        return replies

    def _start(self, transfer: TransferMeta) -> list[SidecarMessage]:
        self.pending.append(transfer)
        return []

    def complete(self, position: int = 0) -> list[SidecarMessage]:
        """The pending copy at this position ends well."""
        return self.perform(self.scheduler.complete(self.pending.pop(position)))

    def fail(self, position: int = 0, lost: Sequence[int] = ()) -> list[SidecarMessage]:
        """The pending copy at this position ends badly; bytes in the `lost` slots are gone for good."""
        return self.perform(self.scheduler.fail(self.pending.pop(position), lost))


class InstantCopies(HeldCopies):
    """Copies that end well as soon as they are asked for."""

    def _start(self, transfer: TransferMeta) -> list[SidecarMessage]:
        return self.perform(self.scheduler.complete(transfer))
