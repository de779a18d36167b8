"""What is on the screen while the demo runs."""

import re

import pytest

from kvevents_service.cli.demo_view import REDRAW_S, SHOWN_EVENTS, Live, Plain, make_view
from kvevents_service.cli.render import HumanLines
from kvevents_service.subscriber import Batch, Gap
from kvevents_service.wire.events import BlockRemoved, BlockStored, Event, EventBatch


class Screen:
    """The rows of a terminal that is high enough, and a clock that stands still."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.now = 100.0
        self.live = Live(HumanLines(), self.put, lambda: self.now)

    def put(self, text: str) -> None:
        for part in re.split(r"(\x1b\[\d+A\x1b\[J)", re.sub(r"\x1b\[\?7[lh]", "", text)):
            up = re.match(r"\x1b\[(\d+)A", part)
            if up:
                del self.rows[-int(up[1]) :]
            else:
                assert part == "" or part.endswith("\n")
                self.rows += part.splitlines()

    def batch(self, seq: int, *events: Event) -> None:
        self.now += REDRAW_S
        self.live.show(Batch(b"", seq, EventBatch(1.0, list(events), 0), (), False))


@pytest.fixture
def screen() -> Screen:
    return Screen()


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, "CPU", None)


def test_the_last_events_are_drawn_over_the_ones_before(screen: Screen) -> None:
    for seq in range(20):
        screen.batch(seq, stored(2 * seq, 2 * seq + 1))
    screen.batch(20, BlockRemoved([0], "CPU"))
    numbers = [row.split()[1] for row in screen.rows[:-1]]
    assert numbers == [f"#{seq}" for seq in range(21 - SHOWN_EVENTS, 21)]
    assert screen.rows[-1] == "batches 21, blocks stored 40, removed 1"


def test_other_lines_stay_above(screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    screen.batch(0, stored(1))
    screen.live.show(Gap(1, 3))
    screen.batch(3, stored(2))
    assert screen.rows[0] == "gap: 2 batches missing (1..2)"
    assert len(screen.rows) == 1 + 2 + 1
    screen.live.say("served")
    assert capsys.readouterr().err == "served\n"
    assert len(screen.rows) == 1 + 2 + 1


def test_it_is_not_drawn_at_every_batch_but_at_the_end(screen: Screen) -> None:
    screen.batch(0, stored(1))
    screen.now -= REDRAW_S
    screen.batch(1, stored(2))
    assert screen.rows[-1].startswith("batches 1,")
    screen.live.end()
    assert screen.rows[-1].startswith("batches 2,")


@pytest.mark.parametrize(
    ("as_json", "events", "kinds"),
    [(False, False, ["gap"]), (False, True, ["stored", "gap"]), (True, True, [])],
    ids=["calm", "events", "json"],
)
def test_without_a_terminal(
    capsysbinary: pytest.CaptureFixture[bytes], as_json: bool, events: bool, kinds: list[str]
) -> None:
    view = make_view("never", as_json, events)
    assert isinstance(view, Plain)
    view.show(Batch(b"", 0, EventBatch(1.0, [stored(1)], 0), (), False))
    view.show(Gap(1, 3))
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert [re.search("stored|gap", line)[0] for line in lines] == kinds  # type: ignore[index]
