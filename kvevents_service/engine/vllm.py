"""vLLM's KV connector: it fits vLLM's hooks to `SchedulerHalf` and `WorkerHalf`, and knows nothing itself.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVEventsConnector",
        "kv_connector_module_path": "kvevents_service.engine.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"sidecar": "/run/kvevents/engine.sock"}}'

docs/vllm.md has the whole story. This is the only module that imports vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.vllm_border import SchedulerBorder, or_leave
from kvevents_service.engine.vllm_layout import places_of
from kvevents_service.engine.vllm_marks import MarkingClient
from kvevents_service.engine.vllm_memory import device_named
from kvevents_service.engine.vllm_options import Options, read
from kvevents_service.engine.vllm_scheduler import Rules, Said, SchedulerHalf
from kvevents_service.engine.vllm_stats import METRICS, StatsReader, Values, aggregated
from kvevents_service.engine.vllm_worker import BEFORE_ALL, GREETING_S, WorkerHalf
from kvevents_service.errors import ConfigError

try:
    import torch
    import vllm
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.logger import init_logger
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvevents_service.engine import vllm_config as ours
except ImportError as error:
    expected = f"vLLM 0.32 or 0.33 in this interpreter's environment ({error})"
    raise ConfigError("kvevents_service.engine.vllm", expected) from error

TESTED = ("0.32", "0.33")
AWAY = "the sidecar is away, nothing is offloaded until it is back"

log = init_logger("vllm.kvevents")


class KVEventsMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, with each step."""

    said: Said


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: every one of them has computed this step."""

    step: int

    def aggregate(self, other: StepReport) -> StepReport:
        first = StepReport()
        first.step = min(self.step, other.step)
        return first


@dataclass
class KVEventsStats(KVConnectorStats):  # type: ignore[misc]
    """Values by the names of `METRICS`."""

    data: Values = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVEventsStats) -> KVEventsStats:
        return KVEventsStats(aggregated(self.data, other.data))

    def reduce(self) -> Values:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class KVEventsPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same values on vLLM's own Prometheus endpoint."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labels: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, labels)
        self._metrics = {
            metric.name: self._gauge_cls(
                name=metric.exported,
                documentation=metric.what,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            if metric.gauge
            else self._counter_cls(name=metric.exported, documentation=metric.what, labelnames=labelnames)
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: Values, engine_idx: int = 0) -> None:
        """What a counter loses, or another version counts, is not shown."""
        for name in transfer_stats_data.keys() & self._metrics.keys():
            value = transfer_stats_data[name]
            metric = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx])
            if hasattr(metric, "set"):
                metric.set(value)
            else:
                metric.inc(max(0.0, value))


class KVEventsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance in the scheduler's process and one in every worker's: `role` says which."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options: Options = read(self._kv_transfer_config.kv_connector_extra_config or {})
        ours.check(vllm_config)
        self._scheduler = SchedulerBorder(log.exception)
        self._worker: WorkerHalf | None = None
        self._client: OffloadClient | None = None
        self._marking: MarkingClient | None = None
        self._stats: StatsReader | None = None
        self._connected = True
        self._fine = False
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()
        else:
            device = device_named(ours.device_kind(vllm_config), _stream)
            self._worker = WorkerHalf(self._options.sidecar, ours.rank_of(vllm_config), device)

    def _start_scheduler(self) -> None:
        """The policy is vLLM's, and read by it after this: a failed load must never fail a request."""
        if not _is_tested():
            log.warning(
                "kvevents: vLLM %s: this connector is tested with %s", vllm.__version__, " and ".join(TESTED)
            )
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        layout = ours.engine_layout(self._vllm_config, self._kv_cache_config, self._options.namespace)
        if ours.device_kind(self._vllm_config) == "cpu":
            self._client = OffloadClient(self._options.sidecar, layout, self._options.timeouts)
        else:
            self._client = self._marking = MarkingClient(self._options.sidecar, layout, self._options.timeouts)
        self._client.wait_dialled(GREETING_S)
        log.info("kvevents: sidecar %s, %s", self._options.sidecar, self._options)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a later miss."""
        return False

    # the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.lend(places_of(self._kv_cache_config, kv_caches))
            client = self._worker.client
            if client is not None and not client.connected:
                log.warning("kvevents: %s: %s", AWAY, client.last_error)

    def unregister_kv_caches(self) -> None:
        if self._worker is not None and not self._worker.take_back():
            log.warning("kvevents: the sidecar did not let go of the KV cache in time")

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            or_leave(self._worker, WorkerHalf.lend_again, log.exception)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata
        if self._worker is not None:
            self._worker.said = connector_metadata.said

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to wait for: a block that is copied has a reference, and is not given away."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin in the scheduler half, as soon as their blocks are known."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is not scheduled before all of its hit is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The sidecar copies whole blocks, later."""

    def wait_for_save(self) -> None:
        worker = self._worker
        if worker is None:
            return
        if worker.behind:
            or_leave(worker, WorkerHalf.end_step, log.exception)
        else:  # the same, without a call more: it is in every step
            worker.computed = worker.said.step

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None if self._worker is None else self._worker.loaded()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None or not self._worker.said.ended:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(set(), self._worker.loaded(), self._worker.failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None or not self._worker.said.ended else self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        if self._worker is None:
            return None
        report = StepReport()
        report.step = self._worker.computed
        return report

    # the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._fine = not self._options.lazy and kv_cache_manager.coordinator.enable_partial_hash_hits
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._client is not None:
            rules = Rules(
                self._options.lazy,
                self._vllm_config.scheduler_config.max_num_batched_tokens,
                self._options.held_fraction,
                ours.hit_rules(self._vllm_config, self._kv_cache_config, self._fine, self._options.load_timeout_s),
                self._options.batch_steps,
                not envs.VLLM_ENABLE_V1_MULTIPROCESSING,
                _is_tested(),
            )
            half = SchedulerHalf(
                self._client,
                gpu_block_pool,
                rules,
                make_block_hash_with_group_id,
                ours.embeds_digest,
                time.monotonic,
            )
            self._scheduler.bind(half)
            self._stats = StatsReader(half, time.monotonic)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.find(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.begin_load(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVEventsMetadata:
        said = self._scheduler.begin_step(scheduler_output)
        if self._marking is not None:
            self._marking.begun = said.step
        metadata = KVEventsMetadata()
        metadata.said = said
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        step = BEFORE_ALL if report is None else report.step
        if self._marking is not None:
            self._marking.landed = max(self._marking.landed, step)
        self._scheduler.land_step(step)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """It is asked before a request is preempted. None that would help: what is copied is held from here on."""
        self._scheduler.secure()
        return False

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        """None: the sidecar publishes what it holds."""
        return ()

    # both

    def get_kv_connector_stats(self) -> KVEventsStats | None:
        half, stats = self._scheduler.half, self._stats
        if half is None or stats is None or not half.news:
            return None
        half.news = False
        values = self._scheduler.ask(None, lambda _: stats.read())
        if values is None:
            return None
        self._note_connection(bool(values["connected"]))
        return KVEventsStats(values)

    def _note_connection(self, connected: bool) -> None:
        if connected is not self._connected and self._client is not None:
            self._connected = connected
            if connected:
                log.info("kvevents: the sidecar is back")
            else:
                log.warning("kvevents: %s: %s", AWAY, self._client.last_error)

    @classmethod
    def build_kv_connector_stats(cls, data: Values | None = None) -> KVEventsStats:
        return KVEventsStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVEventsPromMetrics:
        return KVEventsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.take_back()
        self._scheduler.close()


def _is_tested() -> bool:
    return ".".join(vllm.__version__.split(".")[:2]) in TESTED


def _stream() -> int:
    """The one that vLLM's steps run on, in the thread that runs them."""
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream
