"""The relay's admin endpoint: what operators see of its sources, its journals and itself, and without extras."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from core.engine_model import key, stored
from service.test_relay import AB, ABC, ANY, A, engine, source_of

from kvevents_service.cli.sidecar_state import state_of
from kvevents_service.config import ServeConfig
from kvevents_service.service.relay_app import RelayService, started_relay
from kvevents_service.source_config import SourceConfig
from kvevents_service.wire.events import BlockRemoved
from kvevents_service.wire.frames import live_frames

LOCAL = "127.0.0.1:0"
DEADLINE_S = 30.0


@asynccontextmanager
async def relaying(*sources: SourceConfig, **more: object) -> AsyncIterator[RelayService]:
    config = ServeConfig(pub=ANY, replay=ANY, sources=sources, heartbeat_s=0.2, admin=LOCAL, **more)  # type: ignore[arg-type]
    async with started_relay(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        yield service
        for task in tasks:
            task.cancel()


def fetched(service: RelayService, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"{service.ready.admin}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


async def asked(service: RelayService, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(fetched, service, path)


async def state(service: RelayService) -> Any:
    return json.loads((await asked(service, "/state"))[1])


async def source_in(service: RelayService, **expected: object) -> dict[str, Any]:
    """The first source, when it says all of this."""
    found: dict[str, Any] = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not found or {name: found[name] for name in expected} != expected:
                await asyncio.sleep(0.05)
                found = (await state(service))["sources"][0]
    except TimeoutError:
        raise AssertionError(found) from None
    return found


async def test_a_source_is_seen_in_each_of_its_states() -> None:
    async with engine() as first:
        ports, endpoint = first.ports, first.endpoint
        first.send(1, stored(AB, 2))
        async with relaying(source_of(first, model="m")) as service:
            found = await source_in(service, state="connected", resident={"GPU": 2})
            assert (found["name"], found["model"], found["dp_rank"], found["connected"]) == (endpoint, "m", 0, True)
            assert 0 <= found["lag_s"] <= found["age_s"]
            first.xpub.close()
            first.router.close()
            await source_in(service, state="stale", connected=False, resident={"GPU": 0})
            async with engine(ports=ports) as second:
                second.send(1, stored(ABC, 3))
                await source_in(service, state="connected", resident={"GPU": 3})


async def test_a_source_that_never_came_is_waited_for_and_one_that_does_not_answer_is_joined() -> None:
    async with relaying(SourceConfig("tcp://127.0.0.1:1")) as service:
        found = await source_in(service, state="connecting")
        assert (found["lag_s"], found["age_s"]) == (None, None)
        assert (await asked(service, "/readyz"))[0] == 200, "an engine that is away is no fault of the relay"
    async with engine() as peer, relaying(SourceConfig(peer.endpoint, "tcp://127.0.0.1:1")) as service:
        await source_in(service, state="joining")


async def test_what_is_odd_about_a_source_is_counted_in_state_and_metrics() -> None:
    async with engine(retained=1) as peer, relaying(source_of(peer)) as service:
        await peer.subscribed()
        peer.send(1, stored(A))
        peer.send(2, stored(A))
        again = live_frames(*peer.model.publish(stored(AB)))
        for _ in range(3):
            peer.xpub.send_multipart(again)
        await source_in(service, resident={"GPU": 2})
        peer.model.publish(stored((5,)))
        peer.send(1, stored((7, 8)), BlockRemoved([key((9,))], "GPU"))
        await source_in(service, resident={"GPU": 0})
        counts = (await source_in(service))["counts"]
        expected = {"duplicates": 2, "gaps": 1, "batches_missing": 1, "orphans": 1}
        assert {name: counts[name] for name in expected} == expected
        assert counts["duplicate_batches"] >= 2
        metrics = (await asked(service, "/metrics"))[1].splitlines()
    labels = f'{{dp_rank="0",source="{peer.endpoint}"}}'
    for name, value in {
        "source_duplicate_blocks_total": 2,
        "source_duplicate_batches_total": counts["duplicate_batches"],
        "source_gaps_total": 1,
        "source_missing_batches_total": 1,
        "source_orphans": 1,
        "source_batches_total": 5,
    }.items():
        assert f"kvevents_{name}{labels} {value:.1f}" in metrics
    state_of_it = f'kvevents_source_state{{dp_rank="0",source="{peer.endpoint}",state="connected"}} 1.0'
    assert state_of_it in metrics
    left = f'kvevents_source_left_out_total{{dp_rank="0",kind="removed_unknown",source="{peer.endpoint}"}} 1.0'
    assert left in metrics
    assert not [line for line in metrics if line.startswith("kvevents_tier_blocks{")], "a relay has no tier"


async def test_bytes_of_live_messages_and_of_replies_are_counted() -> None:
    async with engine() as peer:
        peer.send(1, stored(A))
        async with relaying(source_of(peer)) as service:
            joined = (await source_in(service, resident={"GPU": 1}))["counts"]["bytes"]
            live = live_frames(*peer.model.publish(stored(AB)))
            peer.xpub.send_multipart(live)
            found = await source_in(service, resident={"GPU": 2})
            assert joined > 100
            assert found["counts"]["bytes"] == joined + sum(map(len, live))


async def test_each_rank_has_its_journal_outputs_and_events_in_one_endpoint() -> None:
    async with engine(dp_rank=0) as zero, engine(dp_rank=1) as one:
        zero.send(1, stored(A))
        one.send(1, stored(AB, 2))
        async with relaying(source_of(zero), source_of(one, dp_rank=1)) as service:
            await source_in(service, resident={"GPU": 1})
            async with asyncio.timeout(DEADLINE_S):
                while (told := await state(service))["sources"][1]["resident"] != {"GPU": 2}:
                    await asyncio.sleep(0.05)
            metrics = (await asked(service, "/metrics"))[1]
            read = await asyncio.to_thread(state_of, str(service.ready.admin), 5.0)
    assert [output["dp_rank"] for output in told["outputs"]] == [0, 1]
    assert [journal["dp_rank"] for journal in told["journals"]] == [0, 1]
    assert {event["dp_rank"] for event in told["latest"]} == {0, 1}
    assert told["events"] == [{"type": "BlockStored", "medium": "GPU", "events": 2, "blocks": 3}]
    assert 'kvevents_next_event_number{dp_rank="1"}' in metrics
    assert 'kvevents_output_batches_total{dialect="vllm",output="1"}' in metrics
    assert (read.service, read.boot_id, len(read.sources)) == ("relay", service.ready.boot_id, 2)


async def test_probes_and_the_page() -> None:
    async with engine() as peer, relaying(source_of(peer)) as service:
        assert (await asked(service, "/healthz"))[0] == 200
        status, body = await asked(service, "/readyz")
        assert (status, list(json.loads(body)["seconds"])) == (200, ["journal"])
        assert "<title>kvevents</title>" in (await asked(service, "/"))[1]
        service.draining = True
        status, body = await asked(service, "/readyz")
        assert (status, json.loads(body)["failed"]) == (503, "open")
        assert (await state(service))["draining"] is True


async def test_a_publisher_that_stands_still_is_not_ready() -> None:
    async with engine() as peer:
        config = ServeConfig(pub=ANY, replay=ANY, sources=(source_of(peer),), admin=LOCAL)
        async with started_relay(config) as service:
            assert service.admin is not None
            running = asyncio.create_task(service.admin.run())
            status, body = await asked(service, "/readyz")
            assert (status, json.loads(body)["failed"]) == (503, "journal")
            running.cancel()
            await asyncio.wait([running])


NO_H11 = """
import asyncio, sys
sys.modules["h11"] = None
from kvevents_service.config import ServeConfig
from kvevents_service.service.relay_app import started_relay
from kvevents_service.source_config import SourceConfig
async def main(admin):
    any_port = "tcp://127.0.0.1:0"
    source = SourceConfig("tcp://127.0.0.1:1")
    async with started_relay(ServeConfig(pub=any_port, replay=any_port, sources=(source,), admin=admin)) as service:
        print(service.ready.admin)
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("admin", "code", "said"),
    [
        ("auto", 0, "no metrics and no probes: h11: expected to be installed"),
        (LOCAL, 1, "ConfigError: h11: expected"),
    ],
)
def test_without_its_packages_a_relay_works_and_one_that_was_told_an_address_does_not(
    admin: str, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_H11, admin], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert code or done.stdout == "None\n"
