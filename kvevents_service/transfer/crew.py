"""Threads that copy: one that does jobs in order, and several that do the parts of one transfer side by side.

None keeps the process from ending: a disk or a driver that hangs never gives its thread back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

MIN_CORES = 4
"""With fewer cores a second thread would take one from the engine."""
NICE = 5
"""Copies yield to the engine and to the event loop: a block may come later, a lookup may not."""
T = TypeVar("T")


def default_threads() -> int:
    """2, or 1 on a small machine."""
    return 2 if len(os.sched_getaffinity(0)) >= MIN_CORES else 1


def give_way(nice: int = 0) -> None:
    """This thread takes the core from no other when it wakes, and gets less of it where it has to share.

    A core that the event loop has lost it gets back with the next tick of the system's clock: up to 4 ms later.
    """
    with suppress(OSError):  # a sandbox may forbid it, and the copies matter more
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + nice)  # of this thread


class Hand:
    """One thread, from its first job on."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Hand {self._thread.name} queued={self._jobs.qsize()}>"

    def submit(self, job: Callable[..., T], *args: object) -> Future[T]:
        """Do it behind those before. RuntimeError once it is closed."""
        if self._closed:
            raise RuntimeError("closed")
        future: Future[T] = Future()
        self._jobs.put((future, partial(job, *args)))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def _run(self) -> None:
        give_way(NICE)
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001 - whoever waits is told; the thread goes on
                    future.set_exception(error)
            del item, future, job  # what a job holds must not live until the next

    def close(self, wait_s: float | None = None, *, cancel: bool = True) -> bool:
        """Wait, so long, for the job under way; those behind it are cancelled first, or waited for, too.

        False if it has not ended: it is left alone.
        """
        self._closed = True
        if cancel:
            self._cancel_queued()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(None if wait_s is None else max(0.0, wait_s))
        return not self._thread.is_alive()

    def _cancel_queued(self) -> None:
        while True:
            try:
                item = self._jobs.get_nowait()
            except Empty:
                return
            if item is not None:
                item[0].cancel()


class Crew:
    """`threads` threads, the caller's own among them."""

    def __init__(self, threads: int = 1, name: str = "kvevents-crew") -> None:
        self.threads = threads
        self._hands = [Hand(f"{name}-{number}") for number in range(1, threads)]

    def __repr__(self) -> str:
        return f"<Crew {self.threads} threads>"

    def perform(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do all of them; returns or raises only when none runs any more."""
        if not self._hands or len(jobs) < 2:
            for job in jobs:
                job()
            return
        others = [self._hands[place % len(self._hands)].submit(job) for place, job in enumerate(jobs[1:])]
        try:
            jobs[0]()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """No job may be running."""
        for hand in self._hands:
            hand.close()
