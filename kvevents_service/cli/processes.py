"""The demo's child processes: started as a person would start them, ended by their own pid."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from kvevents_service.errors import SidecarGone

STOP_S = 10.0
START_S = 30.0
MAX_LINE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


class Child:
    """One child process whose stdout is read line by line; its stderr is ours."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.process.pid} code={self.process.returncode}>"

    async def line(self, wait_s: float | None = None) -> bytes:
        """The next line of stdout; b"" at its end. SidecarGone if none came in `wait_s`."""
        assert self.process.stdout is not None, "children are started with a pipe"
        try:
            async with asyncio.timeout(wait_s):
                return await self.process.stdout.readline()
        except TimeoutError:
            raise SidecarGone(f"the {self.name} (pid {self.process.pid}) said nothing for {wait_s:.0f} s") from None

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL after STOP_S; returns the exit code."""
        if self.process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
        return await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Not Process.terminate: that reaps a child that has just ended behind the loop's back."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@asynccontextmanager
async def child(name: str, arguments: Sequence[str]) -> AsyncIterator[Child]:
    """Run `python -m ARGUMENTS...`; it has ended when the block ends, whatever happened."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        preexec_fn=_end_with_the_parent,
    )
    started = Child(name, process)
    try:
        yield started
    finally:
        await started.stop()


def _end_with_the_parent() -> None:
    """In the child, before it is a program: SIGTERM when the demo is gone, kill -9 included (man 2 prctl)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
