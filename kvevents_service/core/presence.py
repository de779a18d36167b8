"""Whether a source is there: told by its connection, its silence and what is heard of it.

    there --connection lost for gone_after_s, or silent--> away --heard again, in unbroken order--> there

A connection that comes back may be to another process: it is asked for what it has (`Look.ASK`), and only what it
says ends the absence.
"""

from __future__ import annotations

from enum import Enum, auto


class Look(Enum):
    """What is to be done now."""

    NOTHING = auto()
    ASK = auto()
    HIDE = auto()
    SHOW = auto()


class Presence:
    """`look` at it often. Times in seconds, of the caller's clock."""

    def __init__(self, gone_after_s: float) -> None:
        self.gone_after_s = gone_after_s
        self.away = False
        self._was_connected = False
        self._lost_at: float | None = None
        self._heard = False

    def __repr__(self) -> str:
        state = "away" if self.away else "there"
        return f"<Presence {state}{'' if self._lost_at is None else ' unconnected'}>"

    def look(self, now: float, *, connected: bool, stale: bool, asking: bool, heard: bool) -> Look:
        """asking: a reply is under way. heard: something came since the last look."""
        back = self._note_connection(now, connected)
        self._heard |= heard and not back
        lost = self._lost_at is not None and now - self._lost_at >= self.gone_after_s
        if (stale or lost) and not self.away:
            self.away, self._heard = True, False
            return Look.HIDE
        if back:
            return Look.ASK
        if self.away and connected and not stale and self._heard and not asking:
            self.away = False
            return Look.SHOW
        return Look.NOTHING

    def _note_connection(self, now: float, connected: bool) -> bool:
        """Whether it was lost, and is there again."""
        back = connected and self._lost_at is not None
        if connected:
            self._was_connected, self._lost_at = True, None
        elif self._was_connected and self._lost_at is None:
            self._lost_at = now
        return back
