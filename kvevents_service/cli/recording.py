"""Recordings of streams: written while `kvevents tail` follows, and read in place of a stream.

The form is that of proto/vectors (`wire.recorded`), with a header that names the sources. In a file with such a
header what is missing in the numbers is said, as it is of a stream.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import msgspec

from kvevents_service.cli.render import Invalid
from kvevents_service.core.sequence import Origin
from kvevents_service.errors import ConfigError, WireError
from kvevents_service.subscriber import Batch, Gap, Restart, Resync
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared
from kvevents_service.wire.frames import live_frames
from kvevents_service.wire.recorded import parse_recorded_line


class Recorder:
    """Writes batches as they come. The file has token ids: it is for its owner only, and must not be there yet."""

    def __init__(self, path: str, sources: Iterable[str]) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                "--record", f"a new file that can be written, not {path} ({error.strerror})"
            ) from error
        self._file = os.fdopen(descriptor, "w", encoding="ascii")
        self._line({"recorder": "kvevents tail", "started": time.time(), "sources": list(sources)})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batch(self, batch: Batch) -> None:
        frames = [frame.hex() for frame in live_frames(batch.topic, batch.seq, batch.payload)]
        self._line({"source": batch.source.label, "frames": frames})

    def _line(self, plain: dict[str, object]) -> None:
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()


class ReplayEnd(NamedTuple):
    """The end marker of a replay reply."""


Read = Batch | Gap | Restart | Resync | ReplayEnd | Invalid


class Reader:
    """What a recording holds, line by line. topics: how many messages each had."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.topics: Counter[bytes] = Counter()
        self.labels: list[str] = []
        """The publishers that the recorder named."""
        self._lines = lines
        self._last: dict[Origin, int] = {}

    def __iter__(self) -> Iterator[Read]:
        for number, line in enumerate(self._lines, 1):
            try:
                yield from self._line(line)
            except WireError as error:
                yield Invalid(number, note_of(line), error.field, error.expected)

    def _line(self, line: str) -> Iterator[Batch | Gap | Restart | Resync | ReplayEnd]:
        recorded = parse_recorded_line(line)
        if recorded is None:
            self.labels += _labels_of(line)
            return
        if recorded.live is None:
            yield ReplayEnd()
            return
        topic, seq, payload = recorded.live
        batch, skipped = decode_batch(payload)
        self.topics[topic] += 1
        origin = Origin(recorded.source, topic, batch.data_parallel_rank)
        read = Batch(topic, seq, batch, skipped, recorded.replayed, origin, payload)
        if self.labels and not recorded.replayed:
            yield from self._before(read)
        yield read

    def _before(self, batch: Batch) -> Iterator[Gap | Restart | Resync]:
        """What the number says of those before it."""
        last, seq = self._last.get(batch.source), batch.seq
        self._last[batch.source] = seq
        if last is None or seq == last + 1:
            return
        if seq <= last:
            yield Restart(last, seq, batch.source)
        elif isinstance(next(iter(batch.batch.events), None), AllBlocksCleared):
            yield Resync(last + 1, seq, batch.source)
        else:
            yield Gap(last + 1, seq, batch.source)


class _Header(msgspec.Struct):
    sources: list[str] = []


def _labels_of(line: str) -> list[str]:
    try:
        return msgspec.json.decode(line, type=_Header).sources
    except (ValueError, TypeError, RecursionError):
        return []


class _Noted(msgspec.Struct):
    note: str = ""


def note_of(line: str) -> str:
    """The note of a line whatever its frames are; "" if it has none."""
    try:
        return msgspec.json.decode(line, type=_Noted).note
    except (ValueError, TypeError, RecursionError):
        return ""


def name_of(recording: IO[str]) -> str:
    return str(getattr(recording, "name", "recording"))
