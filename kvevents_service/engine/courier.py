"""A thread that says what an engine's step loop leaves to it, and takes in what the sidecar answers.

    post(parcel) -> the parcel's messages are made and sent, in order -> `sent` is told whether they were

To pack a step and to hand it to the kernel takes longer than to decide about it. A step loop that posts goes on at
once: the courier works while the loop waits for the device, and Python's lock is free. The first post starts it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kvevents_service.engine import nowait
from kvevents_service.engine.line import Line

MAX_PARCELS = 64
"""A courier that is further behind takes no more: a sidecar that does not read is not worth waiting for."""
SLICE_S = 1.0
"""How long it listens at most before it looks whether it listens to the right link."""


class Parcel(NamedTuple):
    """`make`: its messages. `sent` is told whether they were, in the courier's thread or the poster's."""

    make: Callable[[], Sequence[msgspec.Struct]]
    sent: Callable[[bool], None]


class Courier:
    """One of a line. `complain` hears of every parcel that could not be made, with the exception."""

    def __init__(self, line: Line, complain: Callable[[Exception], None]) -> None:
        self._line = line
        self._complain = complain
        self._parcels: deque[tuple[int, Parcel]] = deque()
        self._recalls = 0
        self._closing = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._bell = -1

    def __repr__(self) -> str:
        return f"<Courier {len(self._parcels)} parcels>"

    @property
    def parcels(self) -> int:
        """Those that wait."""
        return len(self._parcels)

    def post(self, parcel: Parcel) -> bool:
        """Leave it to be sent. False: it is not taken, and neither sent nor lost."""
        if self._closing.is_set() or len(self._parcels) >= MAX_PARCELS or not self._runs():
            return False
        self._parcels.append((self._recalls, parcel))
        if self._asleep:
            self._ring()
        if self._closing.is_set():  # since it was asked above, and there is nobody to send it
            self._end()
        return True

    def recall(self) -> None:
        """Lose what is not sent by now. Holding the line's lock: what is sent behind this overtakes nothing."""
        self._recalls += 1
        while (parcel := self._next()) is not None:
            parcel[1].sent(False)

    def close(self, wait_s: float) -> None:
        """Lose what is left, and end the thread, if it ends within `wait_s`."""
        self._closing.set()
        self._ring()
        thread = self._thread
        if thread is not None:
            thread.join(wait_s)
        self._end()

    def _next(self) -> tuple[int, Parcel] | None:
        try:
            return self._parcels.popleft()
        except IndexError:  # none, or another thread took it
            return None

    def _ring(self) -> None:
        with self._line.lock:  # its thread closes the bell when it ends
            if self._bell >= 0:
                nowait.ring(self._bell)

    def _end(self) -> None:
        with self._line.lock:
            self.recall()

    def _runs(self) -> bool:
        """There is a thread, now at the latest. False: there can be none, or it is left behind by a fork."""
        return self._start() if self._thread is None else self._thread.is_alive()

    def _start(self) -> bool:
        """False: the process may have no more threads, or files, now."""
        with self._line.lock:
            if self._thread is not None:
                return True
            thread = threading.Thread(target=self._run, name="kvevents-courier", daemon=True)
            try:
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                thread.start()
            except (RuntimeError, OSError) as error:
                self._close_bell()
                self._complain(error)
                return False
            self._thread = thread
            return True

    def _close_bell(self) -> None:
        with self._line.lock:
            if self._bell >= 0:
                os.close(self._bell)
            self._bell = -1

    # its thread

    def _run(self) -> None:
        with suppress(OSError):  # it must not take the core from the thread that has just rung
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            while not self._closing.is_set():
                self._deliver()
                self._listen()
        except Exception as error:  # noqa: BLE001 - the step loop takes in for itself then, and meets it too
            self._complain(error)
        finally:
            self._closing.set()
            self._line.heard = None
            self._close_bell()
            self._end()

    def _deliver(self) -> None:
        """One, so that what arrives is taken in between."""
        if (posted := self._next()) is not None:
            recalls, parcel = posted
            sent, self._line.heard = False, None
            try:
                sent = self._send(recalls, parcel)
            finally:
                parcel.sent(sent)

    def _send(self, recalls: int, parcel: Parcel) -> bool:
        try:
            messages = parcel.make()
            with self._line.lock:
                return recalls == self._recalls and self._line.send(*messages)
        except Exception as error:  # noqa: BLE001 - whoever posted is told; the courier goes on
            self._complain(error)
            return False

    def _listen(self) -> None:
        """Sleep until there is a parcel, or something to take in, and take it in."""
        link, poller = self._line.link, select.poll()
        poller.register(self._bell, select.POLLIN)
        if link is not None and link.connection.register(poller):
            self._line.heard = link
        self._asleep = True
        if not self._parcels and not self._closing.is_set():
            poller.poll(SLICE_S * 1000)
        self._asleep = False
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if link is not None:
            self._line.collect()
