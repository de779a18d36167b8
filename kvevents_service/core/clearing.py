"""A reset under way: every block of every tier is removed, some at a time, and then those who asked are answered.

    begin -> Publish(BlockRemoved), go_on -> Publish(BlockRemoved), ... -> Reply(ResetDone)

Leaves go first, so what is left is prefix-closed, and all of it is announced, at every moment (I4,
I6). Meanwhile nothing is found, stored, loaded or demoted: to engines the tiers are empty from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents_service.core.commands import Command, Reply
from kvevents_service.core.tier import Tier
from kvevents_service.wire.control import Reset, ResetDone


class Clearing:
    """Of these tiers, one reset after another or several as one."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._asked: list[tuple[int, Reset]] = []
        self._removed = 0

    def __repr__(self) -> str:
        return f"<Clearing for {len(self._asked)}>"

    @property
    def under_way(self) -> bool:
        return bool(self._asked)

    def begin(self, session_id: int, reset: Reset) -> list[Command]:
        """The first slice. What other processes kept here is not taken in any more."""
        self._asked.append((session_id, reset))
        for tier in self._tiers:
            tier.let_go()
        return self.go_on()

    def go_on(self) -> list[Command]:
        """A slice more, and the answers with the last one."""
        commands: list[Command] = []
        left = self._tiers[0].limits.slice_blocks
        for tier in self._tiers:
            while left > 0 and not tier.pool.empty:
                blocks, gone = tier.pool.forget_leaves(left)
                left -= blocks
                self._removed += sum(len(names.hashes) for names in gone)
                commands += [tier.removal(gone)] if gone else []
        return commands if any(not tier.pool.empty for tier in self._tiers) else [*commands, *self._answers()]

    def _answers(self) -> list[Reply]:
        asked, removed = self._asked, self._removed
        self._asked, self._removed = [], 0
        return [Reply(session_id, ResetDone(reset.call_id, removed)) for session_id, reset in asked]
