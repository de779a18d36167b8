"""NVIDIA Dynamo's KV indexer (Rust, ai-dynamo-runtime 1.6.1), the standalone service without etcd and NATS.

It answers `/query` per instance with `gpu`, `cpu` and `disk`: the tokens held on the device, then how far host
memory carries the prompt on from there, then how far disk carries it on from there.
"""

from __future__ import annotations

import os
from pathlib import Path

from consumer import MODEL, Answer, Consumer, Endpoints
from processes import Child, answers, ask, free_port
from truth import Held, run

from kvevents_service.testing import Chain

INSTANCE = 1


class Dynamo(Consumer):
    """The indexer with one registered instance."""

    def __init__(self, home: Path, endpoints: Endpoints, directory: Path) -> None:
        self._port = free_port()
        arguments: list[str | Path] = [
            home / "bin/python",
            "-m",
            "dynamo.indexer",
            "--port",
            str(self._port),
            "--threads",
            "1",
        ]
        env = os.environ | {"NO_COLOR": "1", "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "DYN_LOG": "info"}
        self._child = Child(arguments, directory / f"dynamo-{self._port}.log", env)
        self._child.wait_until(lambda: answers(self._port, "/health"))
        self._register(endpoints)

    def _register(self, endpoints: Endpoints) -> None:
        body = {
            "instance_id": INSTANCE,
            "endpoint": endpoints.pub,
            "replay_endpoint": endpoints.replay,
            "model_name": MODEL,
            "block_size": endpoints.block_size,
            "dp_rank": 0,
        }
        ask(self._port, "POST", "/register", body)

    def ask(self, chain: Chain) -> Answer:
        body = {"token_ids": list(chain.token_ids), "model_name": MODEL}
        answer = ask(self._port, "POST", "/query", body)["instances"].get(str(INSTANCE), {})
        return tuple(answer.get(tier, 0) for tier in ("gpu", "cpu", "disk"))

    def expect(self, chain: Chain, held: Held) -> Answer:
        gpu = run(chain, held, "GPU")
        cpu = gpu + run(chain, held, "CPU", start=gpu)
        return (gpu, cpu, cpu + run(chain, held, "STORAGE", start=cpu))

    def note(self) -> str:
        lines = self._child.log.read_text(errors="replace").splitlines()
        return next((line[:300] for line in reversed(lines) if " WARN" in line or "ERROR" in line), "")

    def close(self) -> None:
        self._child.stop()
