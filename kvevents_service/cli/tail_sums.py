"""What `kvevents tail --rate` and `--summary` show in place of events: a line every so often. A summary of several
sources has a line of each below it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvevents_service.cli.render import clock_time, escape
from kvevents_service.cli.source_sums import SourceSums, Standing
from kvevents_service.cli.tail_filter import Filter
from kvevents_service.cli.tail_printer import Enough
from kvevents_service.core.residency import Residency
from kvevents_service.subscriber import Back, Batch, Gap, Item, Refused, Restart, Resync, Stale
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.jsonform import Json


class Resident(NamedTuple):
    """Blocks of one source that can be loaded, as far as its stream was seen."""

    source: str
    medium: str
    group: int
    blocks: int


class Sums:
    """Counts of what is wanted since the last line; with `fold`, what the streams add up to on the wanted media and
    in the wanted groups, and how each source stands. Raises Enough after `count` lines.

    labels: sources that are shown before anything comes. `connections`: which of them are there, if that is known.
    """

    def __init__(
        self, wanted: Filter, *, fold: bool, as_json: bool, count: int | None = None, labels: Sequence[str] = ()
    ) -> None:
        self.connections: Callable[[], Mapping[str, bool]] = dict
        self._wanted = wanted
        self._shelves = Filter(media=wanted.media, groups=wanted.groups)
        self._left = count
        self._counts: Counter[str] = Counter()
        self._folds: defaultdict[str, Residency] | None = defaultdict(Residency) if fold else None
        self._sources = {label: SourceSums(label) for label in labels}
        self._as_json = as_json

    def item(self, item: Item) -> None:
        if isinstance(item, Stale | Back | Refused):
            return
        label = item.source.label
        self._sources.setdefault(label, SourceSums(label)).item(item)
        match item:
            case Batch():
                self._batch(item)
            case _:
                self._counts["lost_batches"] += item.got - item.expected if isinstance(item, Gap) else 0
                self._counts["restarts"] += isinstance(item, Restart | Resync)
                if self._folds is not None:
                    self._folds[item.source.label].forget()

    def _batch(self, item: Batch) -> None:
        self._counts["batches"] += 1
        for event in item.batch.events:
            if self._wanted.wants(event, item.source.label, item.seq):
                self._count(event)
        if self._folds is not None:
            self._folds[item.source.label].apply(filter(self._shelves.wants, item.batch.events))

    def _count(self, event: Event) -> None:
        match event:
            case BlockStored():
                self._counts["stored_events"] += 1
                self._counts["stored_blocks"] += len(event.block_hashes)
            case BlockRemoved():
                self._counts["removed_events"] += 1
                self._counts["removed_blocks"] += len(event.block_hashes)
            case AllBlocksCleared():
                self._counts["cleared_events"] += 1

    def said(self) -> None:
        """A line was written."""
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise Enough

    def resident(self) -> list[Resident]:
        folds = {} if self._folds is None else self._folds
        return [
            Resident(label, shelf.medium, shelf.group, len(names))
            for label, fold in folds.items()
            for shelf, names in fold.shelves.items()
            if names
        ]

    def line(self, now: float, seconds: float) -> str:
        """The counts of the last `seconds`; counting begins anew. now: seconds since the epoch."""
        counts, self._counts = self._counts, Counter()
        if self._as_json:
            return self._json(counts, now, seconds)
        parts = [
            f"{counts['batches'] / seconds:,.1f} batches/s",
            *(
                f"{verb} {counts[f'{verb}_events'] / seconds:,.1f} events/s, "
                f"{counts[f'{verb}_blocks'] / seconds:,.0f} blocks/s"
                for verb in ("stored", "removed")
            ),
            *(f"{name} {counts[key]}" for name, key in LOSSES if counts[key]),
            *(self._resident_texts()),
        ]
        of_each = [one.text(seconds) for one in self.standings(now)] if len(self._sources) > 1 else []
        return "\n".join([f"{clock_time(now)} {'  '.join(parts)}", *of_each])

    def standings(self, now: float) -> list[Standing]:
        """Of each source, with `fold`; its counting begins anew."""
        if self._folds is None:
            return []
        there = self.connections()
        return [one.standing(now, self._folds[label], there.get(label)) for label, one in self._sources.items()]

    def _resident_texts(self) -> list[str]:
        if len(self._sources) > 1:
            return []
        return [f"{escape(one.medium)} g{one.group}: {one.blocks:,} blocks" for one in self.resident()]

    def _json(self, counts: Counter[str], now: float, seconds: float) -> str:
        plain: dict[str, Json] = {
            "type": "Rate" if self._folds is None else "Summary",
            "ts": now,
            "seconds": seconds,
        }
        plain |= {key: counts[key] for key in KEYS}
        if self._folds is not None:
            plain["resident"] = [dict(one._asdict()) for one in self.resident()]
            plain["sources"] = [one.plain() for one in self.standings(now)]
        return json.dumps(plain, separators=(",", ":"))


KEYS = (
    *("batches", "stored_events", "stored_blocks", "removed_events", "removed_blocks", "cleared_events"),
    *("lost_batches", "restarts"),
)
LOSSES = (("cleared", "cleared_events"), ("batches lost", "lost_batches"), ("restarts", "restarts"))
