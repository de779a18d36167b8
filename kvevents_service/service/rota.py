"""Whose turn it is: what has much to do on the loop does it in pieces, and all pieces share the loop's turns.

A turn of the loop is all that is ready at once, so bounds of each part add up: frames of every session, a slice of
a reset and a part of a snapshot would hold a timer, or another engine's lookup, for the sum of them. Here they
queue up, one behind the other, and a turn ends when its time is over. What comes while nobody waits and time is
left is done at once: a lookup in a quiet sidecar waits for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.001
"""No piece begins later than that in a turn. One may take longer: pieces of about half of it are good ones."""

Piece = Callable[[], bool | None]
"""Does some work. True: there is more of it."""


class Rota:
    """Pieces of work in turns of the running loop, each behind those that wait already. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, turn_s: float = TURN_S) -> None:
        self._clock = clock
        self._turn_s = turn_s
        self._waiting: deque[Piece] = deque()
        self._until: float | None = None
        self._working = False

    def __repr__(self) -> str:
        return f"<Rota waiting={len(self._waiting)}>"

    def take(self, piece: Piece) -> None:
        """Do it in its turn, now if that can be, again and again while there is more. What it raises goes to the
        loop's exception handler, and ends it."""
        self._waiting.append(piece)
        if not self._working and (self._until is None or self._clock() < self._until):
            self._work()

    async def run(self, piece: Piece) -> None:
        """The same, to its end; raises what it raises. No more of it once this is cancelled."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def guarded() -> bool:
            if ended.done():
                return False
            try:
                more = bool(piece())
            except Exception as error:  # noqa: BLE001  whoever waits is told
                ended.set_exception(error)
                return False
            if not more:
                ended.set_result(None)
            return more

        self.take(guarded)
        await ended

    def finish(self) -> None:
        """Do all that waits, now. For an end."""
        while self._waiting:
            self._do(self._waiting.popleft())

    def _work(self) -> None:
        if self._until is None:
            self._until = self._clock() + self._turn_s
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._working = True
        try:
            while self._waiting:
                self._do(self._waiting.popleft())
                if self._clock() >= self._until:
                    break
        finally:
            self._working = False

    def _next_turn(self) -> None:
        self._until = None
        if self._waiting:
            self._work()

    def _do(self, piece: Piece) -> None:
        try:
            more = piece()
        except Exception as error:  # noqa: BLE001  the border of a piece: a bug must not take the others along
            context = {"message": "a piece of work failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        else:
            if more:
                self._waiting.append(piece)
