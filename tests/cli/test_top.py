"""`kvevents top`: figures out of two states, and the screen, against a running sidecar."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from kvevents_service.cli.sidecar_state import Connected, Copies, Followed, Output, State, Tier, state_of
from kvevents_service.cli.top import COLUMNS, NARROW, Row, screen, span
from kvevents_service.cli.top_figures import Figures, figures
from kvevents_service.cli.top_sources import source_figures
from kvevents_service.errors import ConfigError, SidecarGone

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))
DEADLINE_S = 60


def state(now: float = 100.0, boot_id: str = "a", stored: int = 0, hit: int = 0, asked: int = 0) -> State:
    stats = {"blocks_stored": stored, "blocks_removed": 1, "hit_blocks": hit, "lookup_blocks": asked}
    tier = Tier("CPU", 100, 1 << 20, {"resident": 25, "free": 75}, [], stats)
    return State(
        version="1", pid=7, boot_id=boot_id, started_at=90.0, now=now, draining=False, engine_socket="/e",
        outputs=[Output("tcp://x", "vllm", subscribers=2), Output("tcp://y", "dynamo", subscribers=1)],
        tiers=[tier], engines=[Connected("e\x1b[2J1")], copies=[Copies("store", "CPU", stored << 20, 1, 3)],
        oldest_copy_s=0.5, events=[], errors={"bad_hash": 2},
    )  # fmt: skip


def test_rates_are_of_the_time_between_two_states() -> None:
    found = figures(state(100.0, stored=10, asked=100), state(102.0, stored=30, hit=30, asked=140))
    assert (found.stored_per_s, found.removed_per_s, found.hit_rate) == (10.0, 0.0, 0.75)
    assert found.copied_bytes_per_s == 10 << 20
    assert (found.used, found.capacity_bytes, found.subscribers) == (0.25, 100 << 20, 3)
    assert (found.pending, found.oldest_s, found.errors, found.up_s) == (3, 0.5, 3, 12.0)


@pytest.mark.parametrize("before", [None, state(99.0, boot_id="b", stored=10_000)])
def test_without_an_earlier_state_of_this_life_there_are_no_rates(before: State | None) -> None:
    found = figures(before, state(stored=30, hit=1, asked=4))
    assert (found.stored_per_s, found.hit_rate) == (0.0, 0.25)


def test_no_lookup_is_no_rate() -> None:
    assert figures(None, state()).hit_rate is None


def shown(rows: list[Row], width: int) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(screen(rows, narrow=width < 130))
    return capture.get()


def test_the_screen_has_everything_and_a_peer_cannot_move_the_cursor() -> None:
    rows = [
        Row("http://h:9470", state(), figures(state(99.0), state(stored=1234))),
        Row("http://gone:1", None, None, "no answer from http://gone:1 (refused)"),
    ]
    text = shown(rows, 180)
    for part in ("1 sidecar", "h:9470 e\\x1b[2J1", "25.0% of 100 MiB", "1,234", "3 (0.5 s)", "no answer from"):
        assert part in text
    assert "\x1b[2J" not in text


def relay(now: float = 100.0, batches: int = 0, **counts: int) -> State:
    sources = [
        Followed("tcp://10.0.0.7:5557", 0, "connected", {"GPU": 1234}, {"batches": batches, **counts}, 0.1, 200.0),
        Followed("tcp://10.0.0.8:5557", 1, "stale", {}, {}),
    ]
    plain = msgspec.structs.asdict(state(now)) | {"tiers": [], "engines": [], "engine_socket": ""}
    return State(**plain | {"service": "relay", "sources": sources})


def test_sources_have_rates_and_counts_of_their_own() -> None:
    seen = {"bytes": 10, "gaps": 2, "held": 3, "orphans": 4, "duplicates": 5, "replays": 6}
    first, second = figures(relay(100.0, 10, **seen), relay(102.0, 30, **seen | {"bytes": 4010})).sources
    assert (first.batches_per_s, first.bytes_per_s) == (10.0, 2000.0)
    assert (first.gaps, first.behind, first.orphans, first.duplicates, first.replays) == (2, 3, 4, 5, 6)
    assert (second.state, second.age_s, second.batches_per_s) == ("stale", None, 0.0)


@pytest.mark.parametrize("width", [80, 180])
def test_a_relay_and_its_sources_are_on_the_screen(width: int) -> None:
    text = shown([Row("http://h:9470", relay(), figures(None, relay()))], width)
    for part in ("h:9470 (relay)", "10.0.0.7:5557", "connected", "3.33 min", "GPU 1,234", "10.0.0.8:5557", "stale"):
        assert part in text
    assert "…" not in text
    assert "sources" not in shown([Row("http://h:9470", state(), figures(None, state()))], width)


def test_of_several_relays_each_source_says_whose_it_is() -> None:
    text = shown([Row(f"http://{host}:9470", relay(), figures(None, relay())) for host in "ab"], 180)
    assert "a:9470 < 10.0.0.7:5557" in text
    assert "b:9470 < 10.0.0.8:5557" in text


FULL = Figures(
    *(9e6, 64, 1.0, (1 << 40) - 1, 1234567.0, 1234567.0, 1234567.0, 1e10, 1.0, 64, 12, 12.3, 12345),
    sources=source_figures(None, relay()),
)


@pytest.mark.parametrize(("width", "columns"), [(80, NARROW), (100, NARROW), (130, COLUMNS)])
@pytest.mark.parametrize("host", ["127.0.0.1", "kv-sidecar-with-a-long-name-7.inference.svc.cluster.local"])
def test_a_screen_is_as_wide_as_its_terminal(width: int, columns: dict[str, object], host: str) -> None:
    text = shown([Row(f"http://{host}:65535", relay(), FULL), Row("http://b:1", state(), FULL)], width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].split() == " ".join(["sidecar", *columns]).split()
    assert "…" not in text
    assert all(word in text for word in ("1,234,567", "12 (12.3 s)", "GPU 1,234"))


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (17, "17 s"), (300, "5 min"), (11_520, "3.2 h")])
def test_times_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_it_reads_a_running_sidecar(sidecar: dict[str, object]) -> None:
    url = str(sidecar["admin"])
    command = [KVEVENTS, "top", url, "http://127.0.0.1:1", "--json", "--count", "2", "--interval", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(said)) == (0, 4)
    assert (said[0]["url"], said[0]["engines"], said[0]["used"]) == (url, 0, None)
    assert "no answer from http://127.0.0.1:1 (Connection refused)" in said[1]["fault"]
    assert state_of(url, 5.0).boot_id == sidecar["boot_id"]


def test_nobody_there_exits_with_1() -> None:
    done = subprocess.run(
        [KVEVENTS, "top", "http://127.0.0.1:1", "--count", "1"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, "no answer" in done.stdout) == (1, True)


def test_what_is_no_sidecar_is_named(sidecar: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^url: expected the admin URL"):
        state_of("file:///etc/passwd", 1.0)
    with pytest.raises(SidecarGone, match="is no sidecar"):
        state_of(f"{sidecar['admin']}/nowhere", 5.0)


def test_every_field_that_is_read_is_said(sidecar: dict[str, object]) -> None:
    fields = {field.name for field in msgspec.structs.fields(State)}
    with urlopen(f"{sidecar['admin']}/state", timeout=DEADLINE_S) as answer:
        assert fields <= set(json.load(answer))
