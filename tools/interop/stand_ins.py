"""Doubles of routers that cannot run here: the strict decoders of tests/doubles behind a subscription.

How each asks for a replay, and which reply it takes, is from shared/facts/consumers.md (read in their source).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from consumer import BLOCK_SIZE, Answer, Consumer, Endpoints, Kind
from truth import Held, run

from kvevents_service.testing import Chain

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from doubles import aibrix, llm_d, mooncake, sglang
from doubles.reading import Refused

POLL_MS = 50
IDLE_MS = 2000
"""A replay that pauses for longer has failed."""
MOST_MESSAGES, MOST_BYTES = 10_000, 64 * 1024 * 1024
END = (-1).to_bytes(8, "big", signed=True)


class Rules(NamedTuple):
    """How one router recovers.

    replays: it asks for what it missed. later: it takes a reply that starts above the number it asked for, and
    forgets everything first. bounded: it takes at most MOST_MESSAGES and MOST_BYTES. restarts: a lower number makes
    it forget and ask from 0. otherwise: what it does when a replay fails.
    """

    replays: bool = False
    later: bool = False
    bounded: bool = False
    restarts: bool = False
    otherwise: Callable[[Any], None] = lambda index: None


def go_stale(index: Any) -> None:
    index.stale = True
    index.held.clear()


class Double(Consumer):
    """One decoder, fed by a thread. What it refuses, or a replay that fails, is an answer that is never right."""

    def __init__(self, index: Any, rules: Rules, tiers: Mapping[str, str], by_hash: bool, ends: Endpoints) -> None:
        self._index = index
        self._rules = rules
        self._tiers = tiers
        self._by_hash = by_hash
        self._ends = ends
        self._last: int | None = None
        self._fault = ""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as live:
            live.rcvhwm = 0
            live.subscribe(b"")
            live.connect(self._ends.pub)
            while not self._stopping.is_set():
                if live.poll(POLL_MS):
                    frames = live.recv_multipart()
                    with self._lock:
                        self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        try:
            self._live(int.from_bytes(frames[1], "big"), frames)
        except Refused as refused:
            self._fault = f"refused number {int.from_bytes(frames[1], 'big')}: {refused}"

    def _live(self, seq: int, frames: list[bytes]) -> None:
        if self._rules.restarts and self._last is not None and seq < self._last:
            self._index.tree.clear()
            self._last = None
        expected = 0 if self._last is None else self._last + 1
        if self._rules.replays and seq > expected:
            self._replay(expected)
        if self._last is None or seq > self._last or not self._rules.replays:
            self._index.feed(frames)
            self._last = seq

    # replay

    def _replay(self, start: int) -> None:
        """Take the reply whole, or not at all."""
        reply = self._fetch(start)
        if reply is None or not self._acceptable(start, [seq for seq, _ in reply]):
            self._fault = self._fault or f"the reply to {start} is not one it takes"
            self._rules.otherwise(self._index)
            return
        if reply and reply[0][0] > start and self._rules.later:
            self._index.tree.clear()
        for seq, frames in reply:
            self._index.feed(frames)
            self._last = seq

    def _acceptable(self, start: int, numbers: list[int]) -> bool:
        fresh = self._last is None and self._rules.bounded  # it has no number yet: any start will do
        first_fits = not numbers or numbers[0] == start or self._rules.later or fresh
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        return first_fits and whole and (len(numbers) <= MOST_MESSAGES or not self._rules.bounded)

    def _fetch(self, start: int) -> list[tuple[int, list[bytes]]] | None:
        """Every message of the reply; None if it paused, or was too large."""
        reply: list[tuple[int, list[bytes]]] = []
        size = 0
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.rcvhwm = 0, 0
            dealer.connect(self._ends.replay)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while dealer.poll(IDLE_MS):
                _, *frames = dealer.recv_multipart()
                if frames[1] == END:
                    return reply
                size += len(frames[2])
                if self._rules.bounded and size > MOST_BYTES:
                    return None
                reply.append((int.from_bytes(frames[1], "big"), frames))
        return None

    # questions

    def ask(self, chain: Chain) -> Answer:
        with self._lock:
            if self._fault:
                return (-1,)
            prompt: Any = list(chain.hashes) if self._by_hash else chain.token_ids
            found = self._index.match(prompt)
            return tuple(found.get(name, 0) * BLOCK_SIZE for name in self._tiers.values())

    def expect(self, chain: Chain, held: Held) -> Answer:
        return tuple(run(chain, held, medium) for medium in self._tiers)

    def note(self) -> str:
        return self._fault

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


def _kind(
    name: str,
    dialect: str,
    make: Callable[[], Any],
    tiers: Mapping[str, str],
    rules: Rules | None = None,
    *,
    topic: str = "",
    by_hash: bool = False,
) -> Kind:
    chosen = rules or Rules()

    def start(endpoints: Endpoints, directory: Path) -> Double:
        return Double(make(), chosen, tiers, by_hash, endpoints)

    return Kind(name, False, dialect, start, topic, chosen.replays)


def kinds() -> list[Kind]:
    """One of each."""
    gpu_cpu, topic = {"GPU": "gpu", "CPU": "cpu"}, "kv@pod-1@interop"
    newer = Rules(replays=True, later=True, restarts=True)
    conductor = Rules(replays=True, bounded=True, otherwise=go_stale)
    sglang_tiers = {"GPU": "GPU", "CPU": "CPU_PINNED", "STORAGE": "DISK"}
    return [
        _kind("llm-d", "llm-d", lambda: llm_d.Index(BLOCK_SIZE), gpu_cpu, newer, topic=topic),
        _kind("mooncake", "mooncake", lambda: mooncake.Index(BLOCK_SIZE), {"GPU": "GPU"}, conductor, by_hash=True),
        _kind("aibrix", "aibrix", lambda: aibrix.Index(BLOCK_SIZE), {"GPU": "GPU"}),
        _kind("sglang", "sglang", lambda: sglang.Index(BLOCK_SIZE), sglang_tiers),
    ]
