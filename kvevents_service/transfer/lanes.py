"""One rank's part of a tier: its arena, and a worker for each direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.transfer.arena import Arena
from kvevents_service.transfer.memory import BlockMemory
from kvevents_service.transfer.worker import CopyWorker, TransferFuture

DIRECTIONS = {"store": "store", "demote": "store", "load": "load", "promote": "load"}
"""Of each kind of copy: into the arena, or out of it."""


class Lanes:
    """Copies between one rank's memory and its arena. `close` ends what it started; the tasks end soon after."""

    def __init__(self, arena: Arena, clock: Callable[[], float]) -> None:
        self.arena = arena
        self._workers = {kind: CopyWorker(kind, arena, clock) for kind in ("store", "load")}
        self.tasks = [asyncio.create_task(worker.run()) for worker in self._workers.values()]

    def __repr__(self) -> str:
        return f"<Lanes {self.arena!r} {list(self._workers.values())}>"

    @property
    def bytes_moved(self) -> int:
        return sum(worker.bytes_moved for worker in self._workers.values())

    def submit(self, transfer: TransferMeta, memory: BlockMemory, mark: int | None = None) -> TransferFuture:
        """Queue one copy behind those of its direction, as soon as the rank has reached `mark`."""
        return self._workers[DIRECTIONS[transfer.kind]].submit(transfer, memory, mark)

    def drop(self, memory: BlockMemory) -> None:
        """Fail what is queued on this memory."""
        for worker in self._workers.values():
            worker.drop(memory)

    def close(self, until: float | None = None) -> bool:
        """Wait for the copies that run, and fail what is queued. As `CopyWorker.close`."""
        for task in self.tasks:
            task.cancel()
        return all([worker.close(until) for worker in self._workers.values()])
