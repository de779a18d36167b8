"""Metrics of what is said: journals, ZeroMQ outputs, outputs on NATS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvevents_service.service.family import Family, Reading, Samples
from kvevents_service.service.instruments import NatsView, OutputView
from kvevents_service.wire.dialects import DIALECTS

_JOURNAL, _OUTPUT, _NATS = ("dp_rank",), ("output", "dialect"), ("subject",)


def _by_output(read: Callable[[OutputView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [(view.labels, read(view)) for view in reading.outputs]


def _output_stat(key: str) -> Callable[[Reading], Samples]:
    return lambda reading: [(view.labels, view.stats[key]) for view in reading.outputs if key in view.stats]


def _journal(key: str) -> Callable[[Reading], Samples]:
    return lambda reading: [((str(one.dp_rank),), one.stats.get(key, 0)) for one in reading.journals]


def _by_nats(read: Callable[[NatsView], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [((view.subject,), read(view)) for view in reading.nats]


def _nats(key: str) -> Callable[[Reading], Samples]:
    return _by_nats(lambda view: view.stats[f"nats_{key}"])


def _said(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for view in reading.outputs:
        for kind, medium, events in view.tally.said_in(DIALECTS[view.bound.dialect]):
            yield (*view.labels, kind, medium), events


def _burnt(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for one in reading.journals:
        yield (str(one.dp_rank), "dropped"), one.journal.dropped_batches
        yield (str(one.dp_rank), "unencodable"), one.journal.lost_batches


EVENTS: Final = (
    Family("gauge", "next_event_number", "The number that the next batch takes.", _JOURNAL, _journal("next_seq")),
    Family("counter", "events", "Events sent, before any dialect.", ("type", "medium"),
           lambda r: r.of.said().items()),
    Family("counter", "event_blocks", "Their blocks.", ("type", "medium"), lambda r: r.of.blocks_said().items()),
    Family("counter", "burnt_numbers", "Numbers without a batch: a hole for every reader.",
           (*_JOURNAL, "reason"), _burnt),
    Family("gauge", "pending_batches", "Numbered and not sent yet.", _JOURNAL, _journal("batches_pending")),
    Family("gauge", "retained_batches", "Kept for replay.", _JOURNAL, _journal("batches_retained")),
    Family("gauge", "retained_bytes", "Their bytes, in every encoding.", _JOURNAL, _journal("retained_bytes")),
    Family("counter", "heartbeats", "Empty batches sent while idle.", _JOURNAL, _journal("heartbeats")),
    Family("counter", "states_told_live", "States told live, to readers no reply can help.", _JOURNAL,
           _journal("states_told_live")),
    Family("counter", "snapshots_made", "Snapshots rendered, for replays too.", _JOURNAL,
           _journal("snapshots_made")),
    Family("gauge", "snapshot_bytes", "Held for late readers.", _JOURNAL, _journal("snapshot_bytes")),
    # ZeroMQ outputs
    Family("counter", "output_events", "Events as the output's dialect says them.",
           (*_OUTPUT, "type", "medium"), _said),
    Family("counter", "output_batches", "Batches sent.", _OUTPUT, _by_output(lambda view: view.output.sent)),
    Family("counter", "output_batches_refused", "Batches the socket did not take.", _OUTPUT,
           _by_output(lambda view: view.output.refused)),
    Family("counter", "output_sends_held", "Sends that took over 50 ms: readers came and went in masses.", _OUTPUT,
           _by_output(lambda view: view.output.held)),
    Family("gauge", "output_subscribers", "Connections now.", _OUTPUT, _by_output(lambda view: len(view.readers))),
    Family("counter", "replay_requests", "Replays asked for.", _OUTPUT, _output_stat("replay_requests")),
    Family("counter", "replay_dropped_clients", "Replay clients given up.", _OUTPUT,
           _output_stat("replay_dropped_clients")),
    Family("counter", "snapshots_answered", "Snapshots sent whole.", _OUTPUT, _output_stat("snapshots_answered")),
    Family("counter", "snapshots_unavailable", "Snapshots refused for now.", _OUTPUT,
           _output_stat("snapshots_unavailable")),
    # outputs on NATS
    Family("gauge", "nats_connected", "1 while there is a broker.", _NATS, _nats("connected")),
    Family("counter", "nats_connections", "Connections made, the first one included.", _NATS, _nats("connections")),
    Family("counter", "nats_disconnects", "Connections lost, and tries in vain.", _NATS, _nats("disconnects")),
    Family("counter", "nats_batches_published", "Batches handed to the broker, some of them again.", _NATS,
           _nats("batches_published")),
    Family("counter", "nats_batches_acked", "Batches that the stream has.", _NATS, _nats("batches_sent")),
    Family("counter", "nats_batches_dropped", "Batches that readers get from a snapshot only.", _NATS,
           _nats("batches_dropped")),
    Family("gauge", "nats_pending_batches", "Waiting here for the broker.", _NATS, _nats("batches_waiting")),
    Family("gauge", "nats_pending_bytes", "Their bytes.", _NATS, _nats("bytes_waiting")),
    Family("counter", "nats_snapshots", "Snapshots put into the bucket.", _NATS, _nats("snapshots")),
    Family("counter", "nats_snapshots_failed", "Snapshots that could not be rendered.", _NATS,
           _nats("snapshots_failed")),
)  # fmt: skip
