"""What `kvevents tail --summary` says of each source: whether it is there, how old its news is, what was odd."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Final, NamedTuple

from kvevents_service.cli.render import escape
from kvevents_service.core.residency import Residency
from kvevents_service.subscriber import Batch, Gap, Item, Restart, Resync
from kvevents_service.wire.jsonform import Json

ODD: Final = {"orphans": "parent_absent", "duplicates": "stored_twice", "removed_unknown": "removed_unknown"}
"""As it is called here, and as a fold counts it: in blocks, orphans in events."""


class Standing(NamedTuple):
    """One source. counts: since the last line. age_s: of its last batch, by its own clock; None: nothing came.

    connected: None for a recording.
    """

    source: str
    connected: bool | None
    age_s: float | None
    counts: dict[str, int]
    resident: dict[str, int]

    def plain(self) -> dict[str, Json]:
        """A JSON object."""
        known: dict[str, Json] = {"source": self.source, "connected": self.connected, "age_s": self.age_s}
        return {**known, **self.counts, "resident": dict(self.resident)}

    def text(self, seconds: float) -> str:
        """A line for people."""
        state = {True: "connected", False: "not connected", None: "recorded"}[self.connected]
        parts = [
            escape(self.source),
            state,
            "nothing yet" if self.age_s is None else f"{self.age_s:.1f} s old",
            f"{self.counts['batches'] / seconds:,.1f} batches/s",
            *(
                f"{key.replace('_', ' ')} {count}"
                for key, count in self.counts.items()
                if count and key != "batches"
            ),
            *(f"{escape(medium)}: {blocks:,} blocks" for medium, blocks in self.resident.items()),
        ]
        return f"  {'  '.join(parts)}"


class SourceSums:
    """Counts of one source since the last line."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._counts: Counter[str] = Counter()
        self._odd: Counter[str] = Counter()
        self._sent_at: float | None = None

    def __repr__(self) -> str:
        return f"<SourceSums {self.label} {dict(self._counts)}>"

    def item(self, item: Item) -> None:
        match item:
            case Batch():
                self._counts["batches"] += 1
                self._sent_at = item.batch.ts if isfinite(item.batch.ts) else self._sent_at
            case Gap():
                self._counts["gaps"] += 1
                self._counts["lost_batches"] += item.got - item.expected
            case Restart() | Resync():
                self._counts["restarts"] += 1

    def standing(self, now: float, fold: Residency, connected: bool | None) -> Standing:
        """As of now; counting begins anew."""
        counts, self._counts = self._counts, Counter()
        odd, self._odd = fold.faults - self._odd, Counter(fold.faults)
        said = {key: counts[key] for key in ("batches", "gaps", "lost_batches", "restarts")}
        said |= {key: odd[fault] for key, fault in ODD.items()}
        resident: Counter[str] = Counter()
        for shelf, names in fold.shelves.items():
            resident[shelf.medium] += len(names)
        age_s = None if self._sent_at is None else max(0.0, now - self._sent_at)
        return Standing(self.label, connected, age_s, said, dict(+resident))
