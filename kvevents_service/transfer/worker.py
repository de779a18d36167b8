"""Worker coroutines: one per direction. They take transfers in order and copy off the event loop.

Every submit returns a future that carries its `TransferMeta`; it ends with None when the bytes are there, with
`CopyFailed` when they are not. A transfer that is past its deadline before its turn is failed without a copy.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.errors import KvEventsError
from kvevents_service.transfer.arena import Arena, BlocksLost
from kvevents_service.transfer.memory import BlockMemory


class CopyFailed(KvEventsError):
    """A copy did not bring its bytes over. `lost`: slots whose bytes are gone for good."""

    def __init__(self, message: str, lost: array[int] | None = None) -> None:
        super().__init__(message)
        self.lost = array("i") if lost is None else lost


class TransferFuture(asyncio.Future[None]):
    """The end of one copy. `meta` says what was copied, long after its request is gone."""

    def __init__(self, meta: TransferMeta, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.meta = meta


class _Job(NamedTuple):
    future: TransferFuture
    memory: BlockMemory


class CopyWorker:
    """Copies in one direction ("store" or "load"). The scheduler bounds how much can be queued."""

    def __init__(self, kind: str, arena: Arena, clock: Callable[[], float]) -> None:
        self.kind = kind
        self.bytes_moved = 0
        self._arena = arena
        self._clock = clock
        self._copy = arena.store if kind == "store" else arena.load
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._open: dict[TransferFuture, BlockMemory] = {}
        self._running: TransferFuture | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"kvevents-{kind}")

    def __repr__(self) -> str:
        return f"<CopyWorker {self.kind} queued={self._jobs.qsize()} moved={self.bytes_moved}>"

    def submit(self, transfer: TransferMeta, memory: BlockMemory) -> TransferFuture:
        """Queue one copy."""
        future = TransferFuture(transfer, loop=asyncio.get_running_loop())
        self._open[future] = memory
        future.add_done_callback(self._open.pop)
        self._jobs.put_nowait(_Job(future, memory))
        return future

    def drop(self, memory: BlockMemory) -> None:
        """This memory's owner is gone: fail what is queued on it. A copy that runs goes on to its end."""
        for future, its_memory in tuple(self._open.items()):
            if its_memory is memory and future is not self._running and not future.done():
                future.set_exception(CopyFailed("the memory's owner is gone"))

    async def run(self) -> None:
        """Copy until cancelled. A copy that is running when it is cancelled is waited for by `close`."""
        while True:
            future, memory = await self._jobs.get()
            if future.done():  # dropped while it was queued
                continue
            self._running = future
            try:
                await self._perform(future.meta, memory)
            except CopyFailed as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    async def _perform(self, meta: TransferMeta, memory: BlockMemory) -> None:
        if self._clock() > meta.deadline:
            raise CopyFailed("past its deadline before its turn")
        if not memory.intact():
            raise CopyFailed("the engine's memory has shrunk below its mapping")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._copy, memory, meta.engine_blocks, meta.slots)
        except BlocksLost as error:
            raise CopyFailed(str(error), error.slots) from error
        except Exception as error:  # the border of a copy: a worker that ended would hold every later transfer
            raise CopyFailed(f"{type(error).__name__}: {error}") from error
        self.bytes_moved += meta.blocks * self._arena.block_bytes

    def close(self) -> None:
        """Wait for the copy that is running, end the thread, and fail whatever has not ended."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        for future in tuple(self._open):
            if not future.done():
                future.set_exception(CopyFailed("the worker was closed"))
