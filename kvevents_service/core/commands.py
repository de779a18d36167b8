"""What the core decides and the shell does, in the order given.

The order is the promise: a `Publish` that says a block is gone precedes the `Copy` that rewrites its slot (I3).
"""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.core.metadata import Announcement, StoreRun, TransferMeta
from kvevents_service.wire.control import SidecarMessage


class Publish(NamedTuple):
    """Append one batch to the journal."""

    announcements: tuple[Announcement, ...]


class Copy(NamedTuple):
    """Start this copy; answer with `OffloadScheduler.complete` or `.fail` when it has ended."""

    transfer: TransferMeta


class Reply(NamedTuple):
    """Send a message to a session, if it is still there."""

    session_id: int
    message: SidecarMessage


class Keep(NamedTuple):
    """These runs are in a tier that keeps its blocks, and were announced just now: find them again after a restart.

    It precedes whatever could take their slots.
    """

    runs: tuple[StoreRun, ...]


Command = Publish | Copy | Reply | Keep
