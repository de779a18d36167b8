"""The request mirror: what the tier holds on behalf of each request that an engine is running.

A request owns leases: hits that were looked up and are pinned until they are loaded, released, or past their
deadline. Offers carry their whole snapshot, so a request needs nothing here to be stored, and a sidecar that
starts in the middle of a request's life can store the rest of it.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from kvevents_service.core.prefix import PrefixQuery


class Lease(NamedTuple):
    """A pinned hit: `units` leading hash units of `query` can be loaded while the slots in `pins` are pinned."""

    lease_id: int
    session_id: int
    request_id: str
    units: int
    pins: tuple[int, ...]
    query: PrefixQuery
    deadline: float


class RequestMirror:
    """Leases by id, by request and by deadline. Bounded by `max_leases`."""

    def __init__(self, max_leases: int) -> None:
        self.max_leases = max_leases
        self._leases: dict[int, Lease] = {}
        self._of_request: dict[tuple[int, str], set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __repr__(self) -> str:
        return f"<RequestMirror {len(self._leases)} leases of {len(self._of_request)} requests>"

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def full(self) -> bool:
        return len(self._leases) >= self.max_leases

    def grant(self, lease: Lease) -> None:
        """Remember a lease. The caller has pinned it."""
        self._leases[lease.lease_id] = lease
        self._of_request.setdefault((lease.session_id, lease.request_id), set()).add(lease.lease_id)
        heappush(self._deadlines, (lease.deadline, lease.lease_id))

    def take(self, session_id: int, lease_id: int) -> Lease | None:
        """End a lease of this session. The caller unpins it. None: unknown, ended, or another session's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            return None
        return self._end(lease)

    def take_request(self, session_id: int, request_id: str) -> list[Lease]:
        """End every lease of a request."""
        ids = self._of_request.get((session_id, request_id), ())
        return [self._end(self._leases[lease_id]) for lease_id in tuple(ids)]

    def take_session(self, session_id: int) -> list[Lease]:
        """End every lease of a session."""
        return [self._end(lease) for lease in tuple(self._leases.values()) if lease.session_id == session_id]

    def take_expired(self, now: float) -> list[Lease]:
        """End every lease whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heappop(self._deadlines)[1])
            if lease is not None:
                expired.append(self._end(lease))
        return expired

    def _end(self, lease: Lease) -> Lease:
        del self._leases[lease.lease_id]
        key = (lease.session_id, lease.request_id)
        self._of_request[key].discard(lease.lease_id)
        if not self._of_request[key]:
            del self._of_request[key]
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = sorted((kept.deadline, kept.lease_id) for kept in self._leases.values())
        return lease
