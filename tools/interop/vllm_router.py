"""vllm-router 0.1.17 (Rust, from PyPI) with its `kv_aware` policy, in front of one HTTP worker that is ours.

It has no endpoint for its index. A completion request with a token-id prompt makes it decide, and at log level
debug it says how many prefix tokens it credits the worker with: exact, once the weights of all tiers are 1.
It credits the tokens on GPU and, from there on, those of the one other tier that carries the prompt furthest.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from consumer import MODEL, Answer, Consumer, Endpoints
from processes import Child, answers, ask, free_port
from truth import Held, run

from kvevents_service.testing import Chain

DECISION = re.compile(r"KV prefix decision.*credited_prefix_tokens=(\d+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
TIERS = ("--kv-penalty-host", "--kv-penalty-external", "--kv-penalty-disk")
LOG_LEVELS = "vllm_router_rs=info,vllm_router_rs::policies::kv_aware=debug"
DECIDE_S = 5.0
END_TOKEN = 0
"""One more token than whole blocks: of a prompt that is held in full it credits all tokens but one."""


class Worker(BaseHTTPRequestHandler):
    """An engine's HTTP side: healthy, and every completion is one token."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""

    def _answer(self, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class VllmRouter(Consumer):
    """The router, its worker's events taken from one output."""

    def __init__(self, home: Path, endpoints: Endpoints, directory: Path) -> None:
        self._worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
        threading.Thread(target=self._worker.serve_forever, daemon=True).start()
        self._port = free_port()
        arguments: list[str | Path] = [home / "bin/vllm-router", *self._flags(endpoints)]
        self._child = Child(
            arguments, directory / f"vllm-router-{self._port}.log", os.environ | {"RUST_LOG": LOG_LEVELS}
        )
        self._child.wait_until(lambda: answers(self._port, "/health"))

    def _flags(self, endpoints: Endpoints) -> list[str]:
        url = f"http://127.0.0.1:{self._worker.server_port}"
        return [
            *("--port", str(self._port), "--prometheus-port", str(free_port()), "--log-level", "debug"),
            *("--policy", "kv_aware", "--worker-urls", url),
            *("--kv-event-model", MODEL, "--kv-event-block-size", str(endpoints.block_size)),
            *("--kv-event-source", f"{url}={endpoints.pub}"),
            *("--kv-event-replay-source", f"{url}={endpoints.replay}"),
            *(part for tier in TIERS for part in (tier, "1")),
        ]

    def ask(self, chain: Chain) -> Answer:
        before = self._child.log.stat().st_size
        body = {"model": MODEL, "prompt": [*chain.token_ids, END_TOKEN], "max_tokens": 1}
        ask(self._port, "POST", "/v1/completions", body)
        deadline = time.monotonic() + DECIDE_S
        while time.monotonic() < deadline:
            if decided := DECISION.findall(self._log(before)):
                return (int(decided[-1]),)
            time.sleep(0.005)
        raise RuntimeError(f"{self._child!r} logged no decision: {self._log(before)[-500:]}")

    def _log(self, start: int) -> str:
        with self._child.log.open("rb") as log:
            log.seek(start)
            return ANSI.sub("", log.read().decode(errors="replace"))

    def expect(self, chain: Chain, held: Held) -> Answer:
        gpu = run(chain, held, "GPU")
        return (gpu + max(run(chain, held, medium, start=gpu) for medium in ("CPU", "STORAGE")),)

    def note(self) -> str:
        lines = self._log(0).splitlines()
        return next((line[:300] for line in reversed(lines) if "WARN" in line and "kv_index" in line), "")

    def close(self) -> None:
        self._child.stop()
        self._worker.shutdown()
        self._worker.server_close()
