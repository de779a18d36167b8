"""Events as they are shown: filtered, named by their source, each line written at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol
from zlib import crc32

from kvevents_service.cli.render import Invalid, Lines, Origin, escape
from kvevents_service.cli.tail_filter import Filter
from kvevents_service.subscriber import Back, Batch, Gap, Item, Restart, Resync, Stale, Undecodable
from kvevents_service.wire.codec import Decoded, Skipped
from kvevents_service.wire.events import Event

COLORS: Final = (36, 35, 34, 33, 32, 96, 95, 94)


class Enough(Exception):
    """--count events are printed."""


class Tags(Protocol):
    """Says in a line whose it is."""

    def __call__(self, label: str, line: str) -> str: ...


def no_tags(label: str, line: str) -> str:
    return line


def text_tags(labels: Sequence[str], color: bool) -> Tags:
    """The source before each line, in a colour that is always its own."""
    names = {label: escape(label.removeprefix("tcp://")) for label in labels}
    width = max(map(len, names.values()))

    def tag(label: str, line: str) -> str:
        name = f"{names.get(label, escape(label)):<{width}}"
        paint = COLORS[crc32(label.encode(errors="replace")) % len(COLORS)]
        return f"\x1b[{paint}m{name}\x1b[0m {line}" if color else f"{name} {line}"

    return tag


def json_tags(label: str, line: str) -> str:
    """`source` as the first key of the object."""
    return f'{{"source":{json.dumps(label)},{line[1:]}'


class Printer:
    """Writes what the filter wants, each line flushed at once. Raises Enough after `count` events."""

    def __init__(
        self,
        lines: Lines,
        wanted: Filter,
        count: int | None,
        write: Callable[[str], None],
        tags: Tags = no_tags,
    ) -> None:
        self.lines = lines
        self.wanted = wanted
        self.tags = tags
        self.events = 0
        self._count = count
        self._out = write

    def _write(self, label: str, line: str) -> None:
        self._out(self.tags(label, line))

    def item(self, item: Item) -> None:
        match item:
            case Batch():
                origin = Origin(item.seq, item.batch.ts, item.topic, item.batch.data_parallel_rank)
                self.batch(origin, item, item.source.label)
            case Gap():
                self._write(item.source.label, self.lines.gap(item))
            case Restart():
                self._write(item.source.label, self.lines.restart(item))
            case Resync():
                self._write(item.source.label, self.lines.resync(item))
            case Stale():
                self._write(item.label, self.lines.stale(item))
            case Back():
                self._write(item.label, self.lines.back(item))
            case Undecodable():
                self._write(item.source.label, self.lines.undecodable(item))

    def batch(self, origin: Origin, decoded: Batch | Decoded, label: str = "") -> None:
        for event in in_order(decoded):
            if isinstance(event, Skipped):
                if not self.wanted.skips_unknown and origin.seq >= self.wanted.since:
                    self._write(label, self.lines.skipped(origin, event))
            elif self.wanted.wants(event, label, origin.seq):
                self._write(label, self.lines.event(origin, event))
                self.events += 1
                if self.events == self._count:
                    raise Enough

    def replay_end(self) -> None:
        self._out(self.lines.replay_end())

    def invalid(self, invalid: Invalid) -> None:
        line = self.lines.invalid(invalid)
        if line is not None:
            self._out(line)


def in_order(decoded: Batch | Decoded) -> Iterator[Event | Skipped]:
    """Events and skipped ones as they stood in the batch."""
    skipped = {item.index: item for item in decoded.skipped}
    events = iter(decoded.batch.events)
    for index in range(len(decoded.batch.events) + len(skipped)):
        yield skipped[index] if index in skipped else next(events)
