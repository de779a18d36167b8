"""What the demo shows while it runs: the last few events on a terminal; elsewhere only what is no event."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kvevents_service.cli.render import HumanLines, Look
from kvevents_service.cli.tail_filter import Filter
from kvevents_service.cli.tail_printer import Printer
from kvevents_service.cli.terminal import chat, moves_cursor, put, wants_color, write
from kvevents_service.subscriber import Batch, Item
from kvevents_service.wire.events import BlockRemoved, BlockStored

SHOWN_EVENTS: Final = 5
REDRAW_S: Final = 0.1
UP_AND_CLEAR, NO_WRAP, WRAP = "\x1b[{}A\x1b[J", "\x1b[?7l", "\x1b[?7h"


class View(Protocol):
    """Takes every item of the stream and every line for people; `end` comes before the summary."""

    def show(self, item: Item) -> None: ...
    def say(self, line: str) -> None: ...
    def end(self) -> None: ...


def make_view(color: str, as_json: bool, events: bool) -> View:
    """The view that the flags and the kind of stdout ask for."""
    if as_json:
        return Plain(lambda item: None)
    lines = HumanLines(Look(color=wants_color(color)))
    if events:
        return Plain(Printer(lines, Filter(), None, write).item)
    if moves_cursor():
        return Live(lines, put, time.monotonic)
    printer = Printer(lines, Filter(), None, write)
    return Plain(lambda item: None if isinstance(item, Batch) else printer.item(item))


class Plain:
    """Lines one after the other."""

    def __init__(self, show: Callable[[Item], None]) -> None:
        self.show = show

    def say(self, line: str) -> None:
        chat(line)

    def end(self) -> None:
        """Nothing is to be taken away."""


class Live:
    """The last few events and their sums, drawn over again below all other lines. `put` takes text as it is."""

    def __init__(self, lines: HumanLines, put: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._events: deque[str] = deque(maxlen=SHOWN_EVENTS)
        self._recent = Printer(lines, Filter(), None, self._events.append)
        self._others = Printer(lines, Filter(), None, self._above)
        self._batches = self._stored = self._removed = 0
        self._put = put
        self._clock = clock
        self._drawn = 0
        self._redraw_at = 0.0

    def show(self, item: Item) -> None:
        if isinstance(item, Batch):
            self._recent.item(item)
            self._count(item)
            if self._clock() >= self._redraw_at:
                self._draw()
        else:
            self._others.item(item)

    def say(self, line: str) -> None:
        self._erase()
        chat(line)
        self._draw()

    def end(self) -> None:
        """The last events stay."""
        self._draw()

    def _above(self, line: str) -> None:
        self._erase()
        self._put(f"{line}\n")
        self._draw()

    def _count(self, item: Batch) -> None:
        self._batches += 1
        for event in item.batch.events:
            if isinstance(event, BlockStored):
                self._stored += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._removed += len(event.block_hashes)

    def _erase(self) -> None:
        if self._drawn:
            self._put(UP_AND_CLEAR.format(self._drawn))
        self._drawn = 0

    def _draw(self) -> None:
        """Long lines are cut by the terminal: a line is a row, whatever its width."""
        self._redraw_at = self._clock() + REDRAW_S
        if self._batches:
            sums = f"batches {self._batches:,}, blocks stored {self._stored:,}, removed {self._removed:,}"
            up = UP_AND_CLEAR.format(self._drawn) if self._drawn else ""
            self._put("".join([up, NO_WRAP, *(f"{line}\n" for line in (*self._events, sums)), WRAP]))
            self._drawn = len(self._events) + 1
