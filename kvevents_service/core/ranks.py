"""Several ranks of one engine: a transfer runs on each of them, and has ended when every one has reported.

    begin(ranks) -> report(rank) ... report(rank) -> True or False, once, at the last report

It ends well only if every rank's copy did and no rank of its engine died meanwhile. It never ends before the last
report, however early it is known to have failed: another rank's copy may still touch engine blocks (I9).
"""

from __future__ import annotations

from collections import Counter

from kvevents_service.core.metadata import TransferMeta


class _Count:
    """What is still to come of one transfer."""

    __slots__ = ("good", "waiting")

    def __init__(self, ranks: int) -> None:
        self.waiting = set(range(ranks))
        self.good = True


class RankReports:
    """Every transfer under way, and which ranks have not reported yet. A second report of a rank counts nothing."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter(reports_ignored=0, transfers_lost_a_rank=0)
        self._open: dict[TransferMeta, _Count] = {}

    def __repr__(self) -> str:
        return f"<RankReports open={len(self._open)}>"

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, transfer: TransferMeta, ranks: int) -> None:
        """Wait for a report of each rank, 0 to `ranks` - 1."""
        self._open[transfer] = _Count(ranks)

    def report(self, transfer: TransferMeta, rank: int, *, good: bool) -> bool | None:
        """A rank's copy has ended. Whether all went well, if it was the last one; None if others are to come."""
        count = self._open.get(transfer)
        if count is None or rank not in count.waiting:
            self.counters["reports_ignored"] += 1
            return None
        count.waiting.discard(rank)
        count.good &= good
        if count.waiting:
            return None
        del self._open[transfer]
        return count.good

    def lose(self, session_id: int) -> None:
        """A rank of this engine died: none of its open transfers can end well, also if that rank has reported."""
        for transfer, count in self._open.items():
            if transfer.session_id == session_id:
                self.counters["transfers_lost_a_rank"] += count.good
                count.good = False
