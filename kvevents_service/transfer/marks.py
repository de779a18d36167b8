"""Marks: how far an engine's device has been told to compute.

An engine numbers its forward passes. When it has submitted one, and recorded an event behind it, it says so; a copy
that a later message asks for waits until then, and its stream for the event. Memory of the CPU has no events: there
a mark says that the bytes are written.
"""

from __future__ import annotations

from collections.abc import Callable


class Marks:
    """The newest mark of one rank, and what waits for marks to come. Bounded by the copies that wait."""

    def __init__(self) -> None:
        self.reached = -1
        self._waiting: dict[Callable[[], None], int] = {}

    def __repr__(self) -> str:
        return f"<Marks {self.reached} waiting={len(self._waiting)}>"

    def note(self, number: int) -> None:
        """This mark, and all before it, have been reached. What waited for it goes on, in order."""
        self.reached = max(self.reached, number)
        for go in [go for go, mark in self._waiting.items() if mark <= self.reached]:
            del self._waiting[go]
            go()

    def when(self, number: int, go: Callable[[], None]) -> None:
        """Call `go` when this mark has been reached: at once, if it has."""
        if number <= self.reached:
            go()
        else:
            self._waiting[go] = number

    def forget(self, go: Callable[[], None]) -> None:
        """Do not call it any more."""
        self._waiting.pop(go, None)
