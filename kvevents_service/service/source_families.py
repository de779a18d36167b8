"""Metrics of relayed sources: engines' own streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvevents_service.service.family import Family, Reading, Samples
from kvevents_service.service.relayed import SOURCE_STATES, SourceView

_SOURCE: Final = ("source", "dp_rank")
FAULTS: Final = (
    *("malformed", "undecodable", "removed_unknown", "refused", "orphans_dropped", "not_its_own"),
    *("other_origin", "other_topics"),
)
"""What came and was not said, by the counter's name. See docs/relay.md."""


def _labels(view: SourceView) -> tuple[str, str]:
    return view.name, str(view.dp_rank)


def _by_source(read: Callable[[SourceView], float | None]) -> Callable[[Reading], Samples]:
    """None: there is no such figure yet."""
    return lambda reading: [(_labels(view), found) for view in reading.sources if (found := read(view)) is not None]


def _count(key: str) -> Callable[[Reading], Samples]:
    return _by_source(lambda view: view.counts.get(key, 0))


def _states(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for view in reading.sources:
        for state in SOURCE_STATES:
            yield (*_labels(view), state), state == view.state


def _resident(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for view in reading.sources:
        for medium, blocks in view.resident.items():
            yield (*_labels(view), medium), blocks


def _faults(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for view in reading.sources:
        for kind in FAULTS:
            yield (*_labels(view), kind), view.counts.get(kind, 0)


SOURCES: Final = (
    Family("gauge", "source_state", "1 for the state it is in.", (*_SOURCE, "state"), _states),
    Family("gauge", "source_age_seconds", "Since its last batch was made, by its own clock.", _SOURCE,
           _by_source(lambda view: view.age_s)),
    Family("gauge", "source_lag_seconds", "How late its last batch came.", _SOURCE,
           _by_source(lambda view: view.lag_s)),
    Family("gauge", "source_behind_batches", "Batches that came and wait for one before them.", _SOURCE,
           _count("held")),
    Family("gauge", "source_resident_blocks", "Its blocks that are announced.", (*_SOURCE, "medium"), _resident),
    Family("gauge", "source_orphans", "Its blocks that wait for their parent.", _SOURCE, _count("orphans")),
    Family("counter", "source_batches", "Batches taken, replayed ones too.", _SOURCE, _count("batches")),
    Family("counter", "source_bytes", "Bytes that came.", _SOURCE, _count("bytes")),
    Family("counter", "source_gaps", "Holes in its numbers that no replay could fill.", _SOURCE, _count("gaps")),
    Family("counter", "source_missing_batches", "The batches in them.", _SOURCE, _count("batches_missing")),
    Family("counter", "source_duplicate_batches", "Batches that had come before.", _SOURCE,
           _count("duplicate_batches")),
    Family("counter", "source_duplicate_blocks", "Blocks it stored more than once.", _SOURCE, _count("duplicates")),
    Family("counter", "source_replays", "Replays asked of it.", _SOURCE, _count("replays")),
    Family("counter", "source_replays_given_up", "Replays that did not come to an end.", _SOURCE,
           _count("replays_given_up")),
    Family("counter", "source_restarts", "Times it was started anew.", _SOURCE, _count("restarts")),
    Family("counter", "source_withdrawals", "Times that its blocks were withdrawn as it was gone.", _SOURCE,
           _count("hidden")),
    Family("counter", "source_left_out", "What came and was not said, in blocks or messages.", (*_SOURCE, "kind"),
           _faults),
)  # fmt: skip
