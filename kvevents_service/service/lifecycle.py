"""How a service of ours lives: its numbers, its signals, its drain, its exit code.

0  stopped by a signal, drained
1  a part of the service failed
2  the settings cannot work
3  stopped before it was drained
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from kvevents_service.service.numbering import SequenceStore

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_FORCED = 0, 1, 2, 3
LINGER_MS = 500

ReadyT = TypeVar("ReadyT")
ReadyT_co = TypeVar("ReadyT_co", covariant=True)


class Started(Protocol[ReadyT_co]):
    """A service that is bound and listening."""

    @property
    def ready(self) -> ReadyT_co:
        """Where it can be reached."""

    def parts(self) -> Sequence[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""

    async def drain(self) -> None:
        """End in good order."""


def numbers_of(state_dir: str | Path | None) -> SequenceStore | None:
    """The numbers that are kept there. ConfigError if they cannot be."""
    if state_dir is not None:
        return SequenceStore(Path(state_dir))
    log.info("no state_dir: event numbers start at 0, also after a restart")
    return None


async def run_until_signal(
    starting: AbstractAsyncContextManager[Started[ReadyT]], on_ready: Callable[[ReadyT], None], stop_s: float
) -> int:
    """Run until a signal; returns the exit code. ConfigError if something cannot be bound or opened."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        async with starting as service:
            on_ready(service.ready)
            return await _run(service, signals, stop_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it is over: a late signal must not change the exit code


async def _run(service: Started[ReadyT], signals: asyncio.Queue[signal.Signals], stop_s: float) -> int:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        log.info("signal %s: draining", (await signals.get()).name)
        code = await _drain(service, signals, stop_s)
        for task in tasks:
            task.cancel()
    return code


async def _drain(service: Started[ReadyT], signals: asyncio.Queue[signal.Signals], stop_s: float) -> int:
    """Drain within `stop_s` or until a second signal."""
    draining = asyncio.create_task(service.drain())
    second = asyncio.create_task(signals.get())
    done, _ = await asyncio.wait({draining, second}, timeout=stop_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, second):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    if draining in done:
        return EXIT_OK
    log.warning("stopped before it was drained")
    return EXIT_FORCED
