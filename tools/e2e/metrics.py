"""The connector's counters through vLLM's own classes: its log line and its Prometheus metrics."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY
from vllm import __version__
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

FIRST = {"loads": 2.0, "connected": 1.0, "lookups": 0.0}
THEN = {"loads": 3.0, "connected": 0.0, "deadlines_missed": 1.0, "of_another_version": 1.0}


def main() -> None:
    transfer = KVTransferConfig(
        kv_connector="KVEventsConnector",
        kv_connector_module_path="kvevents_service.engine.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"sidecar": "/nowhere/engine.sock"},
    )
    lines: list[str] = []
    log = KVConnectorLogging(transfer)
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    metrics = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    for values in (FIRST, THEN):
        log.observe(values)
        metrics.observe(values, 1)
    log.log(lambda text, *rest: lines.append(text % rest))
    log.log(lambda text, *rest: lines.append(text % rest))
    seen = {
        name: REGISTRY.get_sample_value(f"kvevents_connector_{name}", {"model_name": "tiny", "engine": "1"})
        for name in ("loads_total", "connected", "deadlines_missed_total", "lookups_total")
    }
    right = {"loads_total": 5.0, "connected": 0.0, "deadlines_missed_total": 1.0, "lookups_total": 0.0}
    once = len(lines) == 1 and all(part in lines[0] for part in ("loads=5.0", "deadlines_missed=1.0"))
    facts = {"ok": seen == right and once, "vllm": __version__, "seen": seen, "line": lines}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
