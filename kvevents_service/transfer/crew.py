"""Threads that copy the parts of one transfer side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

MIN_CORES = 4
"""With fewer cores a second thread would take one from the engine."""


def default_threads() -> int:
    """2, or 1 on a small machine."""
    return 2 if len(os.sched_getaffinity(0)) >= MIN_CORES else 1


class Crew:
    """`threads` threads, the caller's own among them."""

    def __init__(self, threads: int = 1, name: str = "kvevents-crew") -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix=name) if threads > 1 else None

    def __repr__(self) -> str:
        return f"<Crew {self.threads} threads>"

    def perform(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do all of them; returns or raises only when none runs any more."""
        if self._pool is None or len(jobs) < 2:
            for job in jobs:
                job()
            return
        others = [self._pool.submit(job) for job in jobs[1:]]
        try:
            jobs[0]()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """No job may be running."""
        if self._pool is not None:
            self._pool.shutdown()
