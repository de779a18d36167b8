"""Metrics say what the sidecar's books say; the dashboard asks only for what there is."""

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import zmq
from core.engine_model import stored
from peers import peer
from prometheus_client.parser import text_string_to_metric_families

from kvevents_service.config import OutputConfig
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.metrics import FAMILIES, PIECE_FAMILIES, Metrics
from kvevents_service.source_config import SourceConfig
from kvevents_service.testing import make_chain

DASHBOARD = Path(__file__).parents[2] / "docker" / "grafana" / "kvevents.json"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "operations.md"
DISK_ERRORS = "kvevents_disk_errors_total"
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
LABELS = {
    *("version", "medium", "state", "reason", "direction", "result", "type", "output", "dialect", "kind"),
    *("dp_rank", "source", "subject"),
}
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scraped(metrics: Metrics) -> dict[Sample, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


async def test_the_page_is_made_in_pieces_that_are_all_of_it(run) -> None:
    async with run() as service:
        metrics = Metrics(service.instruments)
        pieces = [piece.decode() for piece in metrics.pieces()]
        assert len(pieces) == -(-len(FAMILIES) // PIECE_FAMILIES) + 1
        heads = [line for piece in pieces for line in piece.splitlines() if line.startswith("# TYPE kvevents_")]
        assert [head.split()[2] for head in heads] == [family.full_name for family in FAMILIES]
        assert all(piece.startswith("# HELP ") and piece.endswith("\n") for piece in pieces)


async def test_they_say_what_happened(run, engine) -> None:
    free = "tcp://127.0.0.1:0"
    outputs = (OutputConfig(free, free), OutputConfig(free, dialect="aibrix"), OutputConfig(free, dialect="sglang"))
    async with run(outputs=outputs) as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain(range(32), 4)
        await asyncio.to_thread(mini.store, chain, list(range(8)))
        await asyncio.to_thread(mini.store, chain, list(range(8)))
        assert await asyncio.to_thread(mini.load, chain, list(range(8))) == 8
        await asyncio.to_thread(mini.client.lookup, "r2", [b"y" * 32] * 2)
        await asyncio.to_thread(mini.client.reset, 5.0)
        await asyncio.sleep(0.25)
        said = scraped(Metrics(service.instruments))
    cpu = ("medium", "CPU")
    expected: dict[Sample, float] = {
        ("kvevents_tier_capacity_blocks", (cpu,)): 32,
        ("kvevents_tier_block_bytes", (cpu,)): 128,
        ("kvevents_tier_blocks", (cpu, ("state", "resident"))): 0,
        ("kvevents_tier_blocks", (cpu, ("state", "free"))): 32,
        ("kvevents_stored_blocks_total", (cpu,)): 8,
        ("kvevents_removed_blocks_total", (cpu,)): 8,
        ("kvevents_loaded_blocks_total", (cpu,)): 8,
        ("kvevents_known_blocks_total", (cpu,)): 8,
        ("kvevents_lookups_total", (cpu,)): 2,
        ("kvevents_lookup_blocks_total", (cpu,)): 10,
        ("kvevents_hit_blocks_total", (cpu,)): 8,
        ("kvevents_copies_total", (("direction", "store"), cpu, ("result", "ok"))): 1,
        ("kvevents_copied_bytes_total", (("direction", "load"), cpu)): 8 * 128,
        ("kvevents_copy_seconds_count", (("direction", "load"), cpu)): 1,
        ("kvevents_copies_pending", (("direction", "load"), cpu)): 0,
        ("kvevents_events_total", (cpu, ("type", "BlockStored"))): 1,
        ("kvevents_event_blocks_total", (cpu, ("type", "BlockRemoved"))): 8,
        ("kvevents_engine_sessions", ()): 1,
        ("kvevents_next_event_number", (("dp_rank", "0"),)): 2,
        ("kvevents_output_batches_total", (("dialect", "aibrix"), ("output", "1"))): 2,
    }
    assert {key: said.get(key) for key in expected} == expected
    in_vllm = (("dialect", "vllm"), cpu, ("output", "0"), ("type", "BlockStored"))
    in_sglang = (("dialect", "sglang"), ("medium", "CPU_PINNED"), ("output", "2"), ("type", "BlockRemoved"))
    assert said["kvevents_output_events_total", in_vllm] == said["kvevents_output_events_total", in_sglang] == 1
    assert not [name for name, labels in said if "output_events" in name and ("dialect", "aibrix") in labels], (
        "this dialect lets only GPU blocks through"
    )
    assert said["kvevents_event_loop_lag_seconds_count", ()] >= 1


async def test_every_metric_is_there_before_an_engine_is(run) -> None:
    async with run(snapshot="tcp://127.0.0.1:0") as service:
        names = {name for name, _ in scraped(Metrics(service.instruments))}
    others = {"medium", "direction", "source", "subject"}
    of_engines = {family.full_name for family in FAMILIES if others & set(family.labels)} | {DISK_ERRORS}
    there = {family.full_name for family in FAMILIES if family.kind != "histogram"}
    assert there - of_engines <= names
    assert "process_resident_memory_bytes" in names


def fetched(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric in the table."""
    text = DOCUMENTED.read_text().partition("<!-- metrics -->")[2].partition("<!-- /metrics -->")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]
    return {name: (kind, {*labels.split(", ")} - {""}) for name, kind, labels, _ in rows}


@pytest.mark.skipif(importlib.util.find_spec("nats") is None, reason="nats-py is not installed (extra: nats)")
async def test_the_documentation_has_what_is_printed(run, engine, tmp_path: Path) -> None:
    """Of a sidecar that has one of everything: names, kinds and labels; each metric has a sample."""
    more = {
        "nats": (NatsConfig(servers=("nats://127.0.0.1:1",), subject="kv.0"),),
        "disk_path": str(tmp_path), "disk_bytes": 4096, "admin": "127.0.0.1:0", "snapshot": "tcp://127.0.0.1:0",
    }  # fmt: skip
    async with peer(snapshots=False) as source:
        sources = (SourceConfig(source.endpoint, source.replay),)
        async with run(sources=sources, **more) as service:
            mini = await asyncio.to_thread(engine)
            await asyncio.to_thread(mini.store, make_chain(range(8), 4), [0, 1])
            source.send(1, stored((0,)))
            while service.relay.views()[0].lag_s is None:
                await asyncio.sleep(0.01)
            text = await asyncio.to_thread(fetched, f"{service.ready.admin}/metrics")
    printed = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("kvevents_"):
            labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
            assert len(labels) == 1, f"{family.name} has no sample, or samples of different labels: {labels}"
            name = family.name + ("_total" if family.type == "counter" else "")
            printed[name] = (family.type, set(labels.pop()))
    assert printed == documented()


@pytest.mark.skipif(importlib.util.find_spec("nats") is None, reason="nats-py is not installed (extra: nats)")
async def test_what_waits_for_a_broker_and_what_a_disk_did(run, engine, tmp_path: Path) -> None:
    nats = (NatsConfig(servers=("nats://127.0.0.1:1",), subject="kv.0"),)
    async with run(nats=nats, disk_path=str(tmp_path), disk_bytes=4096) as service:
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, make_chain(range(8), 4), [0, 1])
        service.sidecar._tiers._disk.faults.count("enospc")
        (output,) = service.events.nats
        while not output.disconnects:
            await asyncio.sleep(0.01)
        said, subject = scraped(Metrics(service.instruments)), (("subject", "kv.0"),)
        assert said["kvevents_nats_pending_batches", subject] == len(output.queue) > 0
        assert said["kvevents_nats_pending_bytes", subject] == output.queue.bytes > 100
        assert said["kvevents_nats_disconnects_total", subject] >= 1
        for name in ("connected", "connections_total", "batches_acked_total", "batches_published_total"):
            assert said[f"kvevents_nats_{name}", subject] == 0
    assert said["kvevents_disk_errors_total", (("kind", "enospc"),)] == 1
    assert said["kvevents_disk_errors_total", (("kind", "short"),)] == 0


async def test_readers_are_counted_as_they_come_and_go(run) -> None:
    async with run() as service:
        (readers,) = service.instruments.outputs()
        with zmq.Context() as context:
            for round_ in range(2):
                subs = [context.socket(zmq.SUB) for _ in range(3)]
                for sub in subs:
                    sub.connect(service.ready.pub)
                while len(readers.readers) < 3:
                    await asyncio.sleep(0.01)
                subs.pop().close(0)
                while len(readers.readers) > 2:
                    await asyncio.sleep(0.01)
                for sub in subs:
                    sub.close(0)
                while len(readers.readers):
                    await asyncio.sleep(0.01)
                assert round_ < 2


async def test_refused_messages_are_counted_by_their_code(run, engine) -> None:
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        chain = make_chain(range(8), 4)
        await asyncio.to_thread(mini.store, chain, [1000, 1001])
        said = scraped(Metrics(service.instruments))
    assert said["kvevents_errors_total", (("kind", "refused_bad_block_ids"),)] == 1


# the names


def test_names_and_labels_are_as_prometheus_wants_them() -> None:
    names = [family.full_name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", family.name)
        assert not family.name.endswith("_total")
        assert family.help.endswith(".")
        assert family.kind in ENDINGS
        assert set(family.labels) <= LABELS


def queries() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    known = {family.full_name: set(family.labels) for family in FAMILIES if family.kind != "histogram"}
    for family in FAMILIES:
        if family.kind == "histogram":
            known |= {family.full_name + ending: {*family.labels, "le"} for ending in ENDINGS["histogram"]}
    asked = list(queries())
    assert len(asked) > 30
    for query in asked:
        names = re.findall(r"kvevents_\w+", query)
        assert names or "process_resident_memory_bytes" in query
        assert set(names) <= set(known), query
        labels = set(re.findall(r"(\w+) *(?:=~|!=|=) *\"", query)) | {
            label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.findall(r"\w+", group)
        }
        assert labels <= {"instance"}.union(*(known[name] for name in names)), query


def test_every_panel_of_the_dashboard_is_drawn() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@pytest.mark.parametrize(
    "name",
    [
        *("hit_blocks", "burnt_numbers", "copy_seconds", "event_loop_lag_seconds"),
        *("source_state", "source_age_seconds", "nats_connected", "nats_batches_dropped", "disk_errors"),
    ],
)
def test_what_an_operator_is_paged_for_is_on_the_dashboard(name: str) -> None:
    assert any(f"kvevents_{name}" in query for query in queries())
