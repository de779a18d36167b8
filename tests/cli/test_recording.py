"""Recordings: what is written is what came, byte for byte, and holes in one are said."""

import io
import json
import stat
from pathlib import Path

import pytest

from kvevents_service.cli.recording import Read, Reader, Recorder
from kvevents_service.core.sequence import Origin
from kvevents_service.errors import ConfigError
from kvevents_service.subscriber import Batch, Gap, Restart, Resync
from kvevents_service.wire.codec import decode_batch, encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, Event, EventBatch

GONE = BlockRemoved([1], "CPU")


def batch(seq: int, *events: Event, label: str = "a", topic: bytes = b"kv") -> Batch:
    payload = encode_batch(EventBatch(1.5, list(events), 0))
    decoded, skipped = decode_batch(payload)
    return Batch(topic, seq, decoded, skipped, False, Origin(label, topic, 0), payload)


def read(*batches: Batch) -> list[Read]:
    lines = [
        json.dumps({"source": one.source.label, "frames": [one.topic.hex(), f"{one.seq:016x}", one.payload.hex()]})
        for one in batches
    ]
    return list(Reader([json.dumps({"sources": ["a"]}), *lines]))


def test_messages_without_a_header_are_no_stream() -> None:
    lines = [json.dumps({"frames": ["", f"{seq:016x}", batch(seq).payload.hex()]}) for seq in (0, 7)]
    assert [type(item) for item in Reader(lines)] == [Batch, Batch]


def test_what_is_read_is_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    batches = [batch(3, GONE), batch(4), batch(9, AllBlocksCleared(), label="b"), batch(0, GONE, topic=b"\xff")]
    with Recorder(str(path), ["a", "b"]) as recorder:
        for one in batches:
            recorder.batch(one)
    reader = Reader(path.read_text().splitlines())
    assert list(reader) == batches
    assert reader.labels == ["a", "b"]
    assert reader.topics == {b"kv": 3, b"\xff": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"^--record: expected a new file"):
        Recorder(str(path), [])
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("seqs", "said"),
    [
        ((0, 1, 2), []),
        ((5, 6), []),
        ((0, 3), [Gap(1, 3, Origin("a", b"kv", 0))]),
        ((4, 1), [Restart(4, 1, Origin("a", b"kv", 0))]),
        ((4, 4), [Restart(4, 4, Origin("a", b"kv", 0))]),
    ],
)
def test_holes_are_said(seqs: tuple[int, ...], said: list[Read]) -> None:
    found = read(*(batch(seq, GONE) for seq in seqs))
    assert [item for item in found if not isinstance(item, Batch)] == said
    assert sum(isinstance(item, Batch) for item in found) == len(seqs)


def test_a_clear_after_a_hole_is_no_loss() -> None:
    assert read(batch(0), batch(7, AllBlocksCleared()))[1] == Resync(1, 7, Origin("a", b"kv", 0))


def test_each_counter_has_numbers_of_its_own() -> None:
    items = read(batch(0), batch(7, label="b"), batch(1), batch(3, topic=b"other"), batch(8, label="b"))
    assert all(isinstance(item, Batch) for item in items)


def test_a_line_that_is_none_is_named_and_reading_goes_on() -> None:
    items = list(Reader(io.StringIO('{"note": "bad", "frames": ["zz"]}\nnot json\n{"sources": 7}\n')))
    assert [(item.line, item.note, item.field) for item in items] == [  # type: ignore[union-attr]
        (1, "bad", "frames[0]"),
        (2, "", "line"),
    ]
