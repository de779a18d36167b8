"""Where a relay is played: a real engine, a relay of its stream, and consumers of the relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from consumer import Endpoints, Kind
from processes import Child, free_port, loopback
from stage import SEED, Stage
from truth import NAME_BYTES, Held
from vllm_engine import BLOCK_SIZE

from kvevents_service.testing import Chain

GPU_BLOCKS = 24
"""Few, so that prompts push each other out."""
DRIVER = Path(__file__).with_name("vllm_engine.py")


class EngineHome(NamedTuple):
    """Where oracle/setup_engine.sh put an engine and make_tiny_model.py a model."""

    python: Path
    model: Path


class VllmEngine:
    """The engine's process, started and killed at will; its ports stay."""

    def __init__(self, home: EngineHome, log: Path) -> None:
        self.home = home
        self.log = log
        self.pub, self.replay = free_port(), free_port()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        pub = f"tcp://*:{self.pub}"  # vLLM binds only wildcards
        arguments = [self.home.python, DRIVER, self.home.model, pub, loopback(self.replay), str(GPU_BLOCKS)]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self._answer()

    def order(self, do: str, **more: object) -> Any:
        """Have it done, and wait."""
        assert self._process is not None, "started before it is ordered"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | more) + "\n")
        self._process.stdin.flush()
        return self._answer()["done"]

    def _answer(self) -> Any:
        assert self._process is not None, "started before it is asked"
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended: {self.log.read_text(errors='replace')[-1000:]}")
        return json.loads(line)

    def held(self) -> Held:
        """What is in its own prefix cache."""
        names = self.order("held")
        return {"GPU": frozenset(bytes.fromhex(name)[-NAME_BYTES:] for name in names)}

    def chain(self, tokens: list[int]) -> Chain:
        """The whole blocks of a prompt, with the engine's own hashes."""
        hashes = tuple(bytes.fromhex(name) for name in self.order("hashes", tokens=tokens))
        return Chain(hashes, tuple(tokens[: len(hashes) * BLOCK_SIZE]), BLOCK_SIZE)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()


class RelayProcess:
    """`kvevents relay` as a process, with one output per dialect."""

    def __init__(self, directory: Path, engine: VllmEngine, kinds: Sequence[Kind]) -> None:
        self.directory = directory
        self.outputs = {kind.dialect: Endpoints(loopback(free_port()), loopback(free_port())) for kind in kinds}
        self.config = directory / "relay.toml"
        self.config.write_text(self._toml(engine, {kind.dialect: kind.topic for kind in kinds}))
        self._child: Child | None = None

    def _toml(self, engine: VllmEngine, topics: dict[str, str]) -> str:
        lines = [f'state_dir = "{self.directory / "state"}"', "heartbeat_s = 0.5", "[[sources]]"]
        lines += [f'endpoint = "{loopback(engine.pub)}"', f'replay = "{loopback(engine.replay)}"', 'topic = "kv"']
        for dialect, topic in topics.items():
            pub, replay, _ = self.outputs[dialect]
            lines += ["[[outputs]]", f'pub = "{pub}"', f'replay = "{replay}"']
            lines += [f'dialect = "{dialect}"', f'topic = "{topic}"']
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        arguments: list[str | Path] = [sys.executable, "-m", "kvevents_service", "relay", "--config", self.config]
        log = self.directory / "relay.log"
        said = log.stat().st_size if log.exists() else 0
        child = self._child = Child(arguments, log, os.environ)
        child.wait_until(lambda: b'"ready":true' in log.read_bytes()[said:])

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None, "started before it is killed"
        self._child.kill()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


class RelayStage(Stage):
    """One scenario's engine, relay, prompts and consumers of the relay."""

    block_size = BLOCK_SIZE

    def __init__(self, directory: Path, kinds: Sequence[Kind], home: EngineHome) -> None:
        super().__init__(directory, kinds)
        self.engine = VllmEngine(home, directory / "engine.log")
        self.relay = RelayProcess(directory, self.engine, kinds)
        self.sidecar = self.relay  # type: ignore[assignment]  # outputs, start, kill and stop are what is asked of it
        self._tokens = Random(SEED)

    def held(self) -> Held:
        return self.engine.held()

    def prompt(self, blocks: int, behind: Chain | None = None) -> list[int]:
        """A new prompt, or one that goes on from another's blocks. It is asked for from now on."""
        tokens = list(behind.token_ids) if behind else []
        tokens += [self._tokens.randrange(1, 500) for _ in range(blocks * BLOCK_SIZE)]
        self.prompts.append(self.engine.chain(tokens))
        return [*tokens, 1]  # the last token is always computed

    def generate(self, prompts: int, blocks: int = 5) -> None:
        """New prompts, every second one with the first blocks of the one before it."""
        for number in range(prompts):
            behind = self.prompts[-1].part(0, 2) if number % 2 and self.prompts else None
            self.engine.order("generate", prompts=[self.prompt(blocks - 2 if behind else blocks, behind)])

    def close(self) -> None:
        super().close()
        self.engine.kill()
