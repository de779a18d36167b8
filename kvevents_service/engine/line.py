"""The line to a sidecar that several threads of an engine share: what is sent, asked and collected on it.

The lock is held to send and to take in what has arrived, never while waiting: a thread that waits for its answer
looks in a mailbox, because another thread may have taken the answer in.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from kvevents_service.engine.link import Answer, Completion, Link
from kvevents_service.errors import SidecarGone, WireError
from kvevents_service.wire.control import Error, Hit, Inspect, Loaded, Lookup, Release, Reset, StepDone

Call = Lookup | Reset | Inspect

SPIN_S = 0.0001
"""How long an asker looks again and again: to be put to sleep and woken costs more than a lookup."""
SLICE_S = 0.001
"""How long it sleeps at most before it looks in its mailbox again."""


class Line:
    """A link that may be there or not, links that were hung up, and what has ended on all of them.

    `heard`: the link that a thread listens to; what has arrived on it need not be looked for.
    """

    def __init__(self, send_s: float) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.counters: Counter[str] = Counter()
        self.last_error = ""
        self.link: Link | None = None
        self.heard: Link | None = None
        self._send_s = send_s
        self._hung_up: list[Link] = []
        self._ended: deque[Completion] = deque()
        self._awaited: dict[int, Answer | None] = {}
        self._unsent: set[int] = set()
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Line {self.link!r} hung_up={len(self._hung_up)} last_error={self.last_error!r}>"

    @property
    def outstanding(self) -> int:
        """Steps and loads that have not been taken by `take_ended` yet."""
        with self.lock:
            links = [*self._hung_up, *([] if self.link is None else [self.link])]
            return len(self._ended) + sum(link.outstanding for link in links)

    @property
    def usable(self) -> bool:
        """A link is there and answers. One that missed a deadline is looked at again first."""
        if self.link is not None and self.link.suspect:
            self.collect()
        return self.link is not None and not self.link.suspect

    def next_id(self) -> int:
        """A number for a step, a load or a call; never repeats."""
        return next(self._ids)

    # send and ask

    def send(self, *messages: msgspec.Struct) -> bool:
        """Send messages at once. False: none was sent, and none ever will be."""
        with self.lock:
            link = self.link
            if link is None:
                return False
            try:
                return link.send(messages, self._send_s)
            except SidecarGone as error:
                self._lose(link, error)
                return False

    def ask(self, call: Call, wait_s: float) -> Answer | None:
        """Send a call and wait for its answer; None if none came in time."""
        return self.answer(call.call_id, wait_s) if self.begin(call) else None

    def begin(self, *calls: Call) -> bool:
        """Send calls whose `answer`s are taken later, or given up. False: none was sent."""
        with self.lock:
            sent = self.send(*calls)
            if sent:
                self._awaited.update(dict.fromkeys([call.call_id for call in calls]))
            return sent

    def expect(self, call_ids: Sequence[int]) -> None:
        """Answers to these calls, which will be sent: until `left` says so the sidecar is not to blame."""
        self._unsent.update(call_ids)
        self._awaited.update(dict.fromkeys(call_ids))

    def left(self, call_ids: Sequence[int], sent: bool) -> None:
        """These calls that were expected are sent, or never will be."""
        self._unsent.difference_update(call_ids)
        for call_id in () if sent else call_ids:
            self._awaited.pop(call_id, None)

    def answered(self, call_id: int) -> Answer | None:
        """The answer to a call that was begun, if it is here; it is taken."""
        if self._awaited.get(call_id) is None:
            return None
        return self._awaited.pop(call_id, None)

    def answer(self, call_id: int, wait_s: float) -> Answer | None:
        """The answer to a call that was begun; None if none comes in time, or its link is lost."""
        start = time.monotonic()
        try:
            return self._await(call_id, start + SPIN_S, start + wait_s)
        finally:
            with self.lock:
                self._awaited.pop(call_id, None)

    def give_up(self, call_id: int) -> None:
        """Nobody wants this answer any more. A hit that it brings is released, however late it comes."""
        with self.lock:
            answer = self._awaited.pop(call_id, None)
            if answer is not None:
                self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        if isinstance(answer, Hit) and answer.lease_id is not None:
            self.send(Release(answer.lease_id))

    def _await(self, call_id: int, spin_until: float, deadline: float) -> Answer | None:
        while True:
            if self._awaited.get(call_id) is None:
                self.collect()
            answer, link = self._awaited.get(call_id), self.link
            if answer is not None or link is None or call_id not in self._awaited:
                return answer
            now = time.monotonic()
            if now >= deadline:
                link.suspect = call_id not in self._unsent
                self.counters["deadlines_missed"] += 1
                return None
            if now < spin_until:
                os.sched_yield()  # the sidecar may have been woken on this very core
            else:
                link.connection.wait(min(SLICE_S, deadline - now))

    # collect

    def collect(self) -> None:
        """Take in what has arrived, on every link."""
        with self.lock:
            if self._hung_up:
                self._collect_hung_up()
            link = self.link
            if link is None:
                return
            try:
                for message in link.receive():
                    self._note(message)
            except SidecarGone as error:
                self._lose(link, error)

    def _note(self, message: Completion | Answer) -> None:
        if isinstance(message, (StepDone, Loaded)):
            self._ended.append(message)
            return
        if isinstance(message, Error):
            self.counters["errors"] += 1
            self.last_error = f"{message.code}: {message.field}: expected {message.expected}"
        if message.call_id in self._awaited:
            self._awaited[message.call_id] = message
        else:
            self._give_back(message)  # too late: whoever asked has gone on

    def _collect_hung_up(self) -> None:
        kept = []
        for link in self._hung_up:
            ended, gone = link.drain()
            self._ended += ended
            if not gone:
                kept.append(link)
        self._hung_up = kept

    def end(self, completion: Completion) -> None:
        """Something that was to be sent has ended, unsent."""
        self._ended.append(completion)

    def take_ended(self, wait_s: float) -> list[Completion]:
        """What has ended since the last time. Waits up to `wait_s` for a first one."""
        link = self.link
        if self._hung_up or link is None or link is not self.heard or link.connection.stalled:
            self.collect()
        ended = self._take()
        if ended or wait_s <= 0:
            return ended
        deadline = time.monotonic() + wait_s
        while not ended and (left := deadline - time.monotonic()) > 0:
            link = self.link or next(iter(self._hung_up), None)
            if link is None:
                break
            link.connection.wait(min(SLICE_S, left) if link is self.heard else left)
            self.collect()
            ended = self._take()
        return ended

    @property
    def has_ended(self) -> bool:
        """Something has, that was heard of."""
        return bool(self._ended)

    def _take(self) -> list[Completion]:
        ended: list[Completion] = []
        with suppress(IndexError):  # none is left
            while True:
                ended.append(self._ended.popleft())
        return ended

    # the ends of links

    def adopt(self, link: Link) -> None:
        """A new registration stands."""
        with self.changed:
            self.link = link
            self.counters["registrations"] += 1
            self.changed.notify_all()

    def _lose(self, link: Link, error: SidecarGone) -> None:
        self.counters["links_lost"] += 1
        self.last_error = str(error)
        if isinstance(error.__cause__, WireError):
            link.broken = True
            self.hang_up()
            return
        self.link = None
        self._awaited.clear()
        self._ended += link.abandoned()
        link.connection.close()
        self.changed.notify_all()

    def hang_up(self) -> None:
        """Give up a connection that still lives; its blocks stay held until EOF."""
        with self.changed:
            if self.link is not None:
                self.link.connection.hang_up()
                self._hung_up.append(self.link)
                self.link = None
                self._awaited.clear()
                self.changed.notify_all()

    def let_go(self, wait_s: float) -> bool:
        """Wait until every link that was hung up has ended; False if one has not, and may still copy."""
        deadline = time.monotonic() + wait_s
        while True:
            with self.lock:
                self._collect_hung_up()
                link = next(iter(self._hung_up), None)
            left = deadline - time.monotonic()
            if link is None or left <= 0:
                return link is None
            link.connection.wait(left)
