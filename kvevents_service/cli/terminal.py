"""The process's own streams: data on stdout, a line and a flush at a time; chatter on stderr."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click


def wants_color(color: str) -> bool:
    """An explicit choice, else colour for a terminal without NO_COLOR (https://no-color.org)."""
    if color != "auto":
        return color == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def moves_cursor() -> bool:
    """Whether what is on the screen can be drawn over."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write(line: str) -> None:
    """One line, flushed: UTF-8 whatever the locale. Raises BrokenPipeError when its reader has gone."""
    put(f"{line}\n")


def put(text: str) -> None:
    """Text as it is, else like `write`."""
    rest = memoryview(text.encode())
    while rest:  # an unbuffered stdout may take a part
        rest = rest[sys.stdout.buffer.write(rest) :]
    sys.stdout.buffer.flush()


def chat(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Raises BrokenPipeError inside when the reader of stdout has left, also while there is nothing to write."""
    fd = _pipe_fd()
    if fd is None:
        yield
        return
    loop, task, left = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()

    def leave() -> None:
        loop.remove_reader(fd)
        left.set()
        if task is not None:
            task.cancel()

    loop.add_reader(fd, leave)  # the writing end of a pipe is never readable: only its error ends up here
    try:
        yield
    except asyncio.CancelledError:
        if left.is_set():
            raise BrokenPipeError from None
        raise
    finally:
        loop.remove_reader(fd)


def _pipe_fd() -> int | None:
    try:
        fd = sys.stdout.fileno()
    except OSError:  # a test's stdout
        return None
    return fd if stat.S_ISFIFO(os.fstat(fd).st_mode) else None


def discard_stdout() -> None:
    """What is still buffered has no reader: without this the interpreter complains of it at its end."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
