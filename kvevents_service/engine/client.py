"""The client inside an engine: small, synchronous, thread safe, and never in the way.

Every call has a deadline. While the sidecar is away, lookups say 0 and steps are dropped at once; a background
thread dials again and registers anew. Nothing is raised into the engine's step loop: an error is a miss, counted.

The contract for memory (I9): every step and load that is accepted (a number was returned) ends exactly once in
`poll`. Until then its blocks must be neither reused nor freed, also when a deadline has passed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvevents_service.engine.connection import dial
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.link import Answer, Completion, Link
from kvevents_service.errors import SidecarGone, WireError
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    Error,
    Hello,
    Hit,
    Inspect,
    Inspected,
    Load,
    Loaded,
    Lookup,
    Offer,
    Release,
    Reset,
    ResetDone,
    Step,
    StepDone,
)


class Timeouts(NamedTuple):
    """Seconds an engine is willing to wait."""

    lookup_s: float = 0.05
    send_s: float = 0.02
    hello_s: float = 5.0
    redial_s: float = 0.25
    lease_s: float = 10.0


class PrefixHit(NamedTuple):
    """`blocks` leading hash units can be loaded, pinned until loaded, released, or the lease runs out."""

    blocks: int
    lease_id: int | None = None


class Completions(NamedTuple):
    """What has ended since the last poll, in order of arrival."""

    steps: list[StepDone]
    loads: list[Loaded]


NO_HIT = PrefixHit(0)


class OffloadClient:
    """An engine's side of the engine protocol."""

    def __init__(self, socket_path: str, layout: EngineLayout, timeouts: Timeouts | None = None) -> None:
        self.socket_path = socket_path
        self.layout = layout
        self.timeouts = timeouts or Timeouts()
        self.counters: Counter[str] = Counter()
        self.last_error = ""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._hung_up: list[Link] = []
        self._ended: list[Completion] = []
        self._last_id = 0
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name="kvevents-dial", daemon=True)
        self._keeper.start()

    def __repr__(self) -> str:
        return f"<OffloadClient {self.socket_path} link={self._link!r} last_error={self.last_error!r}>"

    # state

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def boot_id(self) -> str | None:
        """The running sidecar's identity; None while it is away."""
        link = self._link
        return None if link is None else link.welcome.boot_id

    def wait_connected(self, wait_s: float) -> bool:
        """Wait until registered. For start-up; the step loop never needs it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None or self._closing, wait_s)

    # the step loop

    def step(
        self, offers: Sequence[Offer], finished: Sequence[str] = (), preempted: Sequence[str] = ()
    ) -> int | None:
        """Tell what one scheduler step finished. Returns the step's number; None: dropped, nothing is held.

        The offered blocks must stay as they are until `poll` returns this number.
        """
        with self._lock:
            step_id = self._next_id()
            sent = self._send(Step(step_id, list(offers), list(finished), list(preempted)))
            self.counters["steps_sent" if sent else "steps_dropped"] += 1
            return step_id if sent else None

    def lookup(self, request_id: str, block_hashes: bytes | Sequence[bytes], start_tokens: int = 0) -> PrefixHit:
        """How much can be loaded of a prompt that is in the engine up to `start_tokens`.

        `block_hashes`: those of the hash units from there on, packed, or one by one.
        """
        packed = block_hashes if isinstance(block_hashes, bytes) else b"".join(block_hashes)
        with self._lock:
            self.counters["lookups"] += 1
            if self._link is None or self._link.suspect:
                self._collect(0.0)
            if self._link is None or self._link.suspect:
                return NO_HIT
            call = Lookup(self._next_id(), request_id, packed, self.timeouts.lease_s, start_tokens)
            answer = self._ask(call, call.call_id, self.timeouts.lookup_s)
            return PrefixHit(answer.blocks, answer.lease_id) if isinstance(answer, Hit) else NO_HIT

    def load(self, request_id: str, hit: PrefixHit, block_ids: bytes, units: int | None = None) -> int | None:
        """Start loading a hit, or its first `units`, into these blocks (packed int32). None: refused, recompute.

        The blocks must not be touched until `poll` returns this number.
        """
        if hit.lease_id is None:
            return None
        with self._lock:
            load_id = self._next_id()
            sent = self._send(Load(load_id, request_id, hit.lease_id, block_ids, units))
            self.counters["loads_sent" if sent else "loads_dropped"] += 1
            return load_id if sent else None

    def release(self, hit: PrefixHit) -> None:
        """Do not load this hit after all."""
        if hit.lease_id is not None:
            with self._lock:
                self._send(Release(hit.lease_id))

    def poll(self, wait_s: float = 0.0) -> Completions:
        """Steps and loads that have ended. Waits up to `wait_s` for a first one."""
        with self._lock:
            self._collect(0.0 if self._ended else wait_s)
            ended, self._ended = self._ended, []
        steps = [end for end in ended if isinstance(end, StepDone)]
        return Completions(steps, [end for end in ended if isinstance(end, Loaded)])

    @property
    def outstanding(self) -> int:
        """Steps and loads that have not been returned by `poll` yet."""
        links = [*self._hung_up, *([] if self._link is None else [self._link])]
        return len(self._ended) + sum(link.outstanding for link in links)

    # rare calls

    def reset(self, wait_s: float = 1.0) -> int | None:
        """Forget every stored block. Returns how many were removed; None: no answer in time."""
        with self._lock:
            call = Reset(self._next_id())
            answer = self._ask(call, call.call_id, wait_s)
            return answer.removed if isinstance(answer, ResetDone) else None

    def inspect(self, *, residents: bool = False, wait_s: float = 5.0) -> Inspected | None:
        """The sidecar's counters and resident set; None: no answer in time."""
        with self._lock:
            call = Inspect(self._next_id(), residents)
            answer = self._ask(call, call.call_id, wait_s)
            return answer if isinstance(answer, Inspected) else None

    def close(self, wait_s: float = 1.0) -> bool:
        """Leave. True once the sidecar has let go of our memory; False if it did not within `wait_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._hang_up()
            deadline = time.monotonic() + wait_s
            while self._hung_up and (left := deadline - time.monotonic()) > 0:
                self._collect_hung_up(left)
            gone = not self._hung_up
            for link in self._hung_up:
                link.connection.close()
        self._keeper.join(wait_s)
        return gone

    # sending and receiving, under the lock

    def _send(self, message: msgspec.Struct) -> bool:
        link = self._link
        if link is None:
            return False
        try:
            return link.send(message, self.timeouts.send_s)
        except SidecarGone as error:
            self._lose(link, error)
        except (
            TypeError,
            ValueError,
            OverflowError,
        ) as error:  # the engine gave something that cannot be encoded
            self.counters["client_errors"] += 1
            self.last_error = f"{type(message).__name__.lower()}: {error}"
        return False

    def _ask(self, call: msgspec.Struct, call_id: int, wait_s: float) -> Answer | None:
        deadline = time.monotonic() + wait_s
        if not self._send(call):
            return None
        while self._link is not None and (left := deadline - time.monotonic()) > 0:
            for answer in self._collect(left):
                if not isinstance(answer, StepDone | Loaded) and answer.call_id == call_id:
                    return answer
        if self._link is not None:
            self._link.suspect = True
            self.counters["deadlines_missed"] += 1
        return None

    def _collect(self, wait_s: float) -> list[Answer]:
        """Take in what has arrived; returns the answers among it."""
        answers: list[Answer] = []
        link = self._link
        if self._hung_up:
            self._collect_hung_up(0.0)
        if link is None:
            return answers
        try:
            for message in link.receive(wait_s):
                if isinstance(message, StepDone | Loaded):
                    self._ended.append(message)
                else:
                    self._note(message, answers)
        except SidecarGone as error:
            self._lose(link, error)
        return answers

    def _note(self, answer: Answer, answers: list[Answer]) -> None:
        if isinstance(answer, Error):
            self.counters["errors"] += 1
            self.last_error = f"{answer.code}: {answer.field}: expected {answer.expected}"
        answers.append(answer)

    def _collect_hung_up(self, wait_s: float) -> None:
        kept = []
        for link in self._hung_up:
            ended, gone = link.drain(wait_s)
            self._ended += ended
            if not gone:
                kept.append(link)
        self._hung_up = kept

    def _lose(self, link: Link, error: SidecarGone) -> None:
        self.counters["links_lost"] += 1
        self.last_error = str(error)
        if isinstance(error.__cause__, WireError):
            self._hang_up()
            return
        self._link = None
        self._ended += link.abandoned()
        link.connection.close()
        self._changed.notify_all()

    def _hang_up(self) -> None:
        """Give up a connection that still lives; its blocks stay held until EOF."""
        if self._link is not None:
            self._link.connection.hang_up()
            self._hung_up.append(self._link)
            self._link = None
            self._changed.notify_all()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # the keeper thread

    def _keep(self) -> None:
        while self._wait_disconnected():
            try:
                connection, welcome = dial(self.socket_path, self._hello(), self.layout.fds, self.timeouts.hello_s)
            except SidecarGone as error:
                with self._changed:
                    self.last_error = str(error)
                    self._changed.wait_for(lambda: self._closing, self.timeouts.redial_s)
                continue
            self._adopt(Link(connection, welcome))

    def _wait_disconnected(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._link is None)
            return not self._closing

    def _adopt(self, link: Link) -> None:
        with self._changed:
            if self._closing:
                link.connection.close()
                return
            self._link = link
            self.counters["registrations"] += 1
            self._changed.notify_all()

    def _hello(self) -> Hello:
        layout = self.layout
        return Hello(
            PROTOCOL_VERSION,
            "engine" if layout.regions else "observer",
            layout.engine_id or f"pid-{os.getpid()}",
            layout.namespace,
            layout.hash_bytes,
            list(layout.groups),
            list(layout.memories),
            list(layout.regions),
            layout.hash_tokens,
        )
