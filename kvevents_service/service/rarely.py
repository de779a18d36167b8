"""Faults that may come in thousands are all counted; the log has the first, the tenth, the hundredth and so on.

What is not counted where it happens is held back here, by the line of code that says it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

BURST: Final = 10
INTERVAL_S: Final = 60.0


def is_told(count: int) -> bool:
    """Whether the fault that made a counter `count`, at least 1, goes into the log."""
    while count % 10 == 0:
        count //= 10
    return count == 1


def is_told_since(before: int, count: int) -> bool:
    """Whether one of the faults that brought a counter from `before` to `count` goes into the log."""
    return count > before and (not before or len(str(before)) < len(str(count)))


class _Window:
    """What one line of code has said since `start`."""

    __slots__ = ("held_back", "said", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.said = self.held_back = 0


class RateLimit(logging.Filter):
    """At most `BURST` records of one line of code in `INTERVAL_S`; the next one after that says how many were not.

    `held_back` counts all of them. Lines of code are few, so this is bounded. Put it on a handler.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.held_back = 0
        self._clock = clock
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, place = self._clock(), (record.pathname, record.lineno)
        window = self._windows.get(place)
        if window is None or now - window.start >= INTERVAL_S:
            if window is not None and window.held_back:
                record.msg = f"{record.msg} ({window.held_back} more since were not logged)"
            window = self._windows[place] = _Window(now)
        window.said += 1
        if window.said <= BURST:
            return True
        window.held_back += 1
        self.held_back += 1
        return False
