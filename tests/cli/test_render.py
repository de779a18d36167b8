"""Lines for people and for programs, and that nothing a peer sends reaches a terminal raw."""

import json
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.cli.render import HumanLines, Invalid, JsonLines, Look, Origin, clock_time, escape, short_hash
from kvevents_service.errors import WireError
from kvevents_service.subscriber import Back, Gap, Restart, Resync, Stale, Undecodable
from kvevents_service.wire.codec import Skipped
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

NOON = Origin(42, 43201.123, b"kv", 0)
FIRST, LAST = 0x1A2B3C4D_00000001, 0x99AABBCC_00000002
FLOAT = WireError("ts", "float")
HOSTILE = "x\x1b[2J\x9b\x07\r\n\u202e"
PLAIN = HumanLines(Look(zone=UTC))
JSON = JsonLines()


def stored(**fields: object) -> BlockStored:
    defaults = {"block_hashes": [FIRST, 7, LAST], "parent_block_hash": 0x0F0F0F0F_00000000, "token_ids": [5, 6] * 3}
    rest = {"block_size": 2, "lora_id": None, "medium": "CPU_PINNED", "lora_name": None}
    return BlockStored(**(defaults | rest | fields))


def removed(**fields: object) -> BlockRemoved:
    return BlockRemoved(**({"block_hashes": [FIRST], "medium": None} | fields))


class TestHuman:
    def test_stored(self) -> None:
        start, rest = PLAIN.event(NOON, stored(lora_name="x")).split("  1a2b", 1)
        assert start == "12:00:01.123 #42    stored   CPU     g0     3 blocks"
        assert rest == "3c4d..99aabbcc  parent 0f0f0f0f  6 tokens  lora=x"

    def test_removed(self) -> None:
        line = "12:00:01.123 #42    removed  GPU     g3      1 block  1a2b3c4d"
        assert PLAIN.event(NOON, removed(group_idx=3)) == line

    def test_cleared(self) -> None:
        assert PLAIN.event(NOON, AllBlocksCleared()) == "12:00:01.123 #42    cleared  all tiers"

    def test_tokens_are_shown_if_asked_for(self) -> None:
        assert "5,6" not in PLAIN.event(NOON, stored())
        assert HumanLines(Look(tokens=True)).event(NOON, stored()).endswith("  tokens=5,6,5,6,5,6")

    def test_full_hashes(self) -> None:
        line = HumanLines(Look(full_hashes=True)).event(NOON, stored(block_hashes=[FIRST, b"\x01" * 32]))
        assert f"  1a2b3c4d00000001,{'01' * 32}  parent 0f0f0f0f00000000  " in line

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            (PLAIN.gap(Gap(41, 44)), "gap: 3 batches missing (41..43)"),
            (PLAIN.gap(Gap(41, 42)), "gap: 1 batch missing (41)"),
            (PLAIN.gap(Gap(41, 41)), "gap: the state told before #41 is not whole"),
            (PLAIN.restart(Restart(9, 0)), "restart: the publisher began anew (#9, then #0)"),
            (PLAIN.resync(Resync(3, 9)), "resync: the whole state comes anew (#9, expected #3)"),
            (PLAIN.stale(Stale("pod", 2.04)), "stale: nothing came for 2.0 s"),
            (PLAIN.back(Back("pod")), "back: messages come again"),
            (PLAIN.undecodable(Undecodable(b"", 7, FLOAT)), "undecodable: #7 ts: expected float"),
            (PLAIN.undecodable(Undecodable(b"", None, FLOAT)), "undecodable: ts: expected float"),
            (PLAIN.replay_end(), "replay end"),
            (PLAIN.invalid(Invalid(3, "", "seq", "8 bytes")), None),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_is_no_event(self, line: str | None, text: str | None) -> None:
        assert line == text

    def test_a_skipped_event(self) -> None:
        line = PLAIN.skipped(NOON, Skipped(0, "BlockPinned", "unknown type"))
        assert line == "12:00:01.123 #42    skipped  BlockPinned (unknown type)"

    def test_colours(self) -> None:
        lines = HumanLines(Look(color=True, zone=UTC))
        painted = [
            lines.event(NOON, stored()),
            lines.event(NOON, removed()),
            lines.event(NOON, AllBlocksCleared()),
            lines.gap(Gap(1, 2)),
            lines.skipped(NOON, Skipped(0, "New", "unknown type")),
        ]
        assert [line.partition("\x1b[")[2].partition("m")[0] for line in painted] == ["32", "33", "31", "31", "2"]
        assert all(line.count("\x1b[") == 2 for line in painted)


class TestJson:
    def test_an_event(self) -> None:
        assert json.loads(JSON.event(NOON, removed())) == {
            **{"seq": 42, "ts": 43201.123, "topic": "kv", "dp_rank": 0},
            **{"type": "BlockRemoved", "block_hashes": [str(FIRST)], "medium": None},
        }

    def test_tokens_are_shown_if_asked_for(self) -> None:
        assert json.loads(JSON.event(NOON, stored()))["token_count"] == 6
        assert json.loads(JsonLines(Look(tokens=True)).event(NOON, stored()))["token_ids"] == [5, 6] * 3

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (JSON.gap(Gap(41, 44)), {"type": "Gap", "expected": 41, "got": 44}),
            (JSON.restart(Restart(9, 0)), {"type": "Restart", "last": 9, "seq": 0}),
            (JSON.resync(Resync(3, 9)), {"type": "Resync", "expected": 3, "got": 9}),
            (JSON.stale(Stale("pod", 2.5)), {"type": "Stale", "silent_s": 2.5}),
            (JSON.back(Back("pod")), {"type": "Back"}),
            (
                JSON.undecodable(Undecodable(b"kv\xff", None, WireError("seq", "8 bytes"))),
                {"type": "Undecodable", "seq": None, "topic": "kv\\xff", "field": "seq", "expected": "8 bytes"},
            ),
            (JSON.replay_end(), {"type": "ReplayEnd"}),
            (
                JSON.invalid(Invalid(3, "x", "seq", "8 bytes")),
                {"type": "Invalid", "line": 3, "note": "x", "field": "seq", "expected": "8 bytes"},
            ),
            (
                JSON.skipped(NOON, Skipped(1, "New", "unknown type")),
                {"seq": 42, "ts": 43201.123, "topic": "kv", "dp_rank": 0, "type": "Skipped", "event_type": "New",
                 "reason": "unknown type"},
            ),
        ],
    )  # fmt: skip
    def test_what_is_no_event(self, line: str, expected: dict[str, object]) -> None:
        assert json.loads(line) == expected


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), -float("inf"), 1e300, -1e300])
def test_a_time_that_is_none(ts: float) -> None:
    origin = NOON._replace(ts=ts)
    assert PLAIN.event(origin, removed()).startswith("--:--:--.--- #42 ")
    assert json.loads(JSON.event(origin, removed()))["seq"] == 42


@pytest.mark.parametrize(
    "event",
    [stored(lora_name=HOSTILE, medium=HOSTILE), stored(session_id=HOSTILE, extra_keys=[{HOSTILE: HOSTILE}] * 3)],
)
@pytest.mark.parametrize("lines", [PLAIN, JSON], ids=["human", "json"])
def test_control_characters_never_reach_the_terminal(lines: HumanLines | JsonLines, event: BlockStored) -> None:
    assert lines.event(NOON._replace(topic=HOSTILE.encode()), event).isprintable()
    assert lines.skipped(NOON, Skipped(0, HOSTILE, "unknown type")).isprintable()


@given(st.text())
def test_escaped_text_is_printable_and_short(text: str) -> None:
    assert escape(text).isprintable()
    assert len(escape(text)) <= 80 * len("\\U0010ffff") + 3


@given(st.floats())
def test_any_float_is_a_time_or_none(ts: float) -> None:
    assert len(clock_time(ts, UTC)) == len("12:00:00.000")


@pytest.mark.parametrize(
    "block_hash", [FIRST, FIRST - 2**64, FIRST.to_bytes(8, "big"), b"\x07" * 24 + FIRST.to_bytes(8, "big")]
)
def test_the_forms_of_one_hash_look_the_same(block_hash: int | bytes) -> None:
    assert short_hash(block_hash) == "1a2b3c4d"
