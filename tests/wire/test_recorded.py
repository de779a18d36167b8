"""Recorded lines: every vector file reads as `kvevents tail --input` will read it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_vectors import ALL, DECODED, DIRECTORY, INVALID

from kvevents_service.errors import WireError
from kvevents_service.wire.frames import LiveFrame
from kvevents_service.wire.recorded import Recorded, parse_recorded_line

SEQ_7 = "0000000000000007"


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
def test_a_live_vector(vector) -> None:
    topic, seq, payload = vector.frames
    recorded = parse_recorded_line(vector.line)
    assert recorded == Recorded(json.loads(vector.line)["note"], LiveFrame(topic, int(seq.hex(), 16), payload))


def test_a_recorded_replay_reads_to_its_end() -> None:
    lives = [parse_recorded_line(vector.line).live for vector in ALL if "replay" in vector.id]
    assert [live and live.seq for live in lives] == [2, 3, 4, 5, 6, None]


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_first_line_of_a_file_is_a_header(path) -> None:
    assert parse_recorded_line(path.read_text().splitlines(keepends=True)[0]) is None


@pytest.mark.parametrize("line", ["", "\n", "  \t\n", "{}", '{"note": "x"}\n', '{"frames": null}'])
def test_a_line_without_a_message(line: str) -> None:
    assert parse_recorded_line(line) is None


def test_faults_of_frames_are_found_here_and_of_payloads_later() -> None:
    refused = [vector.id for vector in INVALID if raises(vector.line)]
    assert [name.split(":")[2] for name in refused] == ["one frame", "seq of 4 bytes", "empty payload"]


def raises(line: str) -> str:
    try:
        parse_recorded_line(line)
    except WireError as error:
        return error.field
    return ""


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("not json", "line"),
        ("[]", "line"),
        ('{"frames": []}', "frames"),
        ('{"frames": "00"}', "line"),
        ('{"frames": [1, 2, 3]}', "line"),
        ('{"note": 1, "frames": []}', "line"),
        ('{"frames": ["", "0000000000000007", "0"]}', "frames[2]"),
        ('{"frames": ["zz", "0000000000000007", "00"]}', "frames[0]"),
        ('{"frames": ["", "", "", "", ""]}', "frames"),
        ('{"frames": ["", "ffffffffffffffff", ""]}', "seq"),
        ('{"frames": ["", "", "ffffffffffffffff", "00"]}', "seq"),
        ('{"frames": ["", "0000000000000007", ""]}', "payload"),
        ('{"frames": ["", "0000000000000007", "00"]} x', "line"),
        ('{"x": ' + "[" * 100_000, "line"),
        ('{"note": "\ud800"}', "line"),
    ],
)
def test_a_faulty_line(line: str, field: str) -> None:
    assert raises(line) == field


def test_a_line_without_a_note() -> None:
    line = json.dumps({"frames": ["6b76", SEQ_7, "90"], "later": {"key": 1}})
    assert parse_recorded_line(line) == Recorded("", LiveFrame(b"kv", 7, b"\x90"))


@given(st.text() | st.lists(st.text(alphabet="0123456789abcdefg ", max_size=16), max_size=5))
def test_any_line_is_read_or_refused(value) -> None:
    raises(value if isinstance(value, str) else json.dumps({"frames": value}))
