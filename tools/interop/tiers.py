"""A publisher with blocks on several tiers, made by hand: our event plane, fed with announcements of our own.

A sidecar has one tier of its own; what an engine holds on its GPU, or a disk, is another source of the stream.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from truth import NAME_BYTES, Held

from kvevents_service.config import ServeConfig
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, Cleared, RemovedRun
from kvevents_service.core.rows import Row
from kvevents_service.service.event_plane import bind_events
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.testing import Chain
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.packing import pack_int32

CALL_S = 10.0
LINGER_MS = 500
HASH_BYTES = 32


class Tier:
    """What is on one medium, in the order it came: parents first. A state source, and its own cut."""

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self.blocks: dict[bytes, BlockStoreMeta] = {}

    def sizes(self) -> list[tuple[int, int]]:
        return [(1, meta.group.block_size) for meta in self.blocks.values()]

    def rows(self) -> Iterator[Row]:
        return map(Row.of, self.blocks.values())

    def cut(self) -> Tier:
        frozen = Tier(self.medium)
        frozen.blocks = dict(self.blocks)
        return frozen

    def store(self, chain: Chain, start: int, stop: int) -> BlockStoreMeta:
        """Blocks [start, stop) of a prompt, those that are not there yet."""
        part = chain.part(start, stop)
        group = GroupSpec(0, "full_attention", chain.block_size, main=True)
        tokens = pack_int32(part.token_ids)
        meta = BlockStoreMeta(group, self.medium, HASH_BYTES, part.packed, tokens, part.parent, None, None, None)
        self.blocks |= {block_hash: meta.part(i, i + 1) for i, block_hash in enumerate(part.hashes)}
        return meta

    def remove(self, chain: Chain, start: int, stop: int) -> RemovedRun:
        """Blocks [start, stop) of a prompt, leaves first."""
        gone = tuple(reversed(chain.hashes[start:stop]))
        group = self.blocks[gone[0]].group
        for block_hash in gone:
            del self.blocks[block_hash]
        return RemovedRun(group, self.medium, gone)


class TierPublisher:
    """Runs in a thread of its own; `publish` returns when the batch is numbered."""

    def __init__(self, config: ServeConfig) -> None:
        self.tiers = {medium: Tier(medium) for medium in ("GPU", "CPU", "STORAGE")}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = SequenceStore(Path(config.state_dir)) if config.state_dir else None
        self._plane = bind_events(self._context, config, self._numbers)
        self._plane.renderer.recovery.sources = lambda: list(self.tiers.values())
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if self._plane.publisher.journal.next_seq:
            self.publish(lambda: [Cleared()])

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._main = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._main)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in self._plane.parts():
                group.create_task(part)

    def publish(self, change: Callable[[], Sequence[Announcement]]) -> None:
        """Change the tiers and say so, in one turn of the loop: a cut never falls between the two."""
        asyncio.run_coroutine_threadsafe(self._publish(change), self._loop).result(CALL_S)

    async def _publish(self, change: Callable[[], Sequence[Announcement]]) -> None:
        self._plane.publisher.publish(tuple(change()))

    def store(self, medium: str, chain: Chain, start: int, stop: int) -> None:
        self.publish(lambda: [self.tiers[medium].store(chain, start, stop)])

    def remove(self, medium: str, chain: Chain, start: int, stop: int) -> None:
        self.publish(lambda: [self.tiers[medium].remove(chain, start, stop)])

    def held(self) -> Held:
        return {
            medium: frozenset(name[-NAME_BYTES:] for name in tier.blocks) for medium, tier in self.tiers.items()
        }

    def close(self) -> None:
        if self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(CALL_S)
        self._context.destroy(linger=LINGER_MS)
        if self._numbers is not None:
            self._numbers.close(self._plane.publisher.journal.next_seq)
