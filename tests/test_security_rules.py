"""What no file of this repository may do: run what it reads, or take a secret where `ps` shows it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvevents_service.cli import kvevents

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for folder in ("kvevents_service", "examples") for path in (ROOT / folder).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "load_pickle", "read_pickle"}
UNPICKLING_LOADS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("yaml", "load")}
SECRET = re.compile(r"secret|salt|password|token$")


def unsafe(source: str) -> Iterator[str]:
    """What of a program could run bytes that came from somewhere else."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    if name in UNSAFE_CALLS:
        yield name
    owner = called.value if isinstance(called, ast.Attribute) else None
    if isinstance(owner, ast.Name) and (owner.id, name) in UNPICKLING_LOADS:
        yield f"{owner.id}.{name}"
    if any(word.arg in ("allow_pickle", "shell") and getattr(word.value, "value", True) for word in node.keywords):
        yield "allow_pickle or shell"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    assert list(unsafe(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, _pickle",
        "from cloudpickle import loads",
        "torch.load(f)",
        "np.load(f)",
        "numpy.load(f, allow_pickle=True)",
        "load(f, allow_pickle=flag)",
        "socket.recv_pyobj()",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_rule_sees_what_it_must(source: str) -> None:
    assert list(unsafe(source))


def options() -> Iterator[tuple[str, click.Option]]:
    for name, command in kvevents.commands.items():
        yield from ((name, option) for option in command.params if isinstance(option, click.Option))


def test_every_test_that_the_threat_model_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "security.md").read_text()))
    assert len(named) > 15
    assert not [path for path in named if not (ROOT / path).is_file()]


def test_a_secret_is_only_ever_in_a_file() -> None:
    """An option that speaks of a secret names a file: options stand in `ps` and in manifests."""
    named = {f"{name} {flag}" for name, option in options() for flag in option.opts if SECRET.search(flag)}
    assert named == {
        "serve --curve-secret-file",
        "serve --hash-salt-file",
        "tail --curve-secret-file",
        "snapshot --curve-secret-file",
    }
