"""vLLM's hooks, by the names of a vLLM that is not there: what it refuses, what it says, what it counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine.fake_vllm import KVConnectorRole, cache_config, installed, vllm_config
from engine.hostile import ANSWERS, Answer, HostileSidecar, hits_that_never_load, proper
from engine.vllm_toy import UNIT, ToyVllm
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from test_client import LONG_S

from kvevents_service.engine.vllm_border import SCHEDULER_FAULT, SchedulerBorder
from kvevents_service.engine.vllm_layout import Place
from kvevents_service.errors import ConfigError, KvEventsError
from kvevents_service.wire.control import ClientMessage, Hello

SOCKET = {"sidecar": "/nowhere/engine.sock"}
BOTH = [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER]
LOG = "vllm.kvevents"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    with installed() as made:
        yield made


def connector(module: ModuleType, role: KVConnectorRole, config: Any = None, cache: Any = None) -> Any:
    return module.KVEventsConnector(config or vllm_config(SOCKET), role, cache or cache_config())


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# what is refused


@pytest.mark.parametrize("role", BOTH)
@pytest.mark.parametrize(
    ("extra", "changes", "expected"),
    [
        ({}, {}, "kv_connector_extra_config.sidecar: expected the path of the sidecar's engine socket"),
        (SOCKET | {"lasy": True}, {}, "kv_connector_extra_config.lasy: expected one of sidecar, lazy"),
        (SOCKET | {"held_fraction": 2}, {}, "kv_connector_extra_config.held_fraction: expected `float` <= 1"),
        (SOCKET, {"cache_config__enable_prefix_caching": False}, "enable_prefix_caching: expected true"),
        (SOCKET, {"kv_transfer_config__kv_role": "kv_producer"}, 'kv_role: expected "kv_both"'),
        (
            SOCKET,
            {"parallel_config__prefill_context_parallel_size": 2},
            "prefill_context_parallel_size: expected 1",
        ),
        (SOCKET, {"model_config__is_encoder_decoder": True}, "model: expected one that is not an encoder-decoder"),
        (
            SOCKET,
            {"device_config__device_type": "cuda", "model_config__enable_cumem_allocator": True},
            "enable_cumem_allocator: expected false, and no sleep mode",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_wrong_configuration_is_one_clear_error(
    module: ModuleType, role: KVConnectorRole, extra: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        connector(module, role, vllm_config(extra, **changes))
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("mamba",), "a cacheable group of full_attention"), (("full_attention", "odd"), "one of chunked_local")],
)
def test_a_model_that_cannot_be_served_is_one_clear_error(
    module: ModuleType, kinds: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"the model's KV cache: .*{expected}"):
        connector(module, KVConnectorRole.SCHEDULER, cache=cache_config(*kinds))


def test_a_device_that_cannot_share_its_memory_is_one_clear_error(module: ModuleType) -> None:
    with pytest.raises(ConfigError, match="device: expected one of cpu, cuda, not tpu"):
        connector(module, KVConnectorRole.WORKER, vllm_config(SOCKET, device_config__device_type="tpu"))


# versions


@pytest.mark.parametrize(
    ("version", "warnings"),
    [("0.32.0", 0), ("0.33.1.dev7+g123", 0), ("0.31.2", 1), ("0.34.0", 1), ("0.330.0", 1), ("1.0", 1), ("dev", 1)],
)
def test_another_version_is_warned_of_once_and_the_tested_ones_are_named(
    caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    with installed(version) as module, caplog.at_level(logging.WARNING, LOG):
        made = [connector(module, role) for role in BOTH]
        said = [line for line in caplog.messages if "tested with" in line]
        assert said == [f"kvevents: vLLM {version}: this connector is tested with 0.32 and 0.33"] * warnings
        made[0].shutdown()


def test_a_failed_load_is_computed_whatever_vllm_does_by_default(module: ModuleType) -> None:
    config = vllm_config(SOCKET)
    connector(module, KVConnectorRole.SCHEDULER, config).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_on_a_gpu_what_is_sent_names_marks(module: ModuleType) -> None:
    for kind, marks in (("cpu", False), ("cuda", True)):
        made = connector(module, KVConnectorRole.SCHEDULER, vllm_config(SOCKET, device_config__device_type=kind))
        assert (made._client.begun is not None) is marks
        made.shutdown()


# metrics


def test_counters_and_gauges_are_on_vllms_endpoint(module: ModuleType) -> None:
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    cls, before = module.KVEventsConnector, set(REGISTRY._collector_to_names)
    made = cls.build_prom_metrics(vllm_config(SOCKET), types, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    try:
        for values in ({"loads": 2.0, "connected": 1.0}, {"loads": 3.0, "connected": 0.0}, {"loads": -1.0}):
            made.observe(values, 1)
        sample = lambda name: REGISTRY.get_sample_value(name, {"model": "m", "engine": "1"})  # noqa: E731
        assert sample("kvevents_connector_loads_total") == 5
        assert sample("kvevents_connector_connected") == 0
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)


def test_what_another_connector_counts_is_passed_over(module: ModuleType) -> None:
    """vLLM hands a connector inside a `MultiConnector` its own; a later version of ours may count more."""
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    before = set(REGISTRY._collector_to_names)
    made = module.KVEventsConnector.build_prom_metrics(vllm_config(SOCKET), types, ["engine"], {0: ["0"]})
    made.observe({"of_another_version": 1.0})
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_stats_add_up_and_are_emptied(module: ModuleType) -> None:
    build = module.KVEventsConnector.build_kv_connector_stats
    stats = build({"loads": 1.0, "connected": 1.0, "lookups": 0.0}).aggregate(build({"loads": 2.0}))
    assert stats.reduce() == {"loads": 3.0, "connected": 1.0}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert build().is_empty()


# the step loop


class Hooks:
    """The connector's hooks in the place of the half that a `ToyVllm` calls."""

    def __init__(self, made: Any, vllm: ToyVllm) -> None:
        self.made = made
        made.bind_kv_cache_manager(
            SimpleNamespace(block_pool=vllm.pool, coordinator=SimpleNamespace(enable_partial_hash_hits=False))
        )

    def arrive(self, request: Any) -> None:
        self.made.on_new_request(request)

    def find(self, request: Any, local: int) -> int | None:
        tokens, later = self.made.get_num_new_matched_tokens(request, local)
        assert later is bool(tokens)
        return tokens

    def begin_load(self, request: Any, tables: list[list[int]], tokens: int) -> None:
        self.made.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), tokens)

    def begin_step(self, output: Any) -> Any:
        return self.made.build_connector_meta(output).said

    def land_step(self, number: int) -> None:
        self.made.get_kv_connector_stats()
        self.made.update_connector_output(SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(step=number)))

    def finish(self, request: Any, tables: tuple[list[int], ...]) -> None:
        assert self.made.request_finished_all_groups(request, tables) == (False, None)


def start(module: ModuleType, path: Path) -> tuple[Any, ToyVllm]:
    """A connector, and an engine that calls its hooks."""
    config = vllm_config({"sidecar": str(path), "lookup_timeout_s": 0.02}, UNIT)
    made, vllm = connector(module, KVConnectorRole.SCHEDULER, config), ToyVllm()
    vllm.half = Hooks(made, vllm)  # type: ignore[assignment]
    assert made._scheduler.half is not None
    return made, vllm


def play(module: ModuleType, path: Path) -> Any:
    """Requests come and go through the hooks, and every one ends."""
    made, vllm = start(module, path)
    for number in range(6):
        vllm.add(f"r{number}", range(number % 3, number % 3 + 17), 3)
        vllm.step()
    for _ in range(80):
        if not vllm.requests and not vllm.loading:
            break
        vllm.step()
    assert not vllm.requests
    assert made.take_events() == ()
    assert isinstance(made.has_pending_push_work(), bool)
    return made


@pytest.mark.parametrize(
    "answer", [each for each in ANSWERS if each is not hits_that_never_load], ids=lambda a: a.__name__
)
def test_no_hook_raises_whatever_the_sidecar_says(
    module: ModuleType, tmp_path: Path, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = HostileSidecar(tmp_path / "engine.sock", answer)
    made = play(module, tmp_path / "engine.sock")
    assert made.reset_cache() in (True, False)
    sidecar.stop()
    made.shutdown()
    assert SCHEDULER_FAULT not in caplog.text


def test_the_first_request_is_offered_though_the_sidecar_took_its_time_to_welcome(
    module: ModuleType, tmp_path: Path
) -> None:
    def slow(message: ClientMessage) -> bytes:
        if isinstance(message, Hello):
            time.sleep(0.3)
        return proper(message)

    sidecar = HostileSidecar(tmp_path / "engine.sock", slow)
    made, vllm = start(module, tmp_path / "engine.sock")
    vllm.add("first", range(17))
    while vllm.requests or made.has_pending_push_work():
        vllm.step()
    assert made._scheduler.half.declined_blocks == 4, made._client
    sidecar.stop()
    made.shutdown()


def test_the_log_says_when_the_sidecar_goes_and_comes(
    module: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine.sock"
    made = connector(module, KVConnectorRole.SCHEDULER, vllm_config({"sidecar": str(path)}))
    with caplog.at_level(logging.INFO, LOG):
        until(lambda: made._client.last_error)
        made._note_connection(False)
        made._note_connection(False)
        sidecar = HostileSidecar(path, proper)
        assert made._client.wait_connected(LONG_S)
        made._note_connection(True)
        sidecar.stop()
    away, back = (line for line in caplog.messages if "the sidecar is" in line)
    assert "the sidecar is away, nothing is offloaded until it is back: no sidecar at" in away
    assert back == "kvevents: the sidecar is back"
    made.shutdown()


def test_a_scheduler_that_binds_no_pool_finds_nothing(module: ModuleType) -> None:
    made = connector(module, KVConnectorRole.SCHEDULER)
    request = ToyVllm().add("r", range(8))
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.reset_cache()
    assert made.get_kv_connector_stats() is None
    assert isinstance(made._scheduler, SchedulerBorder)
    made.shutdown()


# the worker


def test_a_worker_reports_what_was_computed_and_lends_its_memory_again(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(module, KVConnectorRole.WORKER)
    storage = torch.zeros(64, dtype=torch.uint8).untyped_storage()
    made._worker.lend([Place("layer", storage, 0, 8, 8)])
    metadata = module.KVEventsMetadata()
    metadata.said = module.Said(7, {})
    made.bind_connector_metadata(metadata)
    made.start_load_kv(None)
    made.wait_for_layer_load("layer")
    made.save_kv_layer("layer", None, None)
    made.handle_preemptions(None)
    made.wait_for_save()
    other = module.StepReport()
    other.step = 5
    assert made.build_connector_worker_meta().aggregate(other).step == 5
    assert made.get_finished(set()) == (None, set())
    assert made.get_transfer_results(set()).finished_recving == set()
    assert made.get_block_ids_with_load_errors() == set()
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert made._worker.client is not None
    made.shutdown()
    assert made._worker.client is None


def test_memory_that_cannot_be_lent_again_does_not_end_a_wake_up(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(module, KVConnectorRole.WORKER)

    class Lost:
        def share(self, places: object) -> None:
            raise KvEventsError("mapped elsewhere")

    made._worker._places = [None]
    made._worker._device = Lost()
    made.restore_kv_caches()
    assert "This rank has left the sidecar" in caplog.text
    made.wait_for_save()
