"""The processes of an end-to-end run: engines of either version, sidecars, and where they meet."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine import MARK
from processes import Child, free_port, loopback

ANSWER_S = 240.0
"""Bounds one answer of an engine, its start included."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONNECTOR = ("KVEventsConnector", "kvevents_service.engine.vllm")


class Home(NamedTuple):
    """An engine's virtual environment, and the models that are made in it."""

    directory: Path

    def environment(self, version: str, *, one_process: bool, ranks: int, core: int | None) -> dict[str, str]:
        """Only what an engine needs of this package goes in: its path, without its dependencies."""
        cores = sorted(os.sched_getaffinity(0)) if core is None else [core]
        bound = (
            "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            if ranks > 1 or core is not None
            else "auto"
        )
        paths = [str(ROOT), str(HERE)]
        if version == "0.33":
            paths.append(str(self.directory / "graft"))
        return os.environ | {
            "PYTHONPATH": ":".join(paths),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
            "VLLM_CPU_OMP_THREADS_BIND": bound,
        }

    @property
    def python(self) -> Path:
        return self.directory / "venv/bin/python"

    def model(self, kind: str) -> Path:
        """Where it is. It is made if it is not there yet."""
        path = self.directory / f"model-{kind}"
        if not (path / "config.json").exists():
            command = [str(self.python), str(HERE / "engine.py"), "--model", str(path), "--make", kind]
            subprocess.run(command, check=True, capture_output=True, timeout=ANSWER_S)
        return path


class Sizes(NamedTuple):
    """Of an engine: blocks of its pool, its longest prompt, tokens a step, ranks; more that `engine.py` takes."""

    blocks: int = 12
    max_len: int = 320
    step_tokens: int = 512
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    llm: str = "{}"


SMALL = Sizes()


def on_core(core: int | None) -> list[str]:
    """How a command begins that has this core, if any, and before other work if we may say so."""
    return [] if core is None else ["nice", "-n", "-10", "taskset", "--cpu-list", str(core)]


class Engine:
    """One vLLM. `ask` waits for its answer; `begin` and `wait` do in two steps."""

    def __init__(
        self,
        home: Home,
        log: Path,
        *,
        extra: dict[str, Any],
        version: str = "0.33",
        one_process: bool = True,
        connector: Sequence[str] = CONNECTOR,
        sizes: Sizes = SMALL,
        model: str = "plain",
        events: bool = True,
        core: int | None = None,
    ) -> None:
        self.replay = loopback(free_port())
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._log = log
        ranks = sizes.tensor_ranks * sizes.pipeline_ranks
        command = [*on_core(core), str(home.python), str(HERE / "engine.py"), "--model", str(home.model(model))]
        command += ["--connector", connector[0], "--module", connector[1], "--extra", json.dumps(extra)]
        for name, value in sizes._asdict().items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        command += ["--pub", loopback(free_port()), "--replay", self.replay] if events else []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env=home.environment(version, one_process=one_process, ranks=ranks, core=core),
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    self._answers.put(line.removeprefix(MARK))
                else:
                    log.write(line)
        self._answers.put(None)

    def begin(self, do: str, **more: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """The next answer. RuntimeError if the engine ends without one, or takes too long."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"the engine gave no answer: {self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def idle(self) -> bool:
        """An answer waits to be taken."""
        return not self._answers.empty()

    def ask(self, *prompts: list[int], max_tokens: int = 8) -> dict[str, Any]:
        self.begin("ask", prompts=prompts, max_tokens=max_tokens)
        return self.wait()

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        self.begin(what, **more)
        return self.wait()

    def kill(self) -> None:
        """kill -9 of this process and those it started."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def stop(self) -> None:
        """It ends when its commands do."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.kill()


class Sidecar:
    """`kvevents serve`, at the same places however often it is started, with one output per dialect."""

    def __init__(self, directory: Path, host_bytes: int, core: int | None = None) -> None:
        directory.mkdir(mode=0o700)
        self._core = core
        self.socket = str(directory / "engine.sock")
        self.log = directory / "sidecar.log"
        self.outputs = {name: (loopback(free_port()), loopback(free_port())) for name in ("vllm", "dynamo")}
        lines = [f'engine_socket = "{self.socket}"', f"host_bytes = {host_bytes}"]
        for dialect, (pub, replay) in self.outputs.items():
            lines += ["[[outputs]]", f'pub = "{pub}"', f'replay = "{replay}"', f'dialect = "{dialect}"']
        self._config = directory / "serve.toml"
        self._config.write_text("\n".join(lines) + "\n")
        self._child: Child | None = None

    @property
    def replay(self) -> str:
        return self.outputs["vllm"][1]

    def start(self) -> None:
        said = self.log.stat().st_size if self.log.exists() else 0
        command: list[str | Path] = [
            *on_core(self._core),
            sys.executable,
            "-m",
            "kvevents_service",
            "serve",
            "--config",
            self._config,
        ]
        child = self._child = Child(command, self.log, os.environ | {"PYTHONPATH": str(ROOT)})
        child.wait_until(lambda: b'"ready":true' in self.log.read_bytes()[said:])

    def kill(self) -> None:
        assert self._child is not None, "started before it is killed"
        self._child.kill()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Its process is stopped, and its connections live."""
        assert self._child is not None, "started before it is frozen"
        self._child.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._child.send(signal.SIGCONT)

    def stop(self) -> None:
        if self._child is not None and self._child.running:
            self._child.stop()
