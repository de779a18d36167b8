"""Faults that may come in thousands are all counted; the log has the first, the tenth, the hundredth and so on."""

from __future__ import annotations


def is_told(count: int) -> bool:
    """Whether the fault that made a counter `count`, at least 1, goes into the log."""
    while count % 10 == 0:
        count //= 10
    return count == 1
