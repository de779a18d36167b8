"""The connector's counters on their way to vLLM."""

from pathlib import Path
from typing import Any

from engine.vllm_toy import ToyVllm

from kvevents_service.engine.vllm_stats import EVERY_S, METRICS, StatsReader, aggregated


def test_counters_are_what_was_added_and_gauges_what_is() -> None:
    vllm = ToyVllm()
    half: Any = vllm.half
    reader = StatsReader(half, vllm.clock)
    first = reader.read()
    assert first is not None
    assert first["connected"] == first["registrations"] == 1
    vllm.add("r", range(16), 8)
    vllm.step()
    vllm.step()
    assert reader.read() is None, "not so soon"
    vllm.clock.advance(EVERY_S)
    values = reader.read()
    assert values is not None
    assert (values["offered_blocks"], values["registrations"], values["connected"]) == (4, 0, 1)
    assert values["held_blocks"] == 4
    vllm.clock.advance(EVERY_S)
    assert reader.read() is None, "nothing has changed"


def test_counters_add_up_and_the_later_gauge_counts() -> None:
    assert aggregated({"loads": 2, "connected": 1}, {"loads": 3, "lookups": 1, "connected": 0}) == {
        "loads": 5,
        "lookups": 1,
        "connected": 0,
    }


def test_names_are_those_of_prometheus() -> None:
    names = [metric.exported for metric in METRICS]
    assert len(set(names)) == len(names)
    assert names[0] == "kvevents_connector_connected"
    assert "kvevents_connector_loads_total" in names


def test_every_metric_is_documented_as_it_is() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/vllm.md").read_text()
    assert all(f"| `{metric.exported}` | {metric.what} |" in page for metric in METRICS)
