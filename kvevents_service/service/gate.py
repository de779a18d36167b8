"""Who may connect to the event endpoints: CURVE with a list of allowed keys, and what of it fails.

ZeroMQ asks for every key that proves itself over ZAP (RFC 27), one REP socket for the whole context; the domain of
the request names the endpoint. Peers that fail before that are told of by the socket's monitor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from kvevents_service.curve import AllowedKeys, ServerKeys
from kvevents_service.errors import ConfigError
from kvevents_service.handshakes import FAILURES, Monitor, parsed, refusal_of_reader
from kvevents_service.service.rarely import is_told
from kvevents_service.sockets import Receiver

log = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_VERSION: Final = b"1.0"
KEY_BYTES: Final = 32


class Guarded(NamedTuple):
    """An endpoint behind the gate. `where` is its setting, for the log."""

    where: str
    keys: ServerKeys
    monitor: Monitor


class Gate:
    """Decides for every guarded socket of a context. Without one it opens nothing, and `run` ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.keys_allowed = self.keys_refused = 0
        self.failures: Counter[str] = Counter()
        self._context = context
        self._guarded: dict[bytes, Guarded] = {}
        self._zap: zmq.Socket[bytes] | None = None
        self._faults: dict[bytes, ConfigError | None] = {}

    def __repr__(self) -> str:
        return f"<Gate of {len(self._guarded)} endpoints, {self.keys_refused} refused>"

    def guard(self, socket: zmq.Socket[bytes], keys: ServerKeys, where: str) -> None:
        """Let in only who owns an allowed key. Before the socket is bound."""
        if not zmq.has("curve"):
            raise ConfigError("curve_secret_file", "a libzmq with CURVE, or no secret file")
        if self._zap is None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(ZAP_ENDPOINT)
        domain = f"kvevents-{len(self._guarded)}".encode()
        socket.curve_server = 1
        socket.curve_secretkey = keys.secret
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        self._guarded[domain] = Guarded(where, keys, Monitor(self._context, socket, FAILURES))

    async def run(self) -> None:
        """Answer until cancelled."""
        if self._zap is None:
            return
        async with asyncio.TaskGroup() as tasks:
            for guarded in self._guarded.values():
                tasks.create_task(self._watch(guarded))
            with Receiver(self._zap) as receiver:
                while True:
                    self._zap.send_multipart(self.answer(await receiver.recv()))

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to a request of ZeroMQ itself: `[version, id, domain, address, identity, mechanism, key]`."""
        _, request_id, domain, address, _, mechanism, *credentials = request
        key = b"".join(credentials)
        allowed = mechanism == b"CURVE" and len(key) == KEY_BYTES and self._allows(domain, address, z85.encode(key))
        status = [b"200", b"OK"] if allowed else [b"400", b"this key is not allowed"]
        return [ZAP_VERSION, request_id, *status, b"", b""]

    def _allows(self, domain: bytes, address: bytes, key: bytes) -> bool:
        where, keys, _ = self._guarded[domain]
        allowed = key in keys.allowed
        self._tell_fault(domain, keys.allowed)
        if allowed:
            self.keys_allowed += 1
            return True
        self.keys_refused += 1
        if is_told(self.keys_refused):
            log.warning(
                "%s: a reader at %s was refused (%d so far): its key %s is not in %s",
                *(where, address.decode(), self.keys_refused, key.decode(), keys.allowed.path),
            )
        return False

    def _tell_fault(self, domain: bytes, allowed: AllowedKeys) -> None:
        """Once each time the file was read in vain, whoever asks: a key that was taken off it is let in still."""
        fault = allowed.fault
        if fault is not self._faults.get(domain) and fault is not None:
            log.error("%s: the keys are those of before: %s", self._guarded[domain].where, fault)
        self._faults[domain] = fault

    async def _watch(self, guarded: Guarded) -> None:
        with Receiver(guarded.monitor.reader) as receiver:
            while True:
                told = parsed(await receiver.recv())
                if told.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    continue  # its key was refused, and counted
                reason = refusal_of_reader(told)
                self.failures[reason] += 1
                if is_told(self.failures[reason]):
                    count = self.failures[reason]
                    log.warning("%s: a handshake failed (%d so far): %s", guarded.where, count, reason)

    def stats(self) -> dict[str, int]:
        return {
            "curve_keys_allowed": self.keys_allowed,
            "curve_keys_refused": self.keys_refused,
            "curve_handshakes_failed": self.failures.total(),
        }
