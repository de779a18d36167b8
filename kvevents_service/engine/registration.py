"""What every client of a sidecar does: dial, say hello, and dial again after every EOF, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.engine.connection import dial
from kvevents_service.engine.line import Line
from kvevents_service.engine.link import Link
from kvevents_service.errors import SidecarGone
from kvevents_service.wire.control import Hello, Mark


class Timeouts(NamedTuple):
    """Seconds an engine is willing to wait."""

    lookup_s: float = 0.05
    send_s: float = 0.02
    hello_s: float = 5.0
    redial_s: float = 0.25
    lease_s: float = 10.0


ENGINE_FAULTS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
"""What an argument of the engine's that cannot be meant, or cannot be encoded, raises."""


class Registration:
    """A line to a sidecar, registered anew whenever it is lost. `close` gives it up."""

    def __init__(self, socket_path: str, fds: Sequence[int], timeouts: Timeouts | None) -> None:
        self.socket_path = socket_path
        self.timeouts = timeouts or Timeouts()
        self._fds = fds
        self._line = Line(self.timeouts.send_s)
        self.counters = self._line.counters
        self._closing = self._dialled = False
        self._marked: int | None = None
        self._mark_due = False
        self._keeper = threading.Thread(target=self._keep, name="kvevents-dial", daemon=True)
        self._keeper.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.socket_path} {self._line!r}>"

    @property
    def connected(self) -> bool:
        return self._line.link is not None

    @property
    def boot_id(self) -> str | None:
        """The running sidecar's identity; None while it is away."""
        link = self._line.link
        return None if link is None else link.welcome.boot_id

    @property
    def last_error(self) -> str:
        """Why the last thing failed; empty if nothing has."""
        return self._line.last_error

    def wait_connected(self, wait_s: float) -> bool:
        """Wait until registered. For start-up; the step loop never needs it."""
        with self._line.changed:
            return self._line.changed.wait_for(lambda: self.connected or self._closing, wait_s)

    def wait_dialled(self, wait_s: float) -> bool:
        """Wait until the first dial has ended, which without a sidecar is at once. True if it is registered."""
        with self._line.changed:
            self._line.changed.wait_for(lambda: self._dialled or self._closing, wait_s)
            return self.connected

    def mark(self, number: int) -> bool:
        """Tell how far the device has been told to compute (`Mark`): for a session with memory. Numbers rise.

        False: the sidecar is away; it is told when it is back.
        """
        self._marked = number
        return self._tell_mark()

    def _tell_mark(self) -> bool:
        with self._line.lock:
            told = self._marked is not None and self._line.send(Mark(self._marked))
            self._mark_due = not told
            return told

    def close(self, wait_s: float = 1.0) -> bool:
        """Leave. True once the sidecar has let go of our memory.

        False if it did not within `wait_s`: a copy may still be running. What an engine has outstanding goes on,
        and ends in `poll` as ever.
        """
        with self._line.changed:
            self._closing = True
            self._line.changed.notify_all()
            self._line.hang_up()
        gone = self._line.let_go(wait_s)
        self._keeper.join(wait_s)
        return gone

    # the keeper thread

    def _hello(self) -> Hello:
        raise NotImplementedError

    def _keep(self) -> None:
        while self._wait_disconnected():
            try:
                greeted = dial(self.socket_path, self._hello(), self._fds, self.timeouts.hello_s)
            except (SidecarGone, *ENGINE_FAULTS) as error:
                self._note_failed_dial(error)
            else:
                self._adopt(Link(*greeted))

    def _wait_disconnected(self) -> bool:
        """Wait until a dial is due; False when closing."""
        with self._line.changed:
            self._line.changed.wait_for(lambda: self._closing or not self.connected)
            return not self._closing

    def _note_failed_dial(self, error: Exception) -> None:
        with self._line.changed:
            self._dialled = True
            self._line.changed.notify_all()
            self._line.last_error = str(error) or type(error).__name__
            self._line.changed.wait_for(lambda: self._closing, self.timeouts.redial_s)

    def _adopt(self, link: Link) -> None:
        with self._line.lock:
            if self._closing:
                link.connection.close()
                return
            self._dialled = True
            self._line.adopt(link)
            self._tell_mark()
