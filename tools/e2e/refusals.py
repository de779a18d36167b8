"""What a vLLM says that is configured wrongly, or is of another version: real engines that end at their start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stage import HERE, Engine, Home, Sizes

Facts = dict[str, Any]
SOCKET = {"sidecar": "/nowhere/engine.sock"}
HOOKS_S = 120.0


class Case(NamedTuple):
    """The connector's options, more arguments of vLLM's, and what its log says once."""

    what: str
    extra: Facts
    llm: Facts
    says: str


REFUSED = (
    Case(
        "no sidecar", {}, {}, "kv_connector_extra_config.sidecar: expected the path of the sidecar's engine socket"
    ),
    Case(
        "unknown option",
        SOCKET | {"lasy": True},
        {},
        "kv_connector_extra_config.lasy: expected one of sidecar, lazy",
    ),
    Case(
        "prefix caching off",
        SOCKET,
        {"enable_prefix_caching": False},
        "enable_prefix_caching: expected true: blocks are known by their prefix's hash",
    ),
)
UNTESTED = "0.99.0"


def refusals(home: Home, directory: Path) -> Iterator[Facts]:
    """Each case on both versions; the tested versions named on another one; metrics on vLLM's own classes."""
    for version in ("0.32", "0.33"):
        for case in REFUSED:
            yield {"version": version, **_refused(home, directory / f"{version} {case.what}.log", version, case)}
        yield {"version": version, **_untested(home, directory / f"{version} untested.log", version)}
        yield {"version": version, **_metrics(home, version)}


def _start(home: Home, log: Path, version: str, extra: Facts, llm: Facts) -> Engine:
    return Engine(home, log, extra=extra, version=version, sizes=Sizes(llm=json.dumps(llm)), events=False)


def _refused(home: Home, log: Path, version: str, case: Case) -> Facts:
    engine = _start(home, log, version, case.extra, case.llm)
    try:
        engine.wait()
    except RuntimeError:
        said = log.read_text(errors="replace").count(f"ConfigError: {case.says}")
        return {"ok": said == 1, "what": case.what, "said": said}
    finally:
        engine.stop()
    return {"ok": False, "what": case.what, "started": True}


def _untested(home: Home, log: Path, version: str) -> Facts:
    engine = _start(home, log, version, SOCKET, {"version": UNTESTED})
    try:
        engine.wait()
        answered = bool(engine.ask(list(range(40)))["tokens"])
    finally:
        engine.stop()
    said = log.read_text(errors="replace").count(f"vLLM {UNTESTED}: this connector is tested with 0.32 and 0.33")
    return {"ok": answered and said == 1, "what": "untested version", "said": said, "answered": answered}


def _metrics(home: Home, version: str) -> Facts:
    """In vLLM's interpreter, without an engine."""
    environment = home.environment(version, one_process=True, ranks=1, core=None)
    command = [str(home.python), str(HERE / "metrics.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HOOKS_S, check=False)
    if done.returncode:
        return {"ok": False, "what": "metrics", "broke_off": done.stderr[-600:]}
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return {**facts, "what": "metrics"}
