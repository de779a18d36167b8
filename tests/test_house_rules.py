"""The rules of the house, read from the source: who imports whom, and how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from statistics import median, quantiles

import pytest

import kvevents_service

PACKAGE = "kvevents_service"
ROOT = Path(kvevents_service.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

PURE = ("wire", "core")
SHELL_MODULES = {"asyncio", "zmq", "torch", "time", "random", "logging", "threading", "socket", "os", "uvloop"}
TORCH_FOLDERS = ("transfer", "engine")
TORCH_CHECK = Path("cli/serve.py")
"""Imports torch inside a function, to say what to install before anything starts."""

MAY_IMPORT = {
    "wire": {"wire", "errors"},
    "core": {"core", "wire", "errors"},
    "transfer": {"transfer", "core", "wire", "errors", "cuda"},
    "engine": {"engine", "core", "wire", "errors", "cuda"},
    "service": {
        *("service", "transfer", "core", "wire", "errors", "config", "source_config", "sockets", "curve"),
        *("handshakes", "nats_config", "version"),
        *("feed", "items", "lane"),  # the relay reads what a router reads
    },
    "cli": {
        *("cli", "subscriber", "service", "wire", "core", "config", "settings", "source_config", "sizes"),
        *("errors", "sockets", "engine", "curve", "handshakes", "nats_config", "version"),
    },
}
"""What a folder may import of this package."""


def relative(path: Path) -> Path:
    return path.relative_to(ROOT)


def folder(path: Path) -> str:
    """The folder of a file, or its own name at the top of the package."""
    return relative(path).parts[0].removesuffix(".py")


@lru_cache(None)
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, within functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}


def ours(path: Path) -> set[str]:
    """Folders and top modules of this package that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith(f"{PACKAGE}.")}


def in_folders(*folders: str) -> list[Path]:
    return [path for path in FILES if folder(path) in folders]


def name_of(path: Path) -> str:
    return str(relative(path))


@pytest.mark.parametrize("path", in_folders(*PURE), ids=name_of)
def test_the_pure_part_has_no_io_and_no_clock(path: Path) -> None:
    assert not packages(path) & SHELL_MODULES


@pytest.mark.parametrize("path", in_folders(*MAY_IMPORT), ids=name_of)
def test_a_folder_imports_only_what_is_below_it(path: Path) -> None:
    assert ours(path) <= MAY_IMPORT[folder(path)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_is_where_the_bytes_are(path: Path) -> None:
    if folder(path) not in TORCH_FOLDERS and relative(path) != TORCH_CHECK:
        assert "torch" not in packages(path)


def test_the_check_for_torch_is_lazy() -> None:
    at_the_top = [node for node in tree(ROOT / TORCH_CHECK).body if isinstance(node, ast.Import)]
    assert "torch" not in {alias.name for node in at_the_top for alias in node.names}


@pytest.mark.parametrize("path", [path for path in FILES if folder(path) != "cli"], ids=name_of)
def test_nothing_imports_the_cli(path: Path) -> None:
    if relative(path) != Path("__main__.py"):
        assert "cli" not in ours(path)


@pytest.mark.parametrize("module", ["", ".subscriber", ".cli", ".testing", ".core.scheduler", ".engine.client"])
def test_what_people_and_routers_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {PACKAGE}{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("module", [".subscriber", ".cli", ".engine.client"])
def test_what_only_serve_needs_is_not_needed_elsewhere(module: str) -> None:
    packages = ("torch", "numpy", "h11", "prometheus_client", "tomli_w", "rich", "nats")
    code = f"import sys\nfor name in {packages}: sys.modules[name] = None\nimport {PACKAGE}{module}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# how long things are


def test_a_file_is_one_noun() -> None:
    long = {name_of(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 350}
    assert not long


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines of a function without its docstring, blank lines and comments."""
    skipped: set[int] = set()
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        skipped = set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    texts = (source[line - 1].strip() for line in lines if line not in skipped)
    return sum(1 for text in texts if text and not text.startswith("#"))


def function_lengths() -> dict[str, int]:
    lengths = {}
    for path in FILES:
        source = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths[f"{name_of(path)}:{node.lineno} {node.name}"] = code_lines(node, source)
    return lengths


def test_functions_are_short() -> None:
    lengths = sorted(function_lengths().values())
    assert median(lengths) <= 8
    assert quantiles(lengths, n=10)[-1] <= 20


def test_no_function_is_long() -> None:
    assert not {name: lines for name, lines in function_lengths().items() if lines > 40}


# the front door


def test_the_front_door_is_small() -> None:
    assert len((ROOT / "__init__.py").read_text().splitlines()) < 40


def test_every_name_at_the_front_door_is_there() -> None:
    names = getattr(kvevents_service, "__all__", [])
    assert len(names) == len(set(names)) <= 20
    assert all(hasattr(kvevents_service, name) for name in names)
