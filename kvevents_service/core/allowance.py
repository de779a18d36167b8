"""How much each peer may ask for: a bucket of requests and one of bytes that fill up again with time.

A peer is a host, not a connection: one that connects anew finds its buckets as it left them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_PEERS: Final = 1024
"""The one that was longest silent is forgotten first."""


class AllowanceLimits(NamedTuple):
    """What comes back per second, and how many seconds' worth a bucket holds. A rate of 0 is no limit."""

    requests_per_s: float = 100.0
    bytes_per_s: float = float(1 << 28)
    burst_s: float = 16.0


class Bucket(NamedTuple):
    """What is left to a peer; bytes may be below 0, as an answer is charged while it is sent."""

    requests: float
    bytes: float
    at: float


class Allowance:
    """The buckets of all peers. `now` is in seconds of the caller's clock, and never goes back."""

    def __init__(self, limits: AllowanceLimits | None = None) -> None:
        self.limits = limits or AllowanceLimits()
        self.refused = 0
        self._buckets: dict[str, Bucket] = {}

    def __repr__(self) -> str:
        return f"<Allowance peers={len(self._buckets)} refused={self.refused}>"

    def admits(self, peer: str, now: float) -> bool:
        """Take one request out of the peer's bucket; False, and counted, if there is none or it is in debt."""
        bucket = self._filled(peer, now)
        limits = self.limits
        admitted = (not limits.requests_per_s or bucket.requests >= 1) and (
            not limits.bytes_per_s or bucket.bytes > 0
        )
        self._keep(peer, bucket._replace(requests=bucket.requests - admitted))
        self.refused += not admitted
        return admitted

    def spend(self, peer: str, size: int, now: float) -> None:
        """Charge bytes that were sent to the peer."""
        bucket = self._filled(peer, now)
        self._keep(peer, bucket._replace(bytes=bucket.bytes - size))

    def _filled(self, peer: str, now: float) -> Bucket:
        requests_per_s, bytes_per_s, burst_s = self.limits
        bucket = self._buckets.get(peer)
        if bucket is None:
            return Bucket(requests_per_s * burst_s, bytes_per_s * burst_s, now)
        passed = now - bucket.at
        return Bucket(
            min(requests_per_s * burst_s, bucket.requests + passed * requests_per_s),
            min(bytes_per_s * burst_s, bucket.bytes + passed * bytes_per_s),
            now,
        )

    def _keep(self, peer: str, bucket: Bucket) -> None:
        self._buckets.pop(peer, None)
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
