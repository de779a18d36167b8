"""Worker coroutines: one per direction. They take transfers in order and copy off the event loop.

Every submit returns a future that carries its `TransferMeta`; it ends with None when the bytes are there, with
`CopyFailed` when they are not, and never before both sides are out of use. A transfer that is past its deadline
before its turn, or before its engine's device has got as far as its mark, is failed without a copy.

One thread copies, or begins what a device copies; another sleeps until the device is done. So some copies of a
device are under way at once, in the order of its stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.errors import KvEventsError
from kvevents_service.transfer.arena import Arena, BlocksLost
from kvevents_service.transfer.crew import Hand
from kvevents_service.transfer.memory import BlockMemory

MAX_BEGUN = 4
"""Copies of a direction that a device may have before it: enough that it never waits for us."""


CLOSE_S = 10.0
"""A copy that takes longer than that to end hangs."""


class CopyFailed(KvEventsError):
    """A copy did not bring its bytes over. `lost`: slots whose bytes are gone for good."""

    def __init__(self, message: str, lost: array[int] | None = None) -> None:
        super().__init__(message)
        self.lost = array("i") if lost is None else lost


class OwnerGone(CopyFailed):
    """Its engine ended, or was killed, before it began: nothing is wrong here."""


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
        self._begun: set[TransferFuture] = set()
        self._room = asyncio.Semaphore(MAX_BEGUN)
        self._copier = Hand(f"kvevents-{kind}")
        self._waiter = Hand(f"kvevents-{kind}-end")

    def __repr__(self) -> str:
        return f"<CopyWorker {self.kind} queued={self._jobs.qsize()} moved={self.bytes_moved}>"

    def submit(self, transfer: TransferMeta, memory: BlockMemory, mark: int | None = None) -> TransferFuture:
        """Queue one copy, as soon as the memory's owner has reached `mark`."""
        future = TransferFuture(transfer, loop=asyncio.get_running_loop())
        self._open[future] = memory
        future.add_done_callback(self._open.pop)
        go = partial(self._jobs.put_nowait, _Job(future, memory))
        if mark is None or mark <= memory.marks.reached:
            go()
        else:
            self._hold(future, memory, mark, go)
        return future

    def _hold(self, future: TransferFuture, memory: BlockMemory, mark: int, go: Callable[[], None]) -> None:
        memory.marks.when(mark, go)
        left = max(0.0, future.meta.deadline - self._clock())
        timer = future.get_loop().call_later(left, self._expire, future, mark)

        def forget(_: object) -> None:
            timer.cancel()
            memory.marks.forget(go)

        future.add_done_callback(forget)

    def _expire(self, future: TransferFuture, mark: int) -> None:
        if not future.done() and future not in self._begun:
            future.set_exception(CopyFailed(f"past its deadline before mark {mark}, or its turn"))

    def drop(self, memory: BlockMemory) -> None:
        """This memory's owner is gone: fail what is queued on it. Copies that were begun go on to their end."""
        for future, its_memory in tuple(self._open.items()):
            if its_memory is memory and future not in self._begun and not future.done():
                future.set_exception(OwnerGone("the memory's owner is gone"))

    async def run(self) -> None:
        """Copy until cancelled. Copies that were begun before are waited for by `close`."""
        while True:
            await self._room.acquire()
            future, memory = await self._next()
            self._begun.add(future)
            try:
                rest = await self._begin(future.meta, memory)
            except CopyFailed as error:
                self._end(future, error)
            else:
                if rest is None:
                    self._end(future, None)
                else:
                    rest.add_done_callback(partial(self._rested, future))

    async def _next(self) -> _Job:
        """The first of the queue that was not dropped there."""
        while (job := await self._jobs.get()).future.done():
            pass
        return job

    async def _begin(self, meta: TransferMeta, memory: BlockMemory) -> asyncio.Future[None] | None:
        """Copy. What is returned, if anything, ends when a device has done the copy."""
        if self._clock() > meta.deadline:
            raise CopyFailed("past its deadline before its turn")
        if not memory.intact():
            raise CopyFailed("the engine's memory has shrunk below its mapping")
        copied = self._copier.submit(self._in_thread, memory, meta.engine_blocks, meta.slots)
        try:
            rest = await asyncio.wrap_future(copied)
        except Exception as error:  # the border of a copy: a worker that ended would hold every later transfer
            raise _failed(error) from error
        return None if rest is None else asyncio.wrap_future(rest)

    def _in_thread(self, memory: BlockMemory, blocks: array[int], slots: array[int]) -> Future[None] | None:
        """Whatever becomes of the coroutine: what has been begun is waited for by the other thread."""
        rest = self._copy(memory, blocks, slots)
        return None if rest is None else self._waiter.submit(rest)

    def _rested(self, future: TransferFuture, rest: asyncio.Future[None]) -> None:
        error = asyncio.CancelledError() if rest.cancelled() else rest.exception()
        self._end(future, None if error is None else _failed(error))

    def _end(self, future: TransferFuture, error: CopyFailed | None) -> None:
        self._begun.discard(future)
        self._room.release()
        if error is None:
            self.bytes_moved += future.meta.blocks * self._arena.block_bytes
        if future.done():  # the worker was closed meanwhile
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def close(self, until: float | None = None) -> bool:
        """Wait for the copies that were begun, end the threads, and fail whatever has not ended.

        until: of the clock; CLOSE_S from now. False if a copy has not ended by then: a disk or a driver hangs, and
        both sides of that copy stay in use until the process ends, which it does not keep from ending.
        """
        until = self._clock() + CLOSE_S if until is None else until
        ended = [self._copier.close(until - self._clock())]
        ended.append(self._waiter.close(until - self._clock(), cancel=False))  # what a device has begun goes on
        for future in tuple(self._open):
            if not future.done():
                future.set_exception(CopyFailed("the worker was closed"))
        return all(ended)


def _failed(error: BaseException) -> CopyFailed:
    lost = error.slots if isinstance(error, BlocksLost) else None
    return CopyFailed(str(error) if lost else f"{type(error).__name__}: {error}", lost)
