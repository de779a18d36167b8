"""The points of an end-to-end run. Each is one line: whether it is ok, and what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import overhead
import phases
import routers
import streams
from phases import CROWD, CROWD_TOKENS, PREFIX, PROMPTS, Answer
from refusals import refusals
from stage import Engine, Home, Sidecar, Sizes

Facts = dict[str, Any]
HOST_BYTES = 64 << 20
SETTLE_S = 15.0
SIMPLE = ("SimpleOnCpu", "simple_on_cpu")
SIMPLE_EXTRA = {"cpu_bytes_to_use": HOST_BYTES}

WINDOWED = Sizes(blocks=24)
"""Of an engine whose model has two groups: each takes blocks of its own."""


def offload_to(socket: str, **more: Any) -> Facts:
    """Options of the connector. A busy machine may be slow to answer, and to load: that is no miss here."""
    return {"sidecar": socket, "lookup_timeout_s": 5.0, "load_timeout_s": 60.0, **more}


class Show:
    """One run. What several points need is made once: `plain` are the tokens of an engine without a sidecar."""

    def __init__(self, home: Home, interop: Path, directory: Path) -> None:
        self.home = home
        self.interop = interop
        self.directory = directory
        self._open: list[Engine | Sidecar] = []
        self._numbers = iter(range(1000))

    def close(self) -> None:
        for process in reversed(self._open):
            process.stop()
        self._open.clear()

    def engine(self, sidecar: Sidecar | None, **options: Any) -> Engine:
        socket = "/nowhere/engine.sock" if sidecar is None else sidecar.socket
        options.setdefault("extra", offload_to(socket))
        log = self.directory / f"engine-{next(self._numbers)}.log"
        made = Engine(self.home, log, **options)
        self._open.append(made)
        version = made.wait()["version"]
        if not version.startswith(options.get("version", "0.33")):
            raise RuntimeError(f"vLLM {version} in {self.home.directory}")
        return made

    def sidecar(self, host_bytes: int = HOST_BYTES, core: int | None = None) -> Sidecar:
        made = Sidecar(self.directory / f"sidecar-{next(self._numbers)}", host_bytes, core)
        self._open.append(made)
        made.start()
        return made

    # what several points need

    @cached_property
    def plain(self) -> tuple[list[Answer], list[list[int]]]:
        """Without a sidecar: all phases, and the crowd."""
        engine = self.engine(None)
        answers = phases.play(engine)
        crowd = engine.ask(*CROWD, max_tokens=CROWD_TOKENS)
        engine.stop()
        return answers, crowd["tokens"]

    @cached_property
    def ours(self) -> Facts:
        """An engine with a sidecar, in one process: its answers, both streams, and what a router knew."""
        sidecar = self.sidecar()
        router = routers.start(self.interop, sidecar, self.directory)
        engine = self.engine(sidecar)
        seen: Facts = {"sidecar": sidecar, "engine": engine}

        def look() -> None:
            seen["gpu_of_A"] = streams.prefix_tokens(self._gpu(engine), "GPU", PROMPTS["A"])
            seen["router"], seen["router_of_A"] = router.name, router.cpu_tokens(PROMPTS["A"], PREFIX, SETTLE_S)

        try:
            seen["answers"] = phases.play(engine, look)
        finally:
            router.close()
        seen["merged"] = streams.fold([*streams.replayed(engine.replay), *streams.replayed(sidecar.replay)])
        seen["reset"] = _reset(engine)
        seen["after_reset"] = phases.ask(engine, "A")
        return seen

    def _gpu(self, engine: Engine) -> dict[streams.Key, streams.Block]:
        return streams.fold(streams.replayed(engine.replay))

    # points

    def same_tokens(self) -> Iterator[Facts]:
        """1: hits of the tier give the tokens of a computed prompt; none after a reset, nor without a sidecar."""
        plain, ours = self.plain[0], self.ours
        after: Answer = ours["after_reset"]
        yield {
            "ok": min(phases.hits(ours["answers"])) >= PREFIX
            and phases.tokens(ours["answers"]) == phases.tokens(plain)
            and (after.tokens, after.cached) == (plain[0].tokens, 0)
            and ours["reset"]
            and not any(phases.hits(plain)),
            "hits": phases.hits(ours["answers"]),
            "reset": ours["reset"],
            "after_reset": after.cached,
            "without_sidecar": phases.hits(plain),
        }

    def same_events(self) -> Iterator[Facts]:
        """2: both streams fold to the CPU tier that SimpleCPUOffloadConnector announces."""
        engine = self.engine(None, connector=SIMPLE, extra=SIMPLE_EXTRA)
        answers = phases.play(engine)
        time.sleep(1.0)
        theirs = _cpu(self._gpu(engine))
        engine.stop()
        ours = _cpu(self.ours["merged"])
        different = [key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)]
        yield {
            "ok": not different and len(ours) > 0,
            "blocks": len(ours),
            "their_blocks": len(theirs),
            "different": [[key[2], str(ours.get(key)), str(theirs.get(key))] for key in different[:3]],
            "their_hits": phases.hits(answers),
        }

    def found_by_a_router(self) -> Iterator[Facts]:
        """3: a router finds A on the CPU tier when the engine's own blocks of it are gone."""
        ours = self.ours
        yield {
            "ok": ours["router_of_A"] >= PREFIX and not ours["gpu_of_A"],
            "router": ours["router"],
            "cpu_tokens": ours["router_of_A"],
            "gpu_tokens": ours["gpu_of_A"],
        }

    def deaths(self) -> Iterator[Facts]:
        """4: the sidecar dies while prompts run, and comes back; the engine dies, and comes back."""
        sidecar = self.sidecar()
        engine = self.engine(sidecar, one_process=False)
        phases.ask(engine, "A")
        engine.begin("ask", prompts=CROWD, max_tokens=CROWD_TOKENS)
        time.sleep(0.15)
        sidecar.kill()
        in_time = engine.idle
        crowd = engine.wait()
        sidecar.start()
        hit = self._hit_again(engine)
        freed = _reset(engine)
        engine.stop()
        sidecar.stop()
        yield {
            "ok": crowd["tokens"] == self.plain[1] and hit >= PREFIX and freed and not in_time,
            "what": "kill -9 of the sidecar",
            "right_tokens": crowd["tokens"] == self.plain[1],
            "hit_of_the_new_one": hit,
            "no_block_is_left_held": freed,
        }
        yield self._engine_dies()

    def _hit_again(self, engine: Engine) -> int:
        """Cached tokens of A once the new sidecar is found, which takes a moment, and A has been pushed out."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            hit = [phases.ask(engine, phase) for phase in ("A", "B", "C", "D", "E", "A")][-1].cached
            if hit >= PREFIX or time.monotonic() > deadline:
                return hit

    def _engine_dies(self) -> Facts:
        ours = self.ours
        first: Engine = ours["engine"]
        first.begin("ask", prompts=CROWD, max_tokens=CROWD_TOKENS)
        time.sleep(0.15)
        first.kill()
        engine = self.engine(ours["sidecar"])
        answer = phases.ask(engine, "A")
        engine.stop()
        right = answer.tokens == self.plain[0][0].tokens
        return {
            "ok": answer.cached >= PREFIX and right,
            "what": "kill -9 of the engine",
            "right_tokens": right,
            "hit_of_the_new_one": answer.cached,
        }

    def versions(self) -> Iterator[Facts]:
        """5: both versions of vLLM, in one process and in three, eager and lazy; several ranks, several groups."""
        plain = phases.tokens(self.plain[0])
        yield self._served(plain, version="0.32", one_process=True)
        yield self._served(plain, version="0.32", one_process=False, lazy=True)
        yield self._served(plain, version="0.33", one_process=False)
        yield self._served(plain, version="0.33", one_process=True, lazy=True)
        yield self._served(plain, version="0.33", one_process=False, sizes=Sizes(tensor_ranks=2))
        alone = self.engine(None, model="window", sizes=WINDOWED)
        windowed = phases.tokens(phases.play(alone))
        alone.stop()
        for lazy in (False, True):
            yield self._served(
                windowed, version="0.33", one_process=True, lazy=lazy, model="window", sizes=WINDOWED
            )

    def _served(self, right: list[list[int]], *, lazy: bool = False, **options: Any) -> Facts:
        sidecar = self.sidecar()
        engine = self.engine(sidecar, extra=offload_to(sidecar.socket, lazy=lazy), **options)
        answers = phases.play(engine)
        freed = _reset(engine)
        engine.stop()
        sidecar.stop()
        same = phases.tokens(answers) == right
        sizes = options.pop("sizes", Sizes())
        return {
            "ok": same and freed and min(phases.hits(answers)) >= PREFIX,
            **options,
            "lazy": lazy,
            "ranks": [sizes.tensor_ranks, sizes.pipeline_ranks],
            "right_tokens": same,
            "no_block_is_left_held": freed,
            "hits": phases.hits(answers),
        }

    def overhead(self) -> Iterator[Facts]:
        """6: time in the connector's hooks, against SimpleCPUOffloadConnector's, on prompts of 4k tokens."""
        cores = overhead.cores()
        sidecar = self.sidecar(overhead.HOST_BYTES, cores[1])
        yield from overhead.play(lambda **options: self.engine(None, **options), sidecar.socket, cores)
        sidecar.stop()

    def trouble(self) -> Iterator[Facts]:
        """7: what is wrong is said at start; a sidecar that hangs, with the options as they are by default."""
        yield from refusals(self.home, self.directory)
        sidecar = self.sidecar()
        engine = self.engine(sidecar, extra={"sidecar": sidecar.socket})
        right = phases.tokens(phases.play(engine))
        with sidecar.frozen():
            during = phases.tokens(phases.play(engine))
        hit, freed = self._hit_again(engine), _reset(engine)
        engine.stop()
        sidecar.stop()
        yield {
            "ok": during == right and hit >= PREFIX and freed,
            "what": "a sidecar that hangs for a while",
            "right_tokens": during == right,
            "hit_afterwards": hit,
            "no_block_is_left_held": freed,
        }

    @property
    def points(self) -> dict[int, Callable[[], Iterator[Facts]]]:
        return {
            1: self.same_tokens,
            2: self.same_events,
            3: self.found_by_a_router,
            4: self.deaths,
            5: self.versions,
            6: self.overhead,
            7: self.trouble,
        }


def _reset(engine: Engine) -> bool:
    """vLLM refuses while a block is in use: copies of the last step may be under way for a moment."""
    deadline = time.monotonic() + SETTLE_S
    while not engine.do("reset")["ok"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _cpu(resident: dict[streams.Key, streams.Block]) -> dict[streams.Key, streams.Block]:
    return {key: block for key, block in resident.items() if key[0] == "CPU"}
