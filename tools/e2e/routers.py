"""A router that listens to the sidecar: NVIDIA Dynamo's indexer where it is installed, else our own index."""

from __future__ import annotations

import time
from pathlib import Path

from index_thread import IndexThread
from processes import Child, answers, ask, free_port
from stage import Sidecar

from kvevents_service.subscriber import Source

BLOCK_SIZE = 32
MODEL = "e2e"
INSTANCE = 1
POLL_S = 0.2


class Asked:
    """Asks until the answer is as long as wanted, or time is up."""

    def cpu_tokens(self, prompt: list[int], wanted: int, wait_s: float) -> int:
        deadline = time.monotonic() + wait_s
        while (found := self._cpu(prompt)) < wanted and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def _cpu(self, prompt: list[int]) -> int:
        raise NotImplementedError


class Dynamo(Asked):
    """`dynamo.indexer` of ai-dynamo-runtime 1.6.1, which answers over HTTP."""

    name = "dynamo 1.6.1"

    def __init__(self, python: Path, sidecar: Sidecar, directory: Path) -> None:
        self._port = free_port()
        command: list[str | Path] = [python, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        self._child = Child(command, directory / "dynamo.log", {"NO_COLOR": "1", "DYN_LOG": "info"})
        self._child.wait_until(lambda: answers(self._port, "/health"))
        pub, replay = sidecar.outputs["dynamo"]
        body = {"instance_id": INSTANCE, "endpoint": pub, "replay_endpoint": replay, "model_name": MODEL}
        ask(self._port, "POST", "/register", body | {"block_size": BLOCK_SIZE, "dp_rank": 0})

    def _cpu(self, prompt: list[int]) -> int:
        found = ask(self._port, "POST", "/query", {"token_ids": prompt, "model_name": MODEL})["instances"]
        cpu: int = found.get(str(INSTANCE), {}).get("cpu", 0)
        return cpu

    def close(self) -> None:
        self._child.stop()


class Ours(Asked):
    """`Subscriber` and `PrefixIndex`."""

    name = "kvevents PrefixIndex"

    def __init__(self, sidecar: Sidecar) -> None:
        self._index = IndexThread(Source(*sidecar.outputs["vllm"]), BLOCK_SIZE)

    def _cpu(self, prompt: list[int]) -> int:
        found = self._index.match(prompt)
        return found.media.get("CPU", 0) if found else 0

    def close(self) -> None:
        self._index.close()


def start(interop: Path, sidecar: Sidecar, directory: Path) -> Dynamo | Ours:
    """`interop`: where tools/interop/setup.sh installs Dynamo."""
    python = interop / "dynamo/bin/python"
    return Dynamo(python, sidecar, directory) if python.exists() else Ours(sidecar)
